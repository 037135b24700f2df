"""A live run's memory measures: host memory to swap to, measured costs, and the admission control of the simulator."""

from __future__ import annotations

from math import ceil

from executor.config import LiveConfig
from executor.kv_cache import KVCache
from executor.swap import HostCache
from policies.admission import AdmissionControl, Ladder
from policies.swap import HostMemory, Swap, SwapCosts

GIB, MIB = 2**30, 2**20


class MeasuredCosts:
    """Costs of moving and of prefilling, filled in once the engine has warmed up. Both in proportion to their size."""

    def __init__(self) -> None:
        self.block_ns = 0.0
        self.token_ns = 0.0

    def move_ns(self, blocks: int) -> int:
        return ceil(self.block_ns * blocks)

    def prefill_ns(self, tokens: int) -> int:
        return ceil(self.token_ns * tokens)


def ladder_of(config: LiveConfig) -> Ladder | None:
    if config.ladder is None:
        return None
    return Ladder.of(
        config.ladder, trouble_from=config.trouble_from, plain_tokens=config.plain_tokens, risk=config.risk,
        max_wait_s=config.max_wait_s,
    )  # fmt: skip


def make_swap(config: LiveConfig, block_bytes: int, costs: MeasuredCosts) -> Swap | None:
    """Host memory as the config wants it; None where preempted requests recompute."""
    ladder = ladder_of(config)
    if "offload" not in ladder.rungs if ladder is not None else config.preemption == "recompute":
        return None
    memory = HostMemory.of(round(config.swap_gib * GIB), block_bytes, round(config.swap_page_mib * MIB))
    how = "auto" if config.preemption == "recompute" else config.preemption
    return Swap(memory, how, SwapCosts(costs.move_ns, costs.prefill_ns))  # type: ignore[arg-type]


def make_admission(config: LiveConfig) -> AdmissionControl | None:
    ladder = ladder_of(config)
    return None if ladder is None else AdmissionControl(ladder)


def make_host_cache(swap: Swap | None, cache: KVCache) -> HostCache | None:
    return None if swap is None else HostCache(cache, swap.memory.blocks)
