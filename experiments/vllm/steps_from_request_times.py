"""Step times that a run's request times give away exactly, without any log of steps.

Two requests that got their first token in the same step and were never preempted make one token a step each; the one
that has more tokens ends that many steps later. After a run's last prefill these stretches hold decodes alone, whose
contexts are known too. What the costs say of the same batches shows whether they are off, and by how much, apart from
anything that scheduling or prefix caches do. The log's seconds in which nothing but decodes ran tell the same less
exactly (tokens over running requests are the steps of a second), but all through the run and for every batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from policies.work.batch import BatchShape

if TYPE_CHECKING:
    import pandas as pd

    from experiments.vllm.recorded_run import VllmRun
    from profiler.cost_model import CostModel

SAME_STEP_S = 1e-4
PREEMPTED = 1.1
"""A stretch this many times as long as predicted holds a preemption: the later request was not always running."""
AGREE, ROUNDED = 0.03, 2.0
"""Share of its steps, or steps, by which the log may count a stretch otherwise; beyond, one of the two was preempted
for a while before it."""
STRANGE = 0.12
"""A second whose steps take this much longer than predicted held a prompt computed again, which the log keeps quiet."""
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


@dataclass(frozen=True)
class Second:
    """A second of the log without prefill: seconds a step, measured and predicted, of `decodes` requests on average."""

    t: float
    decodes: float
    measured_s: float
    predicted_s: float

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
        counted = float(np.diff(run.steps_at(np.array([first["last_s"], last["last_s"]])))[0])
        if abs(counted - steps) > max(AGREE * steps, ROUNDED):
            continue
        stretch = _predicted(tail, float(first["last_s"]), float(last["last_s"]), steps, cost)
        if stretch.measured_s < PREEMPTED * stretch.predicted_s:
            found.append(stretch)
    return found


def decode_seconds(run: VllmRun, cost: CostModel) -> list[Second]:
    """Every second of the log that held decode steps alone: no prompt in it or the one before, none admitted.

    The requests that run are the oldest ones, since vLLM preempts the youngest; how far each has come is counted back
    from its end.
    """
    log, requests = run.log, run.requests
    found = []
    for before, now in zip(log.iloc[:-1].itertuples(), log.iloc[1:].itertuples(), strict=True):
        ended, arrived = (
            int(((requests[key] > before.t) & (requests[key] <= now.t)).sum()) for key in ("last_s", "queued_s")
        )
        preempted = before.running - now.running - ended
        calm = before.prompt_throughput == now.prompt_throughput == 0 and min(before.running, now.running) > 0
        if not calm or preempted < 0 or now.waiting != before.waiting + arrived + preempted:
            continue
        decodes = (before.running + now.running) / 2
        middle = (before.t + now.t) / 2
        running = requests[(requests["first_s"] < middle) & (requests["last_s"] > middle)].iloc[: round(decodes)]
        if len(running) < round(decodes) or not now.gen_throughput:
            continue
        left = run.steps_at(running["last_s"].to_numpy(float)) - run.steps_at(np.array([middle]))
        contexts = (running["prompt"] + running["output"] - 1 - left).to_numpy(float)
        measured = (now.t - before.t) * decodes / now.gen_throughput
        second = Second(float(now.t), decodes, measured, _decode_s(contexts, cost))
        if second.measured_s < (1 + STRANGE) * second.predicted_s:
            found.append(second)
    return found


def by_size(seconds: list[Second], size: int = 8) -> list[tuple[int, int, int, float, float]]:
    """(least decodes, most, seconds, median ms a step measured, median error) for every `size` decodes."""
    rows = []
    for last in sorted({int(-(-second.decodes // size)) * size for second in seconds}):
        mine = [second for second in seconds if last - size < second.decodes <= last]
        measured = float(np.median([second.measured_s for second in mine])) * 1e3
        rows.append((last - size + 1, last, len(mine), measured, float(np.median([second.error for second in mine]))))
    return rows


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
        times.append(_decode_s(contexts, cost))
        sizes.append(len(running))
    return Stretch(start, end, steps, (max(sizes), min(sizes)), float(np.mean(times)))


def _decode_s(contexts: NDArray[np.float64], cost: CostModel) -> float:
    """Device time of one step of decodes of these contexts."""
    size = len(contexts)
    shape = BatchShape((), size, int(contexts.sum()), int(contexts.max()), 0, size)
    return sum(cost.stage_ns(shape, stage) for stage in range(cost.stages)) * 1e-9
