"""What a cost model answers, held against what time can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies import BatchShape, Ns
from simulator.errors import SimulationError

if TYPE_CHECKING:
    from profiler.cost_model import CostModel


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
