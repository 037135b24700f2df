"""A cost model as replicas ask it: the one place in the simulator that knows which fast forms a model has.

A model that defines just the protocol (`profiler.cost_model.CostModel`) is asked by it, call by call. Fast forms are
used where they speak for the model (`profiler.own_forms`): a wrapper that overrides one method is not bypassed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from policies import BatchShape, Ns
from profiler.own_forms import OURS, own_form
from simulator.errors import SimulationError

if TYPE_CHECKING:
    from profiler.cost_model import CostModel

IterationTimes = Callable[[BatchShape], "tuple[Ns, Ns, Ns, bool]"]
StageTimes = Callable[[BatchShape], "Sequence[tuple[Ns, Ns]]"]
Terms = Callable[[BatchShape], "tuple[int, int, float, float, Ns] | None"]


class FastCosts:
    """What a replica takes from its cost model when it is made, so that nothing is looked up on the way.

    iteration_ns: host time before and after, device time and `inside`, of a single stage. stages_ns: (stage, send) of
    every stage. host_ns: before and after. repeat_terms: a straight line that repeated decodes follow, if the model
    knows one. leaves: what batches with chunks leave to the iterations after them, of a single stage. least_ns: what
    no iteration of a single stage falls short of; 0 says nothing.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.host_ns = cost.host_ns
        self.inside = cost.inside
        self.stage_ns: Callable[[BatchShape], Ns] = cost.stage_ns
        if type(cost).__module__.partition(".")[0] not in OURS:
            self.host_ns, self.inside, self.stage_ns = self._two_whole, self._truth, self._whole_stage_ns
        self.iteration_ns: IterationTimes = (
            own_form(cost, "iteration_ns", "host_ns", "stage_ns", "inside") or self._plain_iteration_ns
        )
        self.stages_ns: StageTimes = own_form(cost, "stages_ns", "stage_ns", "send_ns") or self._plain_stages_ns
        self.repeat_terms: Terms | None = own_form(cost, "repeat_terms", "stage_ns", "repeat_ns")
        self._repeat_ns = own_form(cost, "repeat_ns", "stage_ns")
        # Not another form of the same times but more of them: a wrapper that hands it on means it.
        self.leaves: Callable[[BatchShape], list[Ns]] | None = (
            getattr(cost, "aftermath", None) if cost.stages == 1 else None
        )
        least = own_form(cost, "least_ns", "host_ns", "stage_ns")
        self.least_ns: Ns = least() if least is not None and cost.stages == 1 else 0

    def repeat_ns(self, shape: BatchShape, steps: int) -> Any:
        """stage_ns of `steps` iterations in a row, in each of which every decode is one longer; all of them above 0."""
        if self._repeat_ns is not None:
            device = np.asarray(self._repeat_ns(shape, steps), np.int64)
        else:
            device = np.array([self.stage_ns(later(shape, step)) for step in range(steps)], np.int64)
        all_above_nothing(self.cost, shape, device)
        return device

    # A model that defines the protocol alone

    def _plain_iteration_ns(self, shape: BatchShape) -> tuple[Ns, Ns, Ns, bool]:
        before, after = self.host_ns(shape)
        return before, after, self.stage_ns(shape), self.inside(shape)

    def _plain_stages_ns(self, shape: BatchShape) -> list[tuple[Ns, Ns]]:
        cost = self.cost
        return [
            (self.whole("stage_ns", cost.stage_ns(shape, s)), self.whole("send_ns", cost.send_ns(shape, s)))
            for s in range(cost.stages)
        ]

    # What a user's own model answers is looked at

    def _whole_stage_ns(self, shape: BatchShape) -> Ns:
        return self.whole("stage_ns", self.cost.stage_ns(shape, 0))

    def _two_whole(self, shape: BatchShape) -> tuple[Ns, Ns]:
        before, after = self.cost.host_ns(shape)
        return self.whole("host_ns", before), self.whole("host_ns", after)

    def _truth(self, shape: BatchShape) -> bool:
        return bool(self.cost.inside(shape))

    def whole(self, method: str, ns: Any) -> Ns:
        if isinstance(ns, int | np.integer) and (ns >= 0 or method in ("stage_ns", "ranks_ns")):
            return int(ns)
        expected = (
            "whole nanoseconds, 0 or more" if method not in ("stage_ns", "ranks_ns") else "whole nanoseconds above 0"
        )
        raise SimulationError(f"cost model {self.cost.name}: {method}: found {ns!r}, expected {expected} (an int)")


