"""The simulator fed a live run's own durations: does it then plan the live batches and deliver every token on time?

`experiments.validation.comparing.batch_agreement` drives a bare scheduler with recorded moments. Here the whole
simulator runs, with its clock,
its arrivals and its replica; only its cost model is replaced by the list of what each iteration took. The simulator
plans at the very moment a batch completes, a live loop some tenths of a millisecond later; so whoever arrived in that
gap is given to the simulator at its beginning, and the policy is told the live moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.errors import ExperimentError
from experiments.validation.comparing.batch_agreement import COMPARED, plain_row
from policies import BatchShape, Ns, Policy
from simulator.replica.replica_kind import make_engine

if TYPE_CHECKING:
    from metrics import RunTables
    from profiler.cost_model import CostModel
    from workloads import Trace

Column = NDArray[np.int64]


@dataclass(frozen=True)
class Fed:
    """matched: iterations equal, from the first on. tokens_equal: every token of every cohort at its live time."""

    iterations: int
    matched: int
    tokens_equal: bool
    divergence: Mapping[str, Any] | None

    @property
    def exact(self) -> bool:
        return self.divergence is None and self.tokens_equal

    def as_dict(self) -> dict[str, Any]:
        return {
            "iterations": self.iterations,
            "matched": self.matched,
            "tokens_equal": self.tokens_equal,
            "divergence": self.divergence,
        }


class MeasuredTimes:
    """A cost model that knows no shapes: the next iteration takes what the next live one took."""

    kind, calibrated, name, stages = "measured", True, "a live run's own times", 1

    def __init__(self, before_ns: Column, device_ns: Column, after_ns: Column, tile: int) -> None:
        self._before, self._device, self._after = (each.tolist() for each in (before_ns, device_ns, after_ns))
        self._next = 0
        self.tile = tile

    def host_ns(self, shape: BatchShape) -> tuple[Ns, Ns]:
        at = min(self._next, len(self._before) - 1)
        return self._before[at], self._after[at]

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> Ns:
        at = min(self._next, len(self._before) - 1)
        self._next += 1
        return int(self._device[at])

    def send_ns(self, shape: BatchShape, stage: int) -> Ns:
        return 0

    def repeat_ns(self, shape: BatchShape, steps: int, stage: int = 0) -> Column:
        raise TypeError("measured times are taken one by one: switch leaps off")

    def predict_ns(self, shapes: object, stage: int = 0) -> Column:
        raise TypeError("measured times are taken one by one")

    def breakdown(self, shape: BatchShape) -> Mapping[str, Ns]:
        raise TypeError("measured times have no parts")

    def inside(self, shape: BatchShape) -> bool:
        return True

    def provenance(self) -> Mapping[str, object]:
        return {"kind": self.kind, "name": self.name}


def why_not_fed(live: RunTables) -> str:
    """Empty, or why a live run cannot be given to the simulator by durations alone."""
    if live.config.get("ahead"):
        return "planning ran ahead of the running batch"
    if int(live.config.get("pp") or 1) > 1:
        return "batches overlap in a pipeline"
    if not live.rows("iterations"):
        return "nothing was run"
    return ""


def model_of_run(config: Mapping[str, Any]) -> str:
    """What was asked for when the run began, as a folder, which says more than the short name that was served."""
    live = config.get("live")
    asked = str(live.get("model") or "") if isinstance(live, Mapping) else ""
    return asked if Path(asked).exists() else str(config["model"])


def feed(live: RunTables, trace: Trace, model: CostModel, spec: str | None = None) -> Fed:
    """Simulate `trace` with the live run's policy, limits and durations. model: for policies that estimate. spec: the
    served model, as the simulator takes it, where the run's own name for it does not lead to it.

    Raises ExperimentError for a closed loop: its arrivals follow from answers, which are given at recorded moments.
    """
    if trace.closed_loop:
        raise ExperimentError("a closed loop cannot be fed a live run's durations: its arrivals depend on its answers")
    from metrics.recording.recorder import Recorder
    from simulator.config import ReplayConfig
    from simulator.simulation import simulate

    moments = {name: live.column_ns("iterations", name) for name in ("planned_s", "start_s", "end_s", "device_s")}
    planned, start, end, device = moments.values()
    plans = _plan_moments(live, planned, end)
    cost = MeasuredTimes(start - plans, device, end - start - device, model.tile)
    config = live.config
    replay = ReplayConfig(
        policy=str(config["policy"]),
        knobs=_knobs(config),
        model=spec or model_of_run(config),
        leaps=False,
        token_budget=config["token_budget"],
        max_num_seqs=config["max_num_seqs"],
        max_model_len=config["max_model_len"],
        block_size=config["block_size"],
        num_blocks=config["num_blocks"],
        watermark=config["live"].get("watermark"),
        prefix_caching=bool(config["live"].get("prefix_caching")),
    )
    moved = _as_planned(live, trace, planned, end, plans)
    plain = make_engine(replay, moved, cost)
    # Some policies go by who is late when the live loop plans, not when the simulator does.
    live_ns = dict(zip(plans.tolist(), planned.tolist()))
    policy = at_moments(plain.policy, lambda now_ns: live_ns.get(now_ns, now_ns))
    # Policies that estimate do so with the fitted model, as they did live, while time passes as it was measured.
    engine = replace(plain, policy=policy, nominal=model)
    recorder = Recorder()
    simulate(moved, engine, recorder)
    return _compare(live, recorder.tables())


def _plan_moments(live: RunTables, planned: Column, end: Column) -> Column:
    """When the simulator plans each live batch: at the end of the last one, or after a pause at the live moment."""
    arrival, finished = live.column_ns("requests", "arrival_s"), live.column_ns("requests", "finished_s")
    arrived = np.searchsorted(np.sort(arrival), end, side="right")
    gone = np.searchsorted(np.sort(finished), end, side="right")
    plans = planned.copy()
    busy = arrived[:-1] > gone[:-1]
    plans[1:][busy] = end[:-1][busy]
    return plans


def at_moments(policy: Policy, moment: Callable[[Ns], Ns]) -> Policy:
    """The same policy, told `moment(now)` at every plan in the place of the simulator's now."""

    class AtMoments(type(policy)):  # type: ignore[misc]
        def plan(self, queues: Any, draft: Any, kv: Any, host: Any, now_ns: Ns) -> None:
            super().plan(queues, draft, kv, host, moment(now_ns))

    moved = object.__new__(AtMoments)
    vars(moved).update(vars(policy))  # knobs are fields of a frozen dataclass
    return moved


