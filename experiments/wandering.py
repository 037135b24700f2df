"""A simulated run on a machine whose speed changes as a gauge beside a live run told, moment by moment.

A mean over the run is not enough where slow phases last seconds: queues grow in them by more than they shrink in quick
ones. The gauge looks at no iteration of the run, so this is still a prediction of its costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.stage_files import read_json
from policies import BatchShape, Ns, Policy
from profiler.iteration_model import IterationModel
from simulator.engine import Engine, make_engine

if TYPE_CHECKING:
    from simulator import ReplayConfig
    from workloads import Trace

Array = NDArray[np.float64]

WINDOW = 25
"""Samples of the gauge behind a speed, half a second of a busy run: single ones are as noisy as what they measure."""


class WanderingModel(IterationModel):
    """The fitted model, every time multiplied by the machine's slowness at the moment of its planning.

    at_ns, slowness: from when on which factor holds. now_ns is set by whoever plans (`as_planned`).
    """

    def __init__(self, model: IterationModel, at_ns: Array, slowness: Array) -> None:
        super().__init__(model.fit)
        self._at_ns, self._slowness = at_ns, slowness
        self.now_ns: Ns = 0
        self._told_ns: Ns = -1
        self._now = 1.0

    @property
    def factor(self) -> float:
        if self.now_ns != self._told_ns:
            at = int(np.searchsorted(self._at_ns, self.now_ns, side="right")) - 1
            self._now, self._told_ns = float(self._slowness[max(at, 0)]), self.now_ns
        return self._now

    def host_ns(self, shape: BatchShape) -> tuple[Ns, Ns]:
        before, after = super().host_ns(shape)
        return int(before * self.factor + 0.5), int(after * self.factor + 0.5)

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> Ns:
        return int(super().stage_ns(shape) * self.factor + 0.5)

    def aftermath(self, shape: BatchShape) -> list[Ns]:
        return [int(extra * self.factor + 0.5) for extra in super().aftermath(shape)]


def slowness_over_time(file: Path, model: IterationModel, first_ns: Ns) -> tuple[Array, Array] | None:
    """(from when on in ns, slowness) from a gauge's file; None where it does not say when it was sampled.

    first_ns: when the first batch of the run ended, which is when the first sample was taken.
    """
    told = read_json(file) if file.exists() else {}
    gauge = model.fit.provenance.get("gauge") or {}
    samples, at_s = told.get("ns") or [], told.get("at_s") or []
    if not gauge or len(samples) < WINDOW or len(samples) != len(at_s):
        return None
    logs = np.log(np.array(samples, float) / 1e9 / gauge["typical_s"]) * gauge["power"]
    half = WINDOW // 2
    padded = np.pad(logs, half, mode="edge")
    smooth = np.convolve(padded, np.ones(WINDOW) / WINDOW, mode="valid")
    return np.array(at_s, float) * 1e9 + first_ns, np.exp(smooth)


def wandering_run(
    trace: Trace, config: ReplayConfig, model: IterationModel, at_ns: Array, slowness: Array
) -> Mapping[str, Any]:
    """The summary of a simulated run of which every iteration is as slow as the machine was at its moment."""
    from metrics import summarise
    from metrics.recorder import Recorder
    from simulator.simulation import simulate

    cost = WanderingModel(model, at_ns, slowness)
    plain = make_engine(replace(config, leaps=False), trace, cost)
    kept = {entry.name: getattr(plain, entry.name) for entry in fields(Engine)}

    def look(now_ns: Ns) -> None:
        cost.now_ns = now_ns

    kept |= {"policy": as_planned(plain.policy, look), "nominal": model}
    recorder = Recorder()
    simulate(trace, Engine(**kept), recorder)
    return summarise(recorder.tables())


def as_planned(policy: Policy, look: Callable[[Ns], None]) -> Policy:
    """The same policy; `look` hears the moment of every plan."""

    class Watched(type(policy)):  # type: ignore[misc]
        def plan(self, queues: Any, draft: Any, kv: Any, host: Any, now_ns: Ns) -> None:
            look(now_ns)
            super().plan(queues, draft, kv, host, now_ns)

    watched = object.__new__(Watched)
    vars(watched).update(vars(policy))  # knobs are fields of a frozen dataclass
    return watched
