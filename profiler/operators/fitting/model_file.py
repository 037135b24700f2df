"""Fitted models on disk: one readable JSON and, beside it under the same stem, its numbers (npz, no pickle).

The npz holds one long row of floats; wherever the JSON needs an array it says [where it starts, its shape ...].

A model file is data from a stranger until checked: sizes before anything is unpacked, then every name, shape and value.
Nothing in it can name a path, and nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.edges.input_file import checked_file, read_json
from policies.edges.output_file import whole_file
from policies.edges.settings import listed
from profiler.errors import ProfileError
from profiler.measurements.profile import LAYER_GEMMS
from profiler.operators.fitting.attention_family import AttentionFamily
from profiler.operators.fitting.attention_fit import AttentionFit
from profiler.operators.fitting.checked_json import Entry
from profiler.operators.fitting.device_fit import Collective, DeviceFit
from profiler.operators.fitting.error_sizes import as_document, read_spread
from profiler.operators.laws.decode_law import DecodeLaw
from profiler.operators.laws.gemm_law import BETWEEN, TILES, GemmLaw
from profiler.operators.laws.lattice import Lattice
from profiler.operators.laws.measured_grid import MeasuredGrid
from profiler.operators.laws.prefill_law import PrefillLaw
from profiler.operators.laws.row_curves import RowCurve
from profiler.operators.laws.smooth_batch_law import BatchLaw

Array = NDArray[np.float64]

FORMAT = "charioteer fitted model"
VERSION = 4
MOST_SLOTS = 1 << 16
MAX_JSON_BYTES = 4 << 20
MAX_ARRAY_BYTES = 64 << 20
MAX_MISS = 20.0
"""Largest |log(measured / law)| that is believed."""

_ADDED = ("seek", "seek_many", "solo")
"""Coefficients that files written before they were known lack, and that are then zero."""

_AXES = {"decode": 2, "single": 1, "prefill": 2, "mixed": 4}
_REGION = ("tokens", "prefix", "decodes", "context")


def shipped(gpu: str, part: str = "") -> Path | None:
    """Path of the fitted model that comes with the package for a GPU of the hardware table, or None.

    part: of products and attention in fewer bits (a format of `profiler.specs.number_format.FORMATS`), or "experts".
    """
    name = f"{gpu}.{part}" if part else gpu
    path = Path(str(resources.files("profiler").joinpath(f"data/fitted/{name}.json")))
    return path if path.is_file() else None


def write_model(fit: DeviceFit, path: str | Path) -> None:
    """Write PATH (.json) and its .npz, each whole or not at all."""
    path = Path(path)
    if path.suffix != ".json":
        raise ProfileError(f"{path}: found suffix {path.suffix!r}, expected .json")
    pieces: list[NDArray[np.float32]] = []
    kept: dict[bytes, list[int]] = {}

    def keep(values: Any) -> list[int]:
        piece = np.asarray(values, np.float32)
        key = repr(piece.shape).encode() + piece.tobytes()
        if key not in kept:
            kept[key] = [sum(one.size for one in pieces), *piece.shape]
            pieces.append(piece)
        return kept[key]

    def curve(item: RowCurve) -> dict[str, Any]:
        return {"operator": item.operator, "n": item.n, "k": item.k, "rows": keep(item.rows), "us": keep(item.us)}

    def lattice(item: Lattice) -> dict[str, Any]:
        return {"axes": [keep(axis) for axis in item.axes], "values": keep(item.values)}

    def grids(item: AttentionFamily | AttentionFit) -> dict[str, Any]:
        return {
            name: {"axes": [keep(axis) for axis in grid.axes], "known": keep(grid.known)}
            for name, grid in item.grids.items()
        }

    document = {
        "format": FORMAT,
        "version": VERSION,
        "gpu": fit.gpu,
        "dtype": fit.dtype,
        "provenance": dict(fit.provenance),
        "terms": dict(fit.terms),
        "profiled": [list(pair) for pair in fit.profiled],
        "errors": {key: dict(value) for key, value in fit.errors.items()},
        "noise": dict(fit.noise),
        "worst": list(fit.worst),
        "spreads": [as_document(item, keep) for item in fit.spreads.values()],
        "curves": [curve(item) for item in fit.curves],
        "collectives": [{"participants": item.participants, **curve(item.curve)} for item in fit.collectives],
        "gemm_law": fit.gemm_law and asdict(fit.gemm_law),
        "families": [
            {
                "head_dim": item.head_dim,
                "group": item.group,
                "sms": item.sms,
                "kernel": item.kernel,
                "batch_law": item.batch_law.as_dict(),
                "decode_law": item.decode_law.as_dict(),
                "prefill_law": item.prefill_law and item.prefill_law.as_dict(),
                "region": dict(item.region),
                "grids": grids(item),
                "misses": {key: lattice(grid) for key, grid in item.misses.items()},
            }
            for item in fit.families
        ],
        "attention": [
            {
                "heads": item.heads,
                "kv_heads": item.kv_heads,
                "head_dim": item.head_dim,
                "sms": item.sms,
                "batch_law": item.batch_law.as_dict(),
                "decode_law": item.decode_law.as_dict(),
                "prefill_law": item.prefill_law and item.prefill_law.as_dict(),
                "uneven_decode": [list(pair) for pair in item.uneven_decode],
                "uneven_token_us": item.uneven_token_us,
                "streams_beside": item.streams_beside,
                "grouped": item.grouped,
                "straight": item.straight,
                "region": dict(item.region),
                "grids": grids(item),
                "misses": {key: lattice(grid) for key, grid in item.misses.items()},
            }
            for item in fit.attention
        ],
    }
    with whole_file(path.with_suffix(".npz"), ProfileError) as part:
        with part.open("wb") as file:
            np.savez_compressed(file, values=np.concatenate([piece.reshape(-1) for piece in pieces]))
        document["arrays_sha256"] = hashlib.sha256(part.read_bytes()).hexdigest()
        with whole_file(path, ProfileError) as text:
            text.write_text(readable(document), encoding="utf-8")


def readable(document: Mapping[str, Any]) -> str:
    """JSON with one line an entry of a list, one line a value otherwise."""
    lines = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            inside = ",\n  ".join(json.dumps(item) for item in value)
            lines.append(f" {json.dumps(key)}: [\n  {inside}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_model(path: str | Path) -> DeviceFit:
    """Read and check a model file; raises ProfileError with the file and the entry at fault."""
    path = Path(path)
    if path.suffix == ".npz":
        path = path.with_suffix(".json")
    document = read_document(path)
    entry = Entry(path, "", document)
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        found = f"{document.get('format')!r} version {document.get('version')!r}"
        raise ProfileError(f"{path}: found {found}, expected {FORMAT!r} version {VERSION}")
    arrays = read_values(path.with_suffix(".npz"), entry.text("arrays_sha256"))
    return DeviceFit(
        gpu=entry.text("gpu"),
        dtype=entry.text("dtype"),
        curves=tuple(_curve(item, arrays) for item in entry.items("curves")),
        attention=tuple(_attention(item, arrays) for item in entry.items("attention")),
        families=tuple(_family(item, arrays) for item in entry.items("families")),
        gemm_law=_gemm_law(entry),
        collectives=tuple(
            Collective(item.count("participants", least=2), _curve(item, arrays)) for item in entry.items("collectives")
        ),
        profiled=entry.pairs("profiled", lambda pair: (str(pair[0])[:200], int(pair[1]))),
        terms=entry.mapping("terms"),
        provenance=entry.mapping("provenance"),
        errors={k: Entry(path, f"errors.{k}", v).numbers("p90") for k, v in entry.mapping("errors").items()},
        worst=listed(f"{path}: worst", entry.values.get("worst") or (), str, ProfileError),
        noise=Entry(path, "noise", entry.mapping("noise")).numbers(*entry.mapping("noise")),
        spreads={item.name: item for item in (read_spread(one, arrays) for one in entry.items("spreads"))},
    )


def read_document(path: Path) -> dict[str, Any]:
    document = read_json(path, ProfileError, MAX_JSON_BYTES)
    if not isinstance(document, dict):
        raise ProfileError(f"{path}: found {type(document).__name__}, expected a JSON object")
    return document


def read_values(path: Path, digest: str) -> Array:
    """The long row of floats, checked for size before unpacking, for type and for finite values."""
    try:
        checked_file(path, ProfileError, MAX_ARRAY_BYTES)
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ProfileError(f"{path}: does not belong to the .json beside it (arrays_sha256 differs)")
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if [member.filename for member in members] != ["values.npy"]:
                raise ProfileError(f"{path}: found {[member.filename for member in members][:3]}, expected values.npy")
            if members[0].file_size > MAX_ARRAY_BYTES:
                raise ProfileError(f"{path}: unpacks to more than {MAX_ARRAY_BYTES} bytes")
        with np.load(path, allow_pickle=False) as data:
            values = data["values"]
    except ProfileError:
        raise
    except Exception as error:  # zipfile and numpy raise a dozen kinds for what is no archive of theirs
        words = (str(error) or type(error).__name__).splitlines()[0]
        raise ProfileError(f"{path}: cannot be read as arrays: {words[:200]}") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f" or values.ndim != 1:
        raise ProfileError(
            f"{path}: values: found {getattr(values, 'dtype', type(values))}, expected one row of floats"
        )
    if not np.isfinite(values).all():
        raise ProfileError(f"{path}: values: found one that is not finite")
    return values.astype(np.float64)


def _curve(entry: Entry, arrays: Array) -> RowCurve:
    rows, us = entry.array("rows", arrays), entry.array("us", arrays)
    if rows.ndim != 1 or rows.shape != us.shape:
        entry.fail("us", us.shape, f"one dimension and as many values as rows {rows.shape}")
    if (np.diff(rows) <= 0).any() or rows[0] < 0:
        entry.fail("rows", "descending or negative values", "ascending row counts")
    if (us <= 0).any() or us.max() > 1e12:
        entry.fail("us", "a time out of bounds", "microseconds above 0")
    operator = entry.text("operator")
    # A linear layer has a width in and out, other operators one, and what goes between devices is counted in bytes.
    into, out = int(operator in (*LAYER_GEMMS, "gemm", BETWEEN, "head")), int(operator not in ("all_reduce", "send"))
    return RowCurve(operator, entry.count("n", out), entry.count("k", into), rows, us)


def _gemm_law(entry: Entry) -> GemmLaw | None:
    if entry.values.get("gemm_law") is None:
        return None
    law = Entry(entry.path, "gemm_law", entry.values["gemm_law"])
    shares = law.values.get("efficiency")
    if not isinstance(shares, list) or len(shares) != len(TILES):
        law.fail("efficiency", shares, f"{len(TILES)} shares")
    each = Entry(entry.path, "gemm_law.efficiency", {str(index): share for index, share in enumerate(shares or [])})
    return GemmLaw(
        efficiency=tuple(each.number(str(index), 1e-6, 2.0) for index in range(len(TILES))),
        memory=law.number("memory", 1e-6, 2.0),
        launch_us=law.number("launch_us", 0, 1e6),
        tile_us=law.number("tile_us", 0, 1e6),
        sms=law.count("sms", least=1),
        flops_per_us=law.number("flops_per_us", 1.0, 1e15),
        bytes_per_us=law.number("bytes_per_us", 1.0, 1e15),
        **{name: law.number(name, 0.1, 8.0) for name in ("weight_bytes", "input_bytes") if name in law.values},
    )


def _misses(entry: Entry, arrays: Array) -> dict[str, Lattice]:
    misses = {}
    for key, value in entry.mapping("misses").items():
        axes = _AXES.get(key.partition(":")[0])
        if axes is None:
            entry.fail("misses", key, f"one of {', '.join(_AXES)}")
        misses[key] = _lattice(Entry(entry.path, f"{entry.where}.misses.{key}", value), axes or 0, arrays)
    return misses


def _grids(entry: Entry, arrays: Array) -> dict[str, MeasuredGrid]:
    """Files of earlier versions have none: then nothing of their attention counts as measured."""
    grids = {}
    for key, value in entry.mapping("grids").items():
        dimensions = _AXES.get(key.partition(":")[0])
        item = Entry(entry.path, f"{entry.where}.grids.{key}", value)
        if dimensions is None:
            entry.fail("grids", key, f"one of {', '.join(_AXES)}")
        axes = _axes(item, dimensions or 0, arrays)
        known = item.array("known", arrays)
        if known.shape != tuple(len(axis) for axis in axes):
            item.fail("known", known.shape, f"shape {tuple(len(axis) for axis in axes)}")
        grids[key] = MeasuredGrid(axes, known > 0)
    return grids


def _family(entry: Entry, arrays: Array) -> AttentionFamily:
    misses = _misses(entry, arrays)
    if not {"decode", "prefill"} <= set(misses):
        entry.fail("misses", sorted(misses), "decode and prefill")
    if entry.text("kernel") not in ("fa2", "fa3"):
        entry.fail("kernel", entry.values["kernel"], "fa2 or fa3")
    region = Entry(entry.path, f"{entry.where}.region", entry.values.get("region"))
    return AttentionFamily(
        head_dim=entry.count("head_dim", least=1),
        group=entry.count("group", least=1),
        sms=entry.count("sms", least=1),
        kernel=entry.text("kernel"),
        batch_law=_batch_law(entry),
        decode_law=_decode_law(entry),
        prefill_law=_prefill_law(entry),
        misses=misses,
        region={key: region.count(key) for key in ("streams", "context", "tokens", "query_heads")},
        grids=_grids(entry, arrays),
    )


def _attention(entry: Entry, arrays: Array) -> AttentionFit:
    region = Entry(entry.path, f"{entry.where}.region", entry.values.get("region"))
    return AttentionFit(
        heads=entry.count("heads", least=1),
        kv_heads=entry.count("kv_heads", least=1),
        head_dim=entry.count("head_dim", least=1),
        sms=entry.count("sms", least=1),
        batch_law=_batch_law(entry),
        decode_law=_decode_law(entry),
        prefill_law=_prefill_law(entry),
        misses=_misses(entry, arrays),
        uneven_decode=_slopes(entry),
        uneven_token_us=entry.number("uneven_token_us", 0, 1e3),
        streams_beside=entry.values.get("streams_beside") is True,
        grouped=entry.values.get("grouped") is not False,
        straight=entry.number("straight", 0.0, 1.0),
        region={key: region.count(key) for key in _REGION},
        grids=_grids(entry, arrays),
    )


def _batch_law(entry: Entry) -> BatchLaw:
    values = Entry(entry.path, f"{entry.where}.batch_law", entry.values.get("batch_law"))
    return BatchLaw(**_coefficients(values, BatchLaw().as_dict()) | {"query_rows": values.count("query_rows", 1)})


def _decode_law(entry: Entry) -> DecodeLaw:
    values = Entry(entry.path, f"{entry.where}.decode_law", entry.values.get("decode_law"))
    counts = {name: values.count(name, least, MOST_SLOTS) for name, least in (("slots", 1), ("splits", 0))}
    if "stride" in values.values:
        counts["stride"] = values.count("stride", 1, MOST_SLOTS)
    return DecodeLaw(**_coefficients(values, DecodeLaw().as_dict()), **counts, even=values.values.get("even") is True)


def _coefficients(values: Entry, names: Mapping[str, Any]) -> dict[str, Any]:
    floats = [name for name, value in names.items() if isinstance(value, float)]
    return {
        name: values.number(name, 1.0 if name in ("join", "streams") else 0.0, 1e9)
        for name in floats
        if name in values.values or name not in _ADDED
    }


def _prefill_law(entry: Entry) -> PrefillLaw | None:
    if entry.values.get("prefill_law") is None:
        return None
    law = Entry(entry.path, f"{entry.where}.prefill_law", entry.values["prefill_law"])
    prices = [law.number(name, 0.0, 1e9) for name in ("launch", "step", "block", "write")]
    counts = [law.count(name, 1, MOST_SLOTS) for name in ("slots", "rows", "stride")]
    alone = law.number("alone", 1e-6, 1.0) if "alone" in law.values else 1.0
    return PrefillLaw(prices[0], prices[1], prices[2], prices[3], counts[0], counts[1], counts[2], alone)


def _slopes(entry: Entry) -> tuple[tuple[float, float], ...]:
    slopes = entry.pairs("uneven_decode", lambda pair: (float(pair[0]), float(pair[1])))
    numbers = [pair[0] for pair in slopes]
    if numbers != sorted(set(numbers)) or not all(n >= 1 and 0 <= us <= 1e3 and math.isfinite(n) for n, us in slopes):
        entry.fail("uneven_decode", slopes, "ascending decodes, microseconds from 0 to 1000")
    return slopes


def _lattice(entry: Entry, dimensions: int, arrays: Array) -> Lattice:
    axes = _axes(entry, dimensions, arrays)
    values = entry.array("values", arrays)
    if values.shape != tuple(len(axis) for axis in axes):
        entry.fail("values", values.shape, f"shape {tuple(len(axis) for axis in axes)}")
    if np.abs(values).max() > MAX_MISS:
        entry.fail("values", np.abs(values).max(), f"at most {MAX_MISS}")
    return Lattice(axes, values)


def _axes(entry: Entry, dimensions: int, arrays: Array) -> list[Array]:
    places = entry.values.get("axes")
    if not isinstance(places, list) or len(places) != dimensions:
        entry.fail("axes", places, f"{dimensions} axes")
    axes = [entry.cut("axes", place, arrays) for place in places or []]
    if any(axis.ndim != 1 or (np.diff(axis) <= 0).any() or axis[0] < 0 for axis in axes):
        entry.fail("axes", "descending or negative values", "ascending coordinates")
    return axes