def _as_planned(live: RunTables, trace: Trace, planned: Column, end: Column, plans: Column) -> Trace:
    """The trace with everybody who arrived between a batch's end and the next plan moved to the simulator's plan."""
    arrival = live.column_ns("requests", "arrival_s")[np.argsort(live.column("requests", "request"))]
    seen = np.searchsorted(planned, arrival, side="left")
    inside = np.minimum(seen, len(planned) - 1)
    last_end = np.where(inside > 0, end[np.maximum(inside - 1, 0)], -1)
    moved = np.where((seen < len(planned)) & (arrival > last_end), plans[inside], arrival)
    closed = dict.fromkeys(("after_row", "think_ns", "joins", "abort_ns"))
    open_loop = replace(trace, arrival_ns=np.maximum.accumulate(moved), **closed)
    return open_loop


def _compare(live: RunTables, ours: RunTables) -> Fed:
    one = live.iterations.select(list(COMPARED)).to_pylist()
    other = ours.iterations.sort_by("iteration").select(list(COMPARED)).to_pylist()
    for number, (left, right) in enumerate(zip(one, other)):
        left, right = plain_row(left), plain_row(right)
        if left != right:
            return Fed(len(one), number, False, {"iteration": number, "live": left, "simulated": right})
    if len(one) != len(other):
        return Fed(len(one), min(len(one), len(other)), False, {"live": f"{len(one)} batches", "simulated": len(other)})
    keys = ["cohort", "step"]
    left, right = (run.frame("tokens").sort_values(keys).reset_index(drop=True) for run in (live, ours))
    return Fed(len(one), len(one), bool(left.equals(right)), None)


def _knobs(config: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of a live run; its host planned ahead or not, whatever its version does by default."""
    knobs = dict(config["knobs"])
    if "async_scheduling" in knobs:
        knobs["async_scheduling"] = bool(config.get("ahead"))
    return knobs
