"""A cost model that answers no time, or less, for a batch with tokens ends the run and names the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from policies import BatchShape
from simulator import replay
from simulator.errors import SimulationError
from tests.simulator.constant_cost import ConstantCost, trace_of


@dataclass
class Falling(ConstantCost):
    """Costs that fall with the context of decodes, below nothing in the end."""

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> int:
        return self.device_ns - self.per_context_ns * (shape.decode_context_total + shape.prefill_tokens)

    def repeat_ns(self, shape: BatchShape, steps: int, stage: int = 0):
        return self.stage_ns(shape) - self.per_context_ns * shape.decodes * np.arange(steps, dtype=np.int64)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([(0.0, 2000, 3)], "found -1000 ns on stage 0 for a batch with chunks of 2000 tokens on a prefix of 0"),
        ([(0.0, 900, 300)], "found 0 ns on stage 0 for a batch with 1 decodes over 1000 tokens of context"),
    ],
)
@pytest.mark.parametrize("leaps", [True, False])
def test_no_time_is_refused_alone_and_in_leaps(rows, found, leaps):
    cost = Falling(1000, per_context_ns=1)
    with pytest.raises(SimulationError, match=found):
        replay(trace_of(rows), policy="orca", model="llama-3.1-8b", gpu="h100", cost=cost, leaps=leaps)


def test_no_time_of_a_pipeline_is_refused():
    cost = Falling(1000, per_context_ns=1, stages=2)
    with pytest.raises(SimulationError, match="on stage 0 for a batch with 1 decodes over 1000 tokens"):
        replay(trace_of([(0.0, 900, 300)]), policy="orca", model="llama-3.1-8b", gpu="h100", pp=2, cost=cost)
