"""A cost model of whole iterations on disk: one readable JSON, a file from a stranger until every entry was checked."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from policies.edges.input_file import checked_file, read_json
from policies.edges.output_file import write_text
from policies.edges.settings import check_value, shown
from profiler.errors import ProfileError
from profiler.experts.chances import ExpertChances
from profiler.iterations.aftermath import PRICES as AFTERMATH_PRICES
from profiler.iterations.expert_layers import ExpertLayers
from profiler.iterations.iteration_model import AMOUNTS, HOST_AMOUNTS, ROW_TERMS, Bounds, IterationFit, IterationModel

FORMAT = "charioteer fitted iterations"
VERSION = 1
MAX_BYTES = 8 << 20
LONGEST_TEXT = 200


def write_fit(fit: IterationFit, path: str | Path) -> None:
    """One readable JSON, whole or not at all. An error that could not be measured (NaN: too few shapes) is left out."""
    path = Path(path)
    if path.suffix != ".json":
        raise ProfileError(f"{path}: found suffix {path.suffix!r}, expected .json")
    document = {"format": FORMAT, "version": VERSION, "row_terms": ROW_TERMS, "amounts": AMOUNTS, **asdict(fit)}
    for name in ("errors", "noise"):
        document[name] = {key: value for key, value in document[name].items() if math.isfinite(value)}
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n", ProfileError)


def is_iteration_fit(path: str | Path) -> bool:
    """Whether a file says that it is one of ours; nothing else of it is checked."""
    return says_format(path, FORMAT)


def says_format(path: str | Path, name: str) -> bool:
    """Whether a file names this format in its first bytes."""
    try:
        with checked_file(path, ProfileError).open("rb") as file:
            return name.encode() in file.read(200)
    except (OSError, ProfileError):
        return False


def read_fit(path: str | Path) -> IterationFit:
    """Read and check what `write_fit` wrote; raises ProfileError with the file and the entry at fault."""
    path = Path(path)
    document = read_json(path, ProfileError, MAX_BYTES)
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        raise ProfileError(f"{path}: found something else, expected {FORMAT!r} version {VERSION}")
    if (document.get("row_terms"), document.get("amounts")) != ([list(term) for term in ROW_TERMS], list(AMOUNTS)):
        raise ProfileError(f"{path}: its terms are not those of this version: profile and fit again")
    counts = {"row_prices": len(ROW_TERMS), "prices": len(AMOUNTS), "host_before": len(HOST_AMOUNTS), "host_after": 2}
    values: dict[str, Any] = {}
    for entry in fields(IterationFit):
        found: Any = document.get(entry.name)
        if entry.name in counts:
            values[entry.name] = _prices(path, entry.name, found, counts[entry.name])
        elif entry.name == "experts":
            values["experts"] = _experts(path, found)
        elif entry.name == "resampled":
            if not isinstance(found, list) or len(found) > 1000:
                raise ProfileError(f"{path}: resampled: found {shown(found)}, expected a list of at most 1,000 fits")
            rows = found
            both = counts["row_prices"] + counts["prices"] + bool(document.get("experts"))
            values["resampled"] = tuple(_prices(path, "resampled", row, both) for row in rows)
        elif entry.name == "aftermath":
            values["aftermath"] = _prices(path, entry.name, found, AFTERMATH_PRICES) if found else ()
        elif entry.name == "bounds":
            values["bounds"] = _bounds(path, found)
        elif entry.name in ("disturbance", "drift", "phases", "seen_s", "flicker"):
            # Older files know no more than the first two.
            found = document.get(entry.name, None if entry.name in ("disturbance", "drift") else 0)
            values[entry.name] = _prices(path, entry.name, [found], 1)[0]
        elif entry.name in ("errors", "noise", "provenance"):
            check_value(f"{path}: {entry.name}", found, (dict,), ProfileError)
            for key in found if entry.name != "provenance" else ():
                check_value(f"{path}: {entry.name}: {shown(key)}", found[key], (float,), ProfileError)
            values[entry.name] = found
        else:
            check_value(f"{path}: {entry.name}", found, (str,), ProfileError)
            values[entry.name] = found[:LONGEST_TEXT]
    return IterationFit(**values)


def load_iterations(path: str | Path, spec: Any, *, tp: int = 1, pp: int = 1, **engine: Any) -> IterationModel:
    """The cost model of a file, for the model that it was measured with and no other."""
    fit = read_fit(path)
    if fit.model != spec.name:
        raise ProfileError(f"{path}: was measured with {fit.model}, not with {spec.name}; profile that model")
    if (tp, pp) != (1, 1):
        raise ProfileError(
            f"{path}: whole iterations of one device say nothing about tp {tp}, pp {pp}; expected 1 and 1"
        )
    return IterationModel(fit)


def _prices(path: Path, name: str, values: Any, count: int) -> tuple[float, ...]:
    good = isinstance(values, Sequence) and len(values) == count
    if not good or not all(type(v) in (int, float) and 0 <= v < 1e15 for v in values):
        raise ProfileError(f"{path}: {name}: found {shown(values)}, expected {count} numbers of 0 or more")
    return tuple(float(value) for value in values)


def _experts(path: Path, found: Any) -> ExpertLayers | None:
    """Checked as everything else: a price, and for every layer chances of equally many experts with equal sums."""
    if found is None:  # also of every file of an earlier version
        return None
    chances = found.get("chances") if isinstance(found, dict) else None
    layers = chances.get("layers") if isinstance(chances, dict) else None
    if not (isinstance(layers, list) and 1 <= len(layers) <= 1024 and isinstance(layers[0], list) and layers[0]):
        layers = []
    if not layers or type(found.get("trimmed")) is not bool:
        raise ProfileError(f"{path}: experts: found {shown(found)}, expected price_ns, chances of layers, trimmed")
    held = tuple(_prices(path, "experts: chances", layer, len(layers[0])) for layer in layers)
    sums = [sum(layer) for layer in held]
    if max(map(max, held)) > 1 or sums[0] < 0.99 or max(sums) - min(sums) > 0.01:
        raise ProfileError(f"{path}: experts: chances: found sums {shown(sums[:4])}, expected one top k in all layers")
    (price,) = _prices(path, "experts: price_ns", [found.get("price_ns")], 1)
    return ExpertLayers(price, ExpertChances(held), found["trimmed"])


def _bounds(path: Path, values: Any) -> Bounds:
    names = [entry.name for entry in fields(Bounds)]
    if not isinstance(values, dict) or not all(type(values.get(name)) is int and values[name] >= 0 for name in names):
        raise ProfileError(f"{path}: bounds: found {shown(values)}, expected whole numbers {', '.join(names)}")
    return Bounds(**{name: values[name] for name in names})
