"""Step times that a run's request times give away exactly, without any log of steps.

Two requests that got their first token in the same step and were never preempted make one token a step each; the one
that has more tokens ends that many steps later. After a run's last prefill these stretches hold decodes alone, whose
contexts are known too. What the costs say of the same batches shows whether they are off, and by how much, apart from
anything that scheduling or prefix caches do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from policies.batch import BatchShape

if TYPE_CHECKING:
    import pandas as pd

    from experiments.vllm_run import VllmRun
    from profiler.cost_model import CostModel

SAME_STEP_S = 1e-4
PREEMPTED = 1.1
"""A stretch this many times as long as predicted holds a preemption: the later request was not always running."""
SAMPLED = 40


@dataclass(frozen=True)
class Stretch:
    """`steps` iterations between two ends of requests; seconds a step, and decodes at its ends (most, fewest)."""

    start_s: float
    end_s: float
    steps: int
    decodes: tuple[int, int]
    predicted_s: float

    @property
    def measured_s(self) -> float:
        return (self.end_s - self.start_s) / self.steps

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def known_stretches(run: VllmRun, cost: CostModel) -> list[Stretch]:
    """Every stretch of decodes alone whose steps are known, with what `cost` predicts for them, device time only."""
    requests = run.requests
    last_prefill = float(requests["first_s"].max())
    tail = requests[requests["last_s"] > last_prefill]
    groups = (tail["first_s"] / SAME_STEP_S).round()
    found = []
    for _, group in tail.groupby(groups):
        ends = group.sort_values("last_s")
        first, last = ends.iloc[0], ends.iloc[-1]
        steps = int(last["output"] - first["output"])
        if len(ends) < 2 or steps < 2:
            continue
        stretch = _predicted(tail, float(first["last_s"]), float(last["last_s"]), steps, cost)
        if stretch.measured_s < PREEMPTED * stretch.predicted_s:
            found.append(stretch)
    return found


def level_us(stretches: list[Stretch]) -> float | None:
    """Microseconds a decode step that the costs miss: the median over known steps; None where none are known."""
    if not stretches:
        return None
    missed = np.repeat([one.measured_s - one.predicted_s for one in stretches], [one.steps for one in stretches])
    return round(float(np.median(missed)) * 1e6, 1)


def _predicted(tail: pd.DataFrame, start: float, end: float, steps: int, cost: CostModel) -> Stretch:
    """Batches at evenly spread moments: every request runs until its end, one token a step."""
    each = (end - start) / steps
    times, sizes = [], []
    for moment in start + (np.linspace(0, steps, min(steps, SAMPLED), endpoint=False) + 0.5) * each:
        running = tail[tail["last_s"] > moment]
        left = (running["last_s"] - moment) / each
        contexts = (running["prompt"] + running["output"] - 1 - left).to_numpy(float)
        size = len(running)
        shape = BatchShape((), size, int(contexts.sum()), int(contexts.max()), 0, size)
        times.append(sum(cost.stage_ns(shape, stage) for stage in range(cost.stages)) * 1e-9)
        sizes.append(size)
    return Stretch(start, end, steps, (max(sizes), min(sizes)), float(np.mean(times)))
