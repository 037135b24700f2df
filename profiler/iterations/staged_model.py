"""The cost model of a live pipeline: whole iterations fitted stage by stage, sends and host time of a live run.

A stage's times are those of `profiler.iterations.iteration_model`, measured while the other stages were at work too
(they share
caches, memory and the machine's clock). A send costs latency plus a price per row, host time a price per chunk, decode
and token: both are means over a run in which every request arrived at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.edges.input_file import read_json
from policies.edges.output_file import write_text
from policies.work.batch import BatchShape
from policies.work.request import Ns
from profiler.errors import ProfileError
from profiler.iterations.flicker import Later
from profiler.iterations.iteration_file import read_fit, says_format, write_fit
from profiler.iterations.iteration_model import IterationFit, IterationModel, host_amounts
from profiler.specs.shape_columns import ShapeColumns

Column = NDArray[np.int64]
Array = NDArray[np.float64]

FORMAT = "charioteer staged model"
MOST_STAGES = 1024


@dataclass(frozen=True)
class StagedFit:
    """stages: one fit each. sends: (latency ns, ns per row) from each stage to the next. host_before: ns a step, chunk,
    decode and prefill token; host_after: ns a step and sampled row."""

    stages: tuple[IterationFit, ...]
    sends: tuple[tuple[float, float], ...]
    host_before: tuple[float, ...]
    host_after: tuple[float, float]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.sends) != len(self.stages) - 1 or len(self.host_before) != 4:
            raise ProfileError(
                f"staged model: found {len(self.sends)} sends and {len(self.host_before)} host prices for "
                f"{len(self.stages)} stages, expected {len(self.stages) - 1} and 4"
            )

    device = property(lambda self: self.stages[0].device)
    model = property(lambda self: self.stages[0].model)
    dtype = property(lambda self: self.stages[0].dtype)
    backend = property(lambda self: self.stages[0].backend)

    @property
    def disturbance(self) -> float:
        return float(np.mean([stage.disturbance for stage in self.stages]))

    @property
    def drift(self) -> float:
        return max(stage.drift for stage in self.stages)

    @property
    def errors(self) -> Mapping[str, float]:
        """Of the stage that is fitted worst, entry by entry."""
        return _worst([stage.errors for stage in self.stages])

    @property
    def noise(self) -> Mapping[str, float]:
        return _worst([stage.noise for stage in self.stages])


def _worst(each: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    return {name: max(one.get(name, 0.0) for one in each) for name in each[0]}


class StagedModel:
    """CostModel of a pipeline. speed: factor on every time, 1 as measured."""

    kind = "fitted"
    calibrated = True
    tile = 128

    def __init__(self, fit: StagedFit, *, speed: float = 1.0) -> None:
        self.fit, self.speed = fit, speed
        self._models = [IterationModel(stage, speed=speed) for stage in fit.stages]
        self.stages = len(fit.stages)
        self.name = f"fitted {fit.model} {fit.device} {fit.dtype}, {self.stages} stages"
        self._sends = [(latency * speed, row * speed) for latency, row in fit.sends]
        self._before = [price * speed for price in fit.host_before]
        self._after = [price * speed for price in fit.host_after]

    def host_ns(self, shape: BatchShape) -> tuple[Ns, Ns]:
        step, chunk, decode, token = self._before
        before = step + len(shape.chunks) * chunk + shape.decodes * decode + shape.prefill_tokens * token
        return int(before + 0.5), int(self._after[0] + shape.sampled * self._after[1] + 0.5)

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> Ns:
        return self._models[stage].stage_ns(shape)

    def send_ns(self, shape: BatchShape, stage: int) -> Ns:
        if stage >= len(self._sends):
            return 0
        latency, row = self._sends[stage]
        return int(latency + shape.rows * row + 0.5)

    def repeat_ns(self, shape: BatchShape, steps: int, stage: int = 0) -> Column:
        return self._models[stage].repeat_ns(shape, steps)

    def predict_ns(self, shapes: object, stage: int = 0) -> Column:
        return self._models[stage].predict_ns(shapes)

    def breakdown(self, shape: BatchShape) -> Mapping[str, Ns]:
        """Terms by name; sums exactly to host, stages and sends."""
        before, after = self.host_ns(shape)
        parts = {"host_before": before, "host_after": after}
        parts |= {f"stage {stage}": self.stage_ns(shape, stage) for stage in range(self.stages)}
        return parts | {f"send {stage}": self.send_ns(shape, stage) for stage in range(self.stages - 1)}

    def inside(self, shape: BatchShape) -> bool:
        return all(model.inside(shape) for model in self._models)

    def provenance(self) -> Mapping[str, object]:
        return {
            "kind": self.kind,
            "calibrated": self.calibrated,
            "name": self.name,
            "speed": self.speed,
            "stages": [dict(model.provenance()) for model in self._models],
            "sends_ns": [list(s) for s in self._sends],
            "host_before_ns": list(self._before),
            "host_after_ns": list(self._after),
            **self.fit.provenance,
        }

    def perturbed(self, seed: int, later: Later | None = None) -> StagedModel:
        """Another model that the measurements would allow: all stages at one drawn speed."""
        stages = tuple(model.perturbed(seed * len(self._models) + at).fit for at, model in enumerate(self._models))
        speed = self._models[0].perturbed(seed, later).speed
        return StagedModel(replace(self.fit, stages=stages), speed=speed)


def fit_sends(rows: Array, seconds: Array) -> tuple[float, float]:
    """(latency, per row) in ns, neither below 0, by least squares on all of them: late ones count as they come."""
    prices = _non_negative(np.stack([np.ones(len(rows)), rows], axis=1), seconds)
    return prices[0], prices[1]


def fit_host(
    shapes: Sequence[BatchShape], before_s: Array, after_s: Array
) -> tuple[tuple[float, ...], tuple[float, float]]:
    """Prices of host time before the first and after the last stage, ns."""
    columns = ShapeColumns.of(shapes)
    before = _non_negative(host_amounts(columns).astype(float), before_s)
    after = _non_negative(np.stack([np.ones(len(columns)), columns.sampled], axis=1).astype(float), after_s)
    return tuple(before), (after[0], after[1])


def _non_negative(design: Array, seconds: Array) -> list[float]:
    from sklearn.linear_model import LinearRegression

    solver = LinearRegression(positive=True, fit_intercept=False)
    solver.fit(design, seconds * 1e9)
    return [float(price) for price in solver.coef_]


def write_staged(fit: StagedFit, path: Path) -> None:
    """PATH, and one file per stage beside it."""
    for number, stage in enumerate(fit.stages):
        write_fit(stage, _stage_file(path, number))
    document = {
        "format": FORMAT,
        "stages": len(fit.stages),
        "sends": fit.sends,
        "host_before": fit.host_before,
        "host_after": fit.host_after,
        "provenance": dict(fit.provenance),
    }
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n", ProfileError)


def read_staged(path: Path) -> StagedFit:
    """What `write_staged` wrote; ProfileError for anything else."""
    document = read_json(path, ProfileError)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ProfileError(f"{path}: found something else, expected {FORMAT!r}")
    stages, provenance, sends = document.get("stages"), document.get("provenance"), document.get("sends")
    if type(stages) is not int or not 1 <= stages <= MOST_STAGES:
        raise ProfileError(f"{path}: stages: found {stages!r}, expected 1 to {MOST_STAGES}")
    if not isinstance(provenance, dict) or not isinstance(sends, list) or len(sends) != stages - 1:
        raise ProfileError(f"{path}: expected a table `provenance` and {stages - 1} `sends`")
    latency, row = zip(*(_numbers(path, "sends", send, 2) for send in sends)) if sends else ((), ())
    before = _numbers(path, "host_before", document.get("host_before"), 4)
    after = _numbers(path, "host_after", document.get("host_after"), 2)
    fits = tuple(read_fit(_stage_file(path, number)) for number in range(stages))
    return StagedFit(fits, tuple(zip(latency, row)), before, (after[0], after[1]), provenance)


def is_staged_fit(path: str | Path) -> bool:
    """Whether a file says that it is one of ours; nothing else of it is checked."""
    return says_format(path, FORMAT)


def load_staged(path: str | Path, spec: Any, *, tp: int = 1, pp: int = 1, **engine: Any) -> StagedModel:
    """The cost model of a file, for the model and the stages that it was measured with and no others."""
    fit = read_staged(Path(path))
    if fit.model != spec.name:
        raise ProfileError(f"{path}: was measured with {fit.model}, not with {spec.name}; profile that model")
    if (tp, pp) != (1, len(fit.stages)):
        raise ProfileError(f"{path}: was measured with pp {len(fit.stages)}, tp 1; found pp {pp}, tp {tp}")
    return StagedModel(fit)


def _numbers(path: Path, name: str, found: Any, count: int) -> tuple[float, ...]:
    """A list of so many prices in ns; negative ones are what a least-squares fit may give."""
    fits = isinstance(found, list) and len(found) == count
    if not fits or not all(type(price) in (int, float) and abs(price) < 1e15 for price in found):
        raise ProfileError(f"{path}: {name}: found {str(found)[:60]}, expected {count} numbers below 1e15")
    return tuple(float(price) for price in found)


def _stage_file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.stage{number}.json")
