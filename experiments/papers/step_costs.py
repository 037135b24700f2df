"""Single iterations and what they cost, by the operators that papers speak of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from policies import BatchShape

if TYPE_CHECKING:
    from profiler.cost_model import CostModel

PREPROJ, ATTENTION, POSTPROJ, FFN, OTHERS = "preproj", "attention", "postproj", "ffn", "others"
GROUPS = (PREPROJ, ATTENTION, POSTPROJ, FFN, OTHERS)
_GROUP_OF = {"qkv": PREPROJ, "attention_out": POSTPROJ, "ffn_up": FFN, "ffn_down": FFN}
_NOT_IN_LAYERS = {
    "host_before",
    "host_after",
    "embedding",
    "final_norm",
    "head",
    "sampling",
    "sampler",
    "gather_logits",
    "send",
}


def prefill(tokens: int, prefix: int = 0, count: int = 1) -> BatchShape:
    """`count` chunks of equal size, each of which ends its prompt."""
    return BatchShape(((tokens, prefix),) * count, sampled=count)


def decode(size: int, context: int) -> BatchShape:
    """A batch of decodes, each with the same context."""
    return BatchShape((), size, size * context, context, sampled=size)


def hybrid(chunk: int, prefix: int, decodes: int, context: int, *, samples: bool = False) -> BatchShape:
    """One chunk and some decodes. samples: the chunk ends its prompt."""
    return BatchShape(
        ((chunk, prefix),), decodes, decodes * context, context if decodes else 0, sampled=decodes + samples
    )


def iteration_ms(cost: CostModel, shape: BatchShape) -> float:
    """Host and device time of one iteration alone, milliseconds."""
    device = sum(cost.stage_ns(shape, stage) + cost.send_ns(shape, stage) for stage in range(cost.stages))
    return (device + sum(cost.host_ns(shape))) / 1e6


def layers_ms(cost: CostModel, shape: BatchShape) -> dict[str, float]:
    """Time in the transformer layers by operator group, milliseconds; output head, embedding and host left out."""
    found = dict.fromkeys(GROUPS, 0.0)
    for name, ns in cost.breakdown(shape).items():
        if name not in _NOT_IN_LAYERS:
            found[group_of(name)] += ns / 1e6
    return found


def group_of(operator: str) -> str:
    """The group of one operator of a cost model's breakdown."""
    if operator in _GROUP_OF:
        return _GROUP_OF[operator]
    return ATTENTION if "attention" in operator else OTHERS


def linear_and_attention_ms(cost: CostModel, shape: BatchShape) -> float:
    """What SARATHI's tables add up: linear layers and attention of all layers; norms, head and host left out.

    A marginal cost is told from this: whole iterations would charge the decodes of a chunk in the middle of its prompt
    for all of the output head, which such a chunk does not need.
    """
    parts = layers_ms(cost, shape)
    return linear_ms(parts) + parts[ATTENTION]


def linear_ms(parts: Mapping[str, float]) -> float:
    """The linear layers of what `layers_ms` gives."""
    return parts[PREPROJ] + parts[POSTPROJ] + parts[FFN]
