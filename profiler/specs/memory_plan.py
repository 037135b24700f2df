"""How many requests fit: weights, activations and KV cache of one device, in blocks (paged) or in slots (SARATHI).

A replica holds what its fullest device holds, so a pipeline's pool is that of its tightest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from profiler.errors import ProfileError
from profiler.specs.dtypes import dtype_bytes
from profiler.specs.hardware import Hardware
from profiler.specs.layer_split import check_split, split_layers
from profiler.specs.model_spec import ModelSpec

RUNTIME_BYTES = 551 * 2**20
"""CUDA context, libraries and allocator slack on each device: the 551 MB of NVIDIA aiconfigurator's system files."""

LOGIT_BYTES = 4 + 4
"""Float32 logits and their softmax beside the 16-bit logits of each sampled row."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one device (the tightest of the replica), in bytes; kv_bytes is what is left for the cache.

    kv_bytes_per_token: on that device. num_blocks: blocks of `block_size` tokens in the pool of the replica.
    """

    stage: int
    memory_bytes: int
    usable_bytes: int
    weight_bytes: int
    activation_bytes: int
    runtime_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def paged_requests(self, mean_tokens: float) -> int:
        """Requests whose KV fits at once in blocks when each holds `mean_tokens` (its last block partly empty)."""
        blocks = -(-mean_tokens // self.block_size)
        return int(self.num_blocks // max(1, blocks))

    def summary(self) -> dict[str, Any]:
        return {**asdict(self), "kv_tokens": self.kv_tokens}


def plan_memory(
    model: ModelSpec,
    hardware: Hardware,
    *,
    dtype: str = "bfloat16",
    weight_dtype: str = "auto",
    kv_dtype: str = "auto",
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: bool = False,
    layer_split: Sequence[int] | None = None,
    block_size: int = 16,
    utilisation: float = 0.9,
    headroom: float | None = None,
    activation_tokens: int = 2048,
    max_num_seqs: int = 256,
    runtime_bytes: int = RUNTIME_BYTES,
) -> MemoryPlan:
    """The memory plan of the replica's tightest device, as vLLM makes it: a share of the device, minus what is not KV.

    utilisation: share of the device's memory that the engine may use (vLLM's gpu_memory_utilization). headroom: share
    left free (SARATHI's 20 %); given instead of utilisation, never beside it. activation_tokens: largest batch in
    tokens; max_num_seqs: largest number of sampled rows. dp: data-parallel ranks that experts are split over besides,
    ep: whole experts on each device. weight_dtype: `ModelSpec.served_as`. Raises ProfileError where
    not one block is left.
    """
    share = utilisation if headroom is None else 1.0 - headroom
    if not 0 < share <= 1:
        raise ProfileError(f"memory: a usable share of {share:g} was asked for, expected above 0 and at most 1")
    if dp < 1:
        raise ProfileError(f"dp: found {dp}, expected at least 1")
    if block_size < 1 or activation_tokens < 0 or max_num_seqs < 0:
        raise ProfileError("memory: block size must be at least 1, tokens and sequences at least 0")
    model, dtype = model.served_as(dtype, weight_dtype)
    experts: dict[str, Any] = {"expert_ways": tp * dp, "whole_experts": ep} if model.experts else {}
    split = tuple(layer_split) if layer_split is not None else split_layers(model.layers, pp)
    check_split(split, model.layers, pp)
    usable = int(hardware.memory_bytes * share)
    plans = []
    for stage, layers in enumerate(split):
        first, last = stage == 0, stage == pp - 1
        weights = model.weight_bytes(dtype, tp, layers=layers, embedding=first, head=last, **experts)
        rows = max_num_seqs if last else 0
        activations = activation_bytes(model, dtype, tp, activation_tokens, rows, dp=dp)
        left = usable - weights - activations - runtime_bytes
        kv_token = model.kv_bytes_per_token(model.kv_dtype(dtype, kv_dtype), tp, layers=layers)
        taken = weights + activations + runtime_bytes
        blocks = kv_blocks(hardware.memory_bytes, share, taken, kv_token * block_size)
        plans.append(
            MemoryPlan(
                stage,
                hardware.memory_bytes,
                usable,
                weights,
                activations,
                runtime_bytes,
                left,
                kv_token,
                block_size,
                blocks,
            )
        )
    tightest = min(plans, key=lambda plan: plan.num_blocks)
    if tightest.num_blocks < 1:
        raise ProfileError(_too_big(model, hardware, tightest))
    return tightest


def kv_blocks(memory_bytes: int, share: float, taken_bytes: int, block_bytes: int) -> int:
    """Whole KV blocks in a share of a device's memory, after whatever else lies there: the one rule that the plan of a
    simulated device and the pool of a measured one follow."""
    return int(max(0, int(memory_bytes * share) - taken_bytes) // block_bytes)


def num_blocks(model: ModelSpec, hardware: Hardware, **options: Any) -> int:
    """Blocks in the KV pool of a replica; options as plan_memory takes them."""
    return plan_memory(model, hardware, **options).num_blocks


def slots(
    model: ModelSpec,
    hardware: Hardware,
    *,
    max_tokens: int,
    dtype: str = "bfloat16",
    kv_dtype: str = "auto",
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: bool = False,
    layer_split: Sequence[int] | None = None,
    headroom: float = 0.2,
) -> int:
    """B = floor((M_G - M_S) / (L * m_kv)), SARATHI Section 4.3.1: requests that fit when each reserves L tokens.

    max_tokens: L, prompt and output together. headroom: share of M_G left for activations; 20 % gives 18, 9 and
    6 for LLaMA-13B on an A6000 at 1K, 2K and 3K (SARATHI reports 18, 10 and 6), 5 % its 10, 5 and 3 for LLaMA-33B on an
    A100. 0 when none fits.
    """
    if max_tokens < 1:
        raise ProfileError(f"max_tokens: found {max_tokens}, expected at least 1")
    if not 0 <= headroom < 1:
        raise ProfileError(f"headroom: found {headroom:g}, expected 0 up to 1")
    split = tuple(layer_split) if layer_split is not None else split_layers(model.layers, pp)
    check_split(split, model.layers, pp)
    model, dtype = model.served_as(dtype)
    experts: dict[str, Any] = {"expert_ways": tp * dp, "whole_experts": ep} if model.experts else {}
    usable = hardware.memory_bytes * (1.0 - headroom)
    most = []
    for stage, layers in enumerate(split):
        weights = model.weight_bytes(dtype, tp, layers=layers, embedding=stage == 0, head=stage == pp - 1, **experts)
        kv_token = model.kv_bytes_per_token(model.kv_dtype(dtype, kv_dtype), tp, layers=layers)
        most.append(int(max(0.0, usable - weights) // (model.kv_tokens_held(max_tokens) * kv_token)))
    return min(most)


def activation_bytes(model: ModelSpec, dtype: str, tp: int, tokens: int, sampled: int, *, dp: int = 1) -> int:
    """Peak of what is alive at once: the residual and its norm, the widest FFN pair, and the logits.

    Layers reuse each other's memory, so one layer is counted; attention scores are never stored. Expert layers hold the
    tokens of all dp ranks and the widths of each one's top_k experts.
    """
    act = max(2, dtype_bytes(dtype))
    matrices = 3 if model.gated else 2
    ffn = matrices * model.intermediate // tp
    if model.experts:
        widest = matrices * (model.top_k * model.expert_intermediate + model.shared_intermediate) // tp
        ffn = max(ffn if model.dense_layers else 0, widest)
    kinds = model.attention_kinds
    attention = max(kind.heads // tp * kind.head_dim + kind.kv_heads_per_device(tp) * kind.head_dim for kind in kinds)
    gathered = (dp - 1) * 2 * model.hidden if model.experts else 0
    logits = sampled * model.vocab * (act + LOGIT_BYTES)
    return tokens * (2 * model.hidden + max(ffn, 2 * attention) + gathered) * act + logits


def _too_big(model: ModelSpec, hardware: Hardware, plan: MemoryPlan) -> str:
    beside = plan.activation_bytes + plan.runtime_bytes
    weights, other, usable = (f"{size / 2**30:.1f} GiB" for size in (plan.weight_bytes, beside, plan.usable_bytes))
    return (
        f"{model.name} does not fit on {hardware.name}: a device needs {weights} of weights and {other} beside them, "
        f"of {usable} usable; raise tp or pp, or take a smaller dtype"
    )
