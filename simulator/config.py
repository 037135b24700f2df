"""Everything that defines a simulated run, as plain data: the same fields as flags, as TOML keys and in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from policies.edges.settings import check_settings, listed
from policies.edges.settings_file import one_spelling
from simulator.errors import SimulationError

COUNTS = (
    "replicas",
    "tp",
    "pp",
    "token_budget",
    "max_num_seqs",
    "max_model_len",
    "block_size",
    "num_blocks",
    "limit",
    "replicas_per_link",
    "plain_tokens",
)
MOST_REPLICAS = 100_000
TUPLES: dict[str, type] = {"layer_split": int, "pools": dict, "failures": str}


@dataclass(frozen=True)
class ReplayConfig:
    """A run, apart from its trace. None means: decided by policy, model or trace.

    engine: as it is served, by name and version (vllm:0.19) or a file (profiler.operators.named_engines): scheduler
    defaults, host and front-end terms; terms: fields of profiler.operators.engine_terms.EngineTerms that differ from
    the engine's. p2p: whether GPUs of a node reach each other directly, as the card's table assumes by default.
    knobs: of the policy. cost_model: auto, roofline, or the path of a fitted model. dtype, kv_dtype: auto is the
    model's own. tp, pp: devices per stage and stages. max_model_len: longest prompt + output, the trace's own longest
    by default. num_blocks: usable KV blocks, otherwise what the GPU's memory holds.
    warmup: requests ("100") or seconds ("30s") left out of the statistics. slo: "ttft_p99=2,tbt_p99=0.2". leaps: cross
    equal iterations in one step. reference: run the simulator that steps through every stage of every request
    (simulator.reference); results are the same.

    replicas, router, router_knobs: equal replicas and how requests are dealt to them. pools: unequal ones instead, each
    a table of `role` (serve, prefill, decode), `replicas` and whatever it has of its own (see simulator.cluster.pools).
    decode_router: picks the decode replica of a prompt that is done. kv_bandwidth: bytes/s of one device's NIC in one
    direction, the GPU's own network by default; kv_latency_s: of one transfer; layerwise_kv: send a layer's KV while
    the next one is being computed. failures: "REPLICA@DOWN_S" or "REPLICA@DOWN_S+FOR_S"; on_failure: requeue or fail.
    autoscale: knobs of simulator.cluster.autoscaling.Autoscaling; empty for a fixed number of replicas. afd: knobs of
    simulator.replica.attention_ffn_apart.Apart; empty for attention and FFN on the same devices. pp_link: link
    (stages in one node) or network.

    prefix_caching: share equal prefixes, whatever the policy. preemption: recompute, swap or auto, to swap_gib of host
    memory in pages of swap_page_mib, over a link of swap_bandwidth bytes/s (the GPU's own by default) that
    replicas_per_link replicas share. ladder: rungs of policies.scheduling.overload_ladder.Ladder, whose knobs are
    trouble_from,
    plain_tokens, risk and max_wait_s. kv_store_gib: each replica's share of a KV store for all of them. kv_compression:
    keys and values older than kv_window tokens packed (kivi4, delta8, ...); kv_compression_cost: what that takes in
    time (see profiler.compression_cost).
    """

    policy: str = "chunked"
    knobs: Mapping[str, Any] = field(default_factory=dict)
    model: str = "llama-3.1-8b"
    gpu: str = "h100"
    cost_model: str = "auto"
    engine: str = "none"
    terms: Mapping[str, Any] = field(default_factory=dict)
    p2p: bool | None = None
    dtype: str = "auto"
    kv_dtype: str = "auto"
    tp: int = 1
    pp: int = 1
    layer_split: tuple[int, ...] | None = None
    pp_overlap: bool = True
    chase_chunks: bool = False
    token_budget: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    watermark: float | None = None
    rate_scale: float = 1.0
    limit: int | None = None
    seed: int = 0
    warmup: str | None = None
    slo: str | None = None
    leaps: bool = True
    reference: bool = False
    replicas: int = 1
    router: str = "least_outstanding_requests"
    router_knobs: Mapping[str, Any] = field(default_factory=dict)
    pools: tuple[Mapping[str, Any], ...] = ()
    decode_router: str = "least_kv"
    decode_router_knobs: Mapping[str, Any] = field(default_factory=dict)
    kv_bandwidth: float | None = None
    kv_latency_s: float = 10e-6
    layerwise_kv: bool = False
    failures: tuple[str, ...] = ()
    on_failure: str = "requeue"
    autoscale: Mapping[str, Any] = field(default_factory=dict)
    afd: Mapping[str, Any] = field(default_factory=dict)
    pp_link: str = "link"
    prefix_caching: bool = False
    preemption: str = "recompute"
    swap_gib: float = 64.0
    swap_page_mib: float = 16.0
    swap_bandwidth: float | None = None
    replicas_per_link: int = 1
    ladder: str | None = None
    trouble_from: float = 0.9
    plain_tokens: int = 8192
    risk: float = 1.0
    max_wait_s: float = 60.0
    kv_store_gib: float | None = None
    kv_compression: str | None = None
    kv_window: int = 128
    kv_compression_cost: str = "bound"

    def __post_init__(self) -> None:
        check_settings(self, SimulationError)
        if self.warmup is not None or self.slo is not None:
            from metrics.measures.slo import check_statistics

            check_statistics(self.warmup, self.slo, SimulationError)
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SimulationError(f"{_flag(name)}: found {value}, expected at least 1")
        if self.seed < 0:
            raise SimulationError(f"--seed: found {self.seed}, expected 0 or more")
        if self.replicas > MOST_REPLICAS:
            raise SimulationError(f"--replicas: found {self.replicas:,}, expected at most {MOST_REPLICAS:,}")
        for name in ("swap_gib", "swap_page_mib", "kv_store_gib", "swap_bandwidth", "max_wait_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e18:
                raise SimulationError(f"{_flag(name)}: found {value:g}, expected above 0 and below 1e18")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise SimulationError(f"--gpu-memory-utilization: found {share:g}, expected above 0 and at most 1")
        if self.watermark is not None and not 0 <= self.watermark < 1:
            raise SimulationError(f"--watermark: found {self.watermark:g}, expected at least 0 and below 1")
        if not 0 < self.rate_scale < float("inf"):
            raise SimulationError(f"--rate-scale: found {self.rate_scale}, expected a number above 0")
        if self.kv_bandwidth is not None and not 0 < self.kv_bandwidth < float("inf"):
            raise SimulationError(f"--kv-bandwidth: found {self.kv_bandwidth}, expected bytes per second above 0")
        if not 0 <= self.kv_latency_s < float("inf"):
            raise SimulationError(f"--kv-latency: found {self.kv_latency_s}, expected seconds, 0 or more")
        if self.pp_link not in ("link", "network"):
            raise SimulationError(f"--pp-link: found {self.pp_link!r}, expected link or network")
        if self.on_failure not in ("requeue", "fail"):
            raise SimulationError(f"--on-failure: found {self.on_failure!r}, expected requeue or fail")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ReplayConfig:
        """A config from plain data (TOML, config.json); an unknown key is an error that names the known ones."""
        known = {entry.name for entry in fields(cls)}
        cleaned = {}
        for name, value in one_spelling(values, "config", SimulationError).items():
            if name not in known:
                raise SimulationError(f"config: unknown key {name!r}; known keys: {', '.join(sorted(known))}")
            if name in TUPLES and value is not None:
                value = listed(_flag(name), value, TUPLES[name], SimulationError)
            cleaned[name] = value
        return cls(**cleaned)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
