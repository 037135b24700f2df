"""What devices send each other around the experts of a layer, by vLLM's own rule.

Without data-parallel ranks every device has the tokens already, and an all-reduce adds the parts up, whether devices
hold parts of all experts or whole ones. Ranks gather the tokens (and router logits) of all of them first and scatter
the sums back (vLLM's default, all2all_backend allgather_reducescatter); with expert parallel and tensor parallel
together each device sends its part of its rank's tokens alone and the rank gathers the results.
"""

from __future__ import annotations

from typing import NamedTuple

from profiler.specs.model_spec import ModelSpec
from profiler.specs.parallel_layout import ParallelLayout

ELEMENT_BYTES = 2


class Exchange(NamedTuple):
    """One collective. bytes_per_token: of the whole message, for each of the tokens: those of a rank, or, `everywhere`,
    of all ranks together."""

    operation: str
    participants: int
    bytes_per_token: float
    everywhere: bool

    @property
    def link_share(self) -> float:
        """Share of the message that crosses a device's link in a ring."""
        once = (self.participants - 1) / self.participants
        return 2.0 * once if self.operation == "all_reduce" else once


def exchanges(spec: ModelSpec, layout: ParallelLayout) -> tuple[Exchange, ...]:
    """Those of one layer with experts."""
    hidden = float(spec.hidden * ELEMENT_BYTES)
    tp, dp = layout.tp, layout.dp
    if dp == 1:
        return (Exchange("all_reduce", tp, hidden, False),) if tp > 1 else ()
    among = tp * dp if layout.sequence_parallel else dp
    there = Exchange("all_gather", among, hidden + spec.experts * ELEMENT_BYTES, True)
    back = Exchange("reduce_scatter", among, hidden, True)
    if tp == 1:
        return there, back
    after = "all_gather" if layout.sequence_parallel else "all_reduce"
    return there, back, Exchange(after, tp, hidden, False)