def form_of_ranks(cost: CostModel) -> Callable[[list[BatchShape]], Sequence[Ns]] | None:
    """`ranks_ns` of a cost model whose ranks meet in every step; None where they do not, or there is only one."""
    return _of_ranks(cost, "ranks_ns", "stage_ns") if getattr(cost, "ranks", 1) > 1 else None


def _of_ranks(cost: CostModel, name: str, *stands_for: str) -> Callable[..., Any] | None:
    """`own_form`; ours may mix these forms in below the ones that they stand for."""
    if type(cost).__module__.partition(".")[0] in OURS:
        return getattr(cost, name, None)
    return own_form(cost, name, *stands_for)


def times_of_ranks(
    cost: CostModel,
) -> tuple[Callable[[list[BatchShape]], list[Ns]], Callable[[list[BatchShape], int], Any]]:
    """(`ranks_ns`, `repeat_ranks_ns`) of a cost model (`RankedCostModel`); where ranks step together although it knows
    of no exchange between them, each takes its own time."""
    fast = FastCosts(cost)
    given = form_of_ranks(cost)
    if given is None:

        def each_by_itself(shapes: list[BatchShape]) -> list[Ns]:
            return [fast.stage_ns(shape) for shape in shapes]

        def each_repeats(shapes: list[BatchShape], steps: int) -> Any:
            return np.stack(
                [
                    fast.repeat_ns(shape, steps) if shape.decodes else np.full(steps, fast.stage_ns(shape), np.int64)
                    for shape in shapes
                ]
            )

        return each_by_itself, each_repeats

    def asked(shapes: list[BatchShape]) -> list[Ns]:
        found = [fast.whole("ranks_ns", ns) for ns in given(shapes)]
        if len(found) != len(shapes):
            raise SimulationError(f"cost model {cost.name}: ranks_ns: found {len(found)} times for {len(shapes)} ranks")
        return found

    repeated = _of_ranks(cost, "repeat_ranks_ns", "ranks_ns", "stage_ns")

    def repeat(shapes: list[BatchShape], steps: int) -> Any:
        if repeated is not None:
            return np.asarray(repeated(shapes, steps), np.int64)
        return np.array([asked([later(shape, step) for shape in shapes]) for step in range(steps)], np.int64).T

    return asked, repeat


def all_above_nothing(cost: CostModel, shape: BatchShape, device_ns: Any) -> None:
    """`refuse` of the first of these repeated decodes that takes no time."""
    if device_ns.min() <= 0:
        at = int((device_ns <= 0).argmax())
        refuse(cost, later(shape, at), int(device_ns[at]))


def later(shape: BatchShape, steps: int) -> BatchShape:
    """The shape of a batch of decodes so many steps later; one without decodes stays as it is."""
    if not shape.decodes:
        return shape
    return shape._replace(
        decode_context_total=shape.decode_context_total + steps * shape.decodes,
        decode_context_max=shape.decode_context_max + steps,
    )


def refuse(cost: CostModel, shape: BatchShape, ns: Ns, stage: int = 0) -> None:
    """Raise SimulationError for a stage's time of nothing or less for a batch with tokens, naming the batch."""
    if ns > 0 or not shape.rows:
        return
    chunks = " + ".join([f"{tokens} tokens on a prefix of {prefix}" for tokens, prefix in shape.chunks[:3]])
    if len(shape.chunks) > 3:
        chunks += f" and {len(shape.chunks) - 3} more"
    parts = [f"chunks of {chunks}"] if shape.chunks else []
    if shape.decodes:
        parts.append(f"{shape.decodes} decodes over {shape.decode_context_total} tokens of context")
    if shape.dummy_tokens:
        parts.append(f"{shape.dummy_tokens} dummy tokens")
    raise SimulationError(
        f"cost model {cost.name}: found {ns} ns on stage {stage} for a batch with {', '.join(parts)}; expected more "
        f"than 0, since no batch with tokens takes no time"
    )
