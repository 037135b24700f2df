"""A simulated run on a machine whose speed changes as a gauge beside a live run told, moment by moment.

A mean over the run is not enough where slow phases last seconds: queues grow in them by more than they shrink in quick
ones. The gauge looks at no iteration of the run, so this is still a prediction of its costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.running.stage_files import read_json
from experiments.validation.comparing.fed_with_measured_times import at_moments
from policies import BatchShape, Ns
from profiler.iterations.iteration_model import IterationModel
from profiler.iterations.machine_speed import running_mean
from simulator.replica.replica_kind import make_engine

if TYPE_CHECKING:
    from simulator import ReplayConfig
    from workloads import Trace

Array = NDArray[np.float64]

WINDOW = 25
"""Samples of the gauge behind a speed, half a second of a busy run: single ones are as noisy as what they measure."""


class WanderingModel(IterationModel):
    """The fitted model, every time multiplied by the machine's slowness at the moment of its planning.

    at_ns, slowness: from when on which factor holds. Whoever plans says when (`planned`).
    """

    def __init__(self, model: IterationModel, at_ns: Array, slowness: Array) -> None:
        super().__init__(model.fit)
        self._at_ns, self._slowness = at_ns, slowness
        self._now = 1.0

    def planned(self, now_ns: Ns) -> Ns:
        at = int(np.searchsorted(self._at_ns, now_ns, side="right")) - 1
        self._now = float(self._slowness[max(at, 0)])
        return now_ns

    def host_ns(self, shape: BatchShape) -> tuple[Ns, Ns]:
        before, after = super().host_ns(shape)
        return int(before * self._now + 0.5), int(after * self._now + 0.5)

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> Ns:
        return int(super().stage_ns(shape) * self._now + 0.5)

    def aftermath(self, shape: BatchShape) -> list[Ns]:
        return [int(extra * self._now + 0.5) for extra in super().aftermath(shape)]


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
    return np.array(at_s, float) * 1e9 + first_ns, np.exp(running_mean(logs, WINDOW))


def wandering_run(
    trace: Trace, config: ReplayConfig, model: IterationModel, at_ns: Array, slowness: Array
) -> Mapping[str, Any]:
    """The summary of a simulated run of which every iteration is as slow as the machine was at its moment."""
    from metrics import summarise
    from metrics.recording.recorder import Recorder
    from simulator.simulation import simulate

    cost = WanderingModel(model, at_ns, slowness)
    plain = make_engine(replace(config, leaps=False), trace, cost)
    engine = replace(plain, policy=at_moments(plain.policy, cost.planned), nominal=model)
    recorder = Recorder()
    simulate(trace, engine, recorder)
    return summarise(recorder.tables())
