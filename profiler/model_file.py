"""Fitted models on disk: one readable JSON and, beside it under the same stem, the arrays it names (npz, no pickle).

A model file is data from a stranger until checked: sizes before anything is unpacked, then every name, shape and value.
Nothing in it can name a path, and nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.attention_fit import AttentionFit
from profiler.attention_law import BatchLaw, DecodeLaw
from profiler.device_fit import Collective, DeviceFit
from profiler.errors import ProfileError
from profiler.lattice import Lattice
from profiler.row_curves import RowCurve

Array = NDArray[np.float64]

FORMAT = "charioteer fitted model"
VERSION = 1
MAX_JSON_BYTES = 4 << 20
MAX_ARRAY_BYTES = 64 << 20
MAX_ARRAYS = 20_000
MAX_MISS = 20.0
"""Largest |log(measured / law)| that is believed."""

_AXES = {"decode": 2, "prefill": 2, "mixed": 4}
_REGION = ("tokens", "prefix", "decodes", "context")


def shipped(gpu: str) -> Path | None:
    """Path of the fitted model that comes with the package for a GPU of the hardware table, or None."""
    path = Path(str(resources.files("profiler").joinpath(f"data/fitted/{gpu}.json")))
    return path if path.is_file() else None


def write_model(fit: DeviceFit, path: str | Path) -> None:
    """Write PATH (.json) and its .npz, each whole or not at all."""
    path = Path(path)
    if path.suffix != ".json":
        raise ProfileError(f"{path}: found suffix {path.suffix!r}, expected .json")
    arrays: dict[str, Array] = {}

    def keep(name: str, values: Any) -> str:
        arrays[name] = np.asarray(values, np.float32)
        return name

    def curve(item: RowCurve, name: str) -> dict[str, Any]:
        rows, us = keep(f"{name}.rows", item.rows), keep(f"{name}.us", item.us)
        return {"operator": item.operator, "n": item.n, "k": item.k, "rows": rows, "us": us}

    def lattice(item: Lattice, name: str) -> dict[str, Any]:
        axes = [keep(f"{name}.axis{index}", axis) for index, axis in enumerate(item.axes)]
        return {"axes": axes, "values": keep(f"{name}.values", item.values)}

    document = {
        "format": FORMAT,
        "version": VERSION,
        "gpu": fit.gpu,
        "dtype": fit.dtype,
        "provenance": dict(fit.provenance),
        "profiled": [list(pair) for pair in fit.profiled],
        "errors": {key: dict(value) for key, value in fit.errors.items()},
        "noise": dict(fit.noise),
        "curves": [curve(item, f"curve{index}") for index, item in enumerate(fit.curves)],
        "collectives": [
            {"participants": item.participants, **curve(item.curve, f"collective{index}")}
            for index, item in enumerate(fit.collectives)
        ],
        "attention": [
            {
                "heads": item.heads,
                "kv_heads": item.kv_heads,
                "head_dim": item.head_dim,
                "sms": item.sms,
                "batch_law": item.batch_law.as_dict(),
                "decode_law": item.decode_law.as_dict(),
                "uneven_decode": [list(pair) for pair in item.uneven_decode],
                "uneven_token_us": item.uneven_token_us,
                "region": dict(item.region),
                "misses": {key: lattice(grid, f"attention{index}.{key}") for key, grid in item.misses.items()},
            }
            for index, item in enumerate(fit.attention)
        ],
    }
    target = path.with_suffix(".npz")
    part = target.with_name(target.name + ".part")
    with part.open("wb") as file:
        np.savez_compressed(file, **arrays)
    document["arrays_sha256"] = hashlib.sha256(part.read_bytes()).hexdigest()
    text = path.with_name(path.name + ".part")
    text.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    part.replace(target)
    text.replace(path)


def read_model(path: str | Path) -> DeviceFit:
    """Read and check a model file; raises ProfileError with the file and the entry at fault."""
    path = Path(path)
    if path.suffix == ".npz":
        path = path.with_suffix(".json")
    document = _read_json(path)
    entry = _Entry(path, "", document)
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        found = f"{document.get('format')!r} version {document.get('version')!r}"
        raise ProfileError(f"{path}: found {found}, expected {FORMAT!r} version {VERSION}")
    arrays = _read_arrays(path.with_suffix(".npz"), entry.text("arrays_sha256"))
    return DeviceFit(
        gpu=entry.text("gpu"),
        dtype=entry.text("dtype"),
        curves=tuple(_curve(item, arrays) for item in entry.items("curves")),
        attention=tuple(_attention(item, arrays) for item in entry.items("attention")),
        collectives=tuple(
            Collective(item.count("participants", least=2), _curve(item, arrays)) for item in entry.items("collectives")
        ),
        profiled=entry.pairs("profiled", lambda pair: (str(pair[0])[:200], int(pair[1]))),
        provenance=entry.mapping("provenance"),
        errors={key: dict(value) for key, value in entry.mapping("errors").items() if isinstance(value, dict)},
        noise={key: float(value) for key, value in entry.mapping("noise").items() if isinstance(value, int | float)},
    )


class _Entry:
    """One JSON object with its place in the file, so that every complaint names both."""

    def __init__(self, path: Path, where: str, values: Any) -> None:
        self.path, self.where = path, where
        if not isinstance(values, dict):
            self.fail("", values, "a JSON object")
        self.values: dict[str, Any] = values

    def fail(self, key: str, found: Any, expected: str) -> None:
        place = ".".join(part for part in (self.where, key) if part)
        raise ProfileError(f"{self.path}: {place}: found {str(found)[:60]!r}, expected {expected}")

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or len(value) > 200:
            self.fail(key, value, "a short text")
        return str(value)

    def number(self, key: str, low: float, high: float) -> float:
        value = self.values.get(key)
        good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not good:
            self.fail(key, value, f"a number from {low:g} to {high:g}")
        return float(value)  # type: ignore[arg-type]

    def count(self, key: str, least: int = 0) -> int:
        value = self.number(key, least, 1 << 40)
        if value != int(value):
            self.fail(key, value, "a whole number")
        return int(value)

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self.fail(key, value, "a JSON object")
        return dict(value)

    def items(self, key: str) -> list[_Entry]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or len(value) > MAX_ARRAYS:
            self.fail(key, value, "a list")
        return [_Entry(self.path, f"{key}[{index}]", item) for index, item in enumerate(value)]

    def pairs(self, key: str, convert: Callable[[Any], Any]) -> tuple[Any, ...]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, list) and len(item) == 2 for item in value):
            self.fail(key, value, "a list of pairs")
        try:
            return tuple(convert(item) for item in value)
        except (TypeError, ValueError):
            self.fail(key, value, "pairs of the right kind")
            raise AssertionError from None

    def array(self, key: str, arrays: Mapping[str, Array]) -> Array:
        name = self.values.get(key)
        if not isinstance(name, str) or name not in arrays:
            self.fail(key, name, "the name of an array of the .npz")
        return arrays[str(name)]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ProfileError(f"{path}: found {path.stat().st_size} bytes, expected at most {MAX_JSON_BYTES}")
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file; expected a fitted model (.json with .npz beside it)") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{path}: cannot be read as JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(document, dict):
        raise ProfileError(f"{path}: found {type(document).__name__}, expected a JSON object")
    return document


def _read_arrays(path: Path, digest: str) -> dict[str, Array]:
    """All arrays as float64, checked for size before unpacking, for type and for finite values."""
    try:
        if path.stat().st_size > MAX_ARRAY_BYTES:
            raise ProfileError(f"{path}: found {path.stat().st_size} bytes, expected at most {MAX_ARRAY_BYTES}")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ProfileError(f"{path}: does not belong to the .json beside it (arrays_sha256 differs)")
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if len(members) > MAX_ARRAYS or sum(member.file_size for member in members) > MAX_ARRAY_BYTES:
                raise ProfileError(f"{path}: unpacks to more than {MAX_ARRAY_BYTES} bytes or {MAX_ARRAYS} arrays")
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file; a fitted model is a .json with an .npz beside it") from None
    except ProfileError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, SyntaxError) as error:
        raise ProfileError(f"{path}: cannot be read as arrays: {str(error).splitlines()[0]}") from None
    for name, values in arrays.items():
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f" or values.ndim > 4 or not values.size:
            raise ProfileError(f"{path}: {name}: found {getattr(values, 'dtype', type(values))}, expected floats")
        if not np.isfinite(values).all():
            raise ProfileError(f"{path}: {name}: found a value that is not finite")
    return {name: values.astype(np.float64) for name, values in arrays.items()}


def _curve(entry: _Entry, arrays: Mapping[str, Array]) -> RowCurve:
    rows, us = entry.array("rows", arrays), entry.array("us", arrays)
    if rows.ndim != 1 or rows.shape != us.shape:
        entry.fail("us", us.shape, f"one dimension and as many values as rows {rows.shape}")
    if (np.diff(rows) <= 0).any() or rows[0] < 0:
        entry.fail("rows", "descending or negative values", "ascending row counts")
    if (us <= 0).any() or us.max() > 1e12:
        entry.fail("us", "a time out of bounds", "microseconds above 0")
    return RowCurve(entry.text("operator"), entry.count("n"), entry.count("k"), rows, us)


def _attention(entry: _Entry, arrays: Mapping[str, Array]) -> AttentionFit:
    misses = {}
    for key, value in entry.mapping("misses").items():
        if key not in _AXES:
            entry.fail("misses", key, f"one of {', '.join(_AXES)}")
        misses[key] = _lattice(_Entry(entry.path, f"{entry.where}.misses.{key}", value), _AXES[key], arrays)
    region = _Entry(entry.path, f"{entry.where}.region", entry.values.get("region"))
    return AttentionFit(
        heads=entry.count("heads", least=1),
        kv_heads=entry.count("kv_heads", least=1),
        head_dim=entry.count("head_dim", least=1),
        sms=entry.count("sms", least=1),
        batch_law=BatchLaw(**_law(entry, "batch_law", BatchLaw())),
        decode_law=DecodeLaw(**_law(entry, "decode_law", DecodeLaw())),
        misses=misses,
        uneven_decode=_slopes(entry),
        uneven_token_us=entry.number("uneven_token_us", 0, 1e3),
        region={key: region.count(key) for key in _REGION},
    )


def _law(entry: _Entry, key: str, law: BatchLaw | DecodeLaw) -> dict[str, float]:
    values = _Entry(entry.path, f"{entry.where}.{key}", entry.values.get(key))
    return {name: values.number(name, 1.0 if name == "join" else 0.0, 1e9) for name in law.as_dict()}


def _slopes(entry: _Entry) -> tuple[tuple[float, float], ...]:
    slopes = entry.pairs("uneven_decode", lambda pair: (float(pair[0]), float(pair[1])))
    numbers = [pair[0] for pair in slopes]
    if numbers != sorted(set(numbers)) or not all(n >= 1 and 0 <= us <= 1e3 and math.isfinite(n) for n, us in slopes):
        entry.fail("uneven_decode", slopes, "ascending decodes, microseconds from 0 to 1000")
    return slopes


def _lattice(entry: _Entry, dimensions: int, arrays: Mapping[str, Array]) -> Lattice:
    names = entry.values.get("axes")
    if not isinstance(names, list) or len(names) != dimensions or not all(str(name) in arrays for name in names):
        entry.fail("axes", names, f"{dimensions} names of arrays of the .npz")
    axes = [arrays[str(name)] for name in names or []]
    values = entry.array("values", arrays)
    if any(axis.ndim != 1 or (np.diff(axis) <= 0).any() or axis[0] < 0 for axis in axes):
        entry.fail("axes", "descending or negative values", "ascending coordinates")
    if values.shape != tuple(len(axis) for axis in axes):
        entry.fail("values", values.shape, f"shape {tuple(len(axis) for axis in axes)}")
    if np.abs(values).max() > MAX_MISS:
        entry.fail("values", np.abs(values).max(), f"at most {MAX_MISS}")
    return Lattice(axes, values)
