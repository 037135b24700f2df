"""The flags about KV memory under pressure: prefix cache, swapping, the trouble ladder, the shared pool."""

from __future__ import annotations

from typing import Annotated, Any

import typer

MEMORY = "KV memory"


def _option(flag: str, text: str) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=MEMORY)


PrefixCaching = Annotated[
    bool, _option("--prefix-caching", "Share full KV blocks of equal prefixes between requests and turns.")
]
PreemptionKind = Annotated[
    str, _option("--preemption", "What preempted requests do: recompute, swap, or the cheaper (auto).")
]
SwapGiB = Annotated[float, _option("--swap-gib", "Host memory of a replica to swap to, in GiB.")]
SwapPage = Annotated[float, _option("--swap-page-mib", "Page of host memory, the unit of swapping, in MiB.")]
SwapBandwidth = Annotated[
    float | None, _option("--swap-bandwidth", "Bytes/s between device and host, one way; the GPU's own by default.")
]
LinkShared = Annotated[int, _option("--replicas-per-link", "Replicas that share one link to host memory.")]
LadderRungs = Annotated[
    str | None,
    _option("--ladder", "Against full memory: preempt, plain, offload, oversubscribe, reject; or all, or none."),
]
TroubleFrom = Annotated[float, _option("--trouble-from", "Share of blocks in use from which memory is short.")]
PlainTokens = Annotated[int, _option("--plain-tokens", "Most prefill tokens of a batch without decodes (rung plain).")]
Risk = Annotated[
    float, _option("--risk", "Answers counted on: 0 the longest allowed, 1 the expected (rung oversubscribe).")
]
MaxWait = Annotated[float, _option("--max-wait", "Longest expected wait for a first token, in s (rung reject).")]
SharedPool = Annotated[
    float | None, _option("--kv-store-gib", "KV store that all replicas share over RDMA: GiB of each replica's host.")
]
KVCompression = Annotated[
    str | None,
    _option("--kv-compression", "Pack old keys and values: kivi4, kivi2, delta8, ..."),
]
KVCompressionCost = Annotated[
    str,
    _option(
        "--kv-compression-cost",
        "Time of packing and reading: bound (bytes over bandwidth), fused, none, cpu, or a file that was measured.",
    ),
]
KVWindow = Annotated[int, _option("--kv-window", "Most recent tokens that stay in full precision.")]

FLAGS: dict[str, tuple[Any, Any]] = {
    "prefix_caching": (PrefixCaching, False),
    "preemption": (PreemptionKind, "recompute"),
    "swap_gib": (SwapGiB, 64.0),
    "swap_page_mib": (SwapPage, 16.0),
    "swap_bandwidth": (SwapBandwidth, None),
    "replicas_per_link": (LinkShared, 1),
    "ladder": (LadderRungs, None),
    "trouble_from": (TroubleFrom, 0.9),
    "plain_tokens": (PlainTokens, 8192),
    "risk": (Risk, 1.0),
    "max_wait_s": (MaxWait, 60.0),
    "kv_store_gib": (SharedPool, None),
    "kv_compression": (KVCompression, None),
    "kv_window": (KVWindow, 128),
    "kv_compression_cost": (KVCompressionCost, "bound"),
}
"""Name of the config field -> (annotation, default)."""
