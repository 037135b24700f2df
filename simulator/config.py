"""Everything that defines a simulated run, as plain data: the same fields as flags, as TOML keys and in config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from policies.edges.declared_settings import check_declared, from_plain, pairs, setting
from policies.kv_memory.swap import PREEMPTIONS
from simulator.errors import SimulationError

POLICY, ENGINE, MEMORY, PIPELINE = "Policy", "Engine", "KV memory", "Pipeline"
RANKS, CLUSTER, TRACE, OUTPUT = "Ranks", "Cluster", "Trace", "Output"
MOST_REPLICAS = 100_000
_MOST = 1e18


def _split(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SimulationError(f"--layer-split: found {text!r}, expected whole numbers as 16,16") from None


def _pools(texts: Collection[str]) -> tuple[dict[str, Any], ...]:
    from simulator.cluster.pools import parse_pool

    return tuple(parse_pool(text) for text in texts)


def _terms(texts: Collection[str]) -> dict[str, Any]:
    from profiler.operators.engine_terms import parse_terms

    return dict(parse_terms(list(texts), SimulationError))


def _repeated_pairs(flag: str) -> dict[str, Any]:
    """How a flag that may be repeated gives the entries of a table."""
    return {"typed": list[str] | None, "parse": lambda texts: pairs(flag, texts, SimulationError)}


def _one_text_of_pairs(flag: str) -> dict[str, Any]:
    return {"typed": str | None, "parse": lambda text: pairs(flag, text.split(","), SimulationError)}


@dataclass(frozen=True)
class ReplayConfig:
    """A run, apart from its trace. None means: decided by policy, model or trace.

    Every field says below what it is; `--help` and docs/settings.md show the same words. knobs: of the policy. pools:
    unequal replicas in place of `replicas`, each a table of `role` (serve, prefill, decode), `replicas` and whatever it
    has of its own (simulator.cluster.pools). autoscale: knobs of simulator.cluster.autoscaling.Autoscaling; empty for a
    fixed number of replicas. afd: knobs of simulator.replica.attention_ffn_apart.Apart; empty for attention and FFN on
    the same devices. ladder: rungs of policies.scheduling.overload_ladder.Ladder.
    """

    policy: str = setting(
        "chunked", "Name of a policy, or path/to/file.py:ClassName; its knobs are flags too.", group=POLICY
    )
    knobs: Mapping[str, Any] = setting(make=dict, text="Knobs of the policy; on a command line flags.", flag="")
    token_budget: int | None = setting(
        None, "Most tokens of a batch, prefill and decode together.", group=POLICY, least=1
    )
    max_num_seqs: int | None = setting(None, "Most requests admitted at once.", group=POLICY, least=1)

    model: str = setting("llama-3.1-8b", "Model name, Hugging Face folder, config.json or TOML file.", group=ENGINE)
    gpu: str = setting("h100", "GPU name, or a TOML file that describes one.", group=ENGINE)
    cost_model: str = setting(
        "auto", "auto (a fitted one if it ships for this GPU), roofline, a model file, or FILE.py:Class.", group=ENGINE
    )
    engine: str = setting(
        "none",
        "Engine as it is served: vllm:0.19, trtllm, ... or a TOML file; none: kernels and scheduler alone.",
        group=ENGINE,
    )
    terms: Mapping[str, Any] = setting(
        make=dict,
        text="Change a term of the engine, as host_tp_step_us=0; repeatable.",
        group=ENGINE,
        flag="--term",
        typed=list[str] | None,
        parse=_terms,
    )
    p2p: bool | None = setting(
        None,
        "GPUs of a node reach each other directly; as the card's table says by default.",
        group=ENGINE,
        flag="--p2p/--no-p2p",
    )
    speculation: str | None = setting(
        None, "Drafts are verified: ngram:4, draft:3 or eagle:4, the method and drafts a step.", group=ENGINE
    )
    acceptance: str | float | None = setting(
        None,
        "Drafts accepted: 0.7, each=0.8,0.6, curve=RUN, mean=1.5, trace (docs/concepts/speculation.md).",
        group=ENGINE,
        typed=str | None,
    )
    drafts_found: float | None = setting(
        None, "Share of steps in which ngram finds drafts; 1 by default.", group=ENGINE, least=0, most=1
    )
    draft_model: str | None = setting(None, "Model that drafts (with draft:K); as --model.", group=ENGINE)
    draft_step_us: float | None = setting(
        None, "Launches and sampling of one drafted token, us; by default assumed.", group=ENGINE, least=0, below=_MOST
    )
    dtype: str = setting("auto", "Weights and activations; auto is the model's own.", group=ENGINE)
    weight_dtype: str = setting(
        "auto",
        "Weights of linear layers: fp8, fp8_block, int4, ..., bfloat16; auto is the checkpoint's own.",
        group=ENGINE,
    )
    kv_dtype: str = setting("auto", "Keys and values; auto is the checkpoint's, or that of activations.", group=ENGINE)
    routing: str = setting(
        "uniform",
        "How tokens spread over experts: uniform, balanced, power_law_1.01, power_law_1.2, ....",
        group=ENGINE,
    )
    tp: int = setting(1, "Tensor-parallel devices per stage.", group=ENGINE, least=1)
    dp: int = setting(1, "Data-parallel ranks of a replica, each of --tp devices.", group=RANKS, least=1, most=1024)
    ep: bool = setting(
        False,
        "Whole experts on each of the tp x dp devices; without it every expert is cut over all of them.",
        group=RANKS,
    )
    ranks_step: str = setting(
        "auto",
        "Ranks step together where the model has experts (auto), or always (together; vLLM before 0.12).",
        group=RANKS,
        choices=("auto", "together"),
    )
    rank_router: str = setting(
        "vllm_ranks", "Which rank of its replica gets a request: a router's name, or FILE.py:Class.", group=RANKS
    )
    rank_router_knobs: Mapping[str, Any] = setting(
        make=dict,
        text="A knob of that router; repeatable.",
        group=RANKS,
        flag="--rank-router-knob",
        **_repeated_pairs("--rank-router-knob"),
    )
    max_model_len: int | None = setting(
        None, "Longest prompt + output; by default the trace's, if the model allows.", group=ENGINE, least=1
    )
    leaps: bool = setting(
        True,
        "Step through equal iterations one by one (the plain path).",
        group=ENGINE,
        flag="--plain",
        typed=bool,
        parse=lambda plain: not plain,
    )
    reference: bool = setting(
        False, "Run the readable reference simulator: slow, and the same in every nanosecond.", group=ENGINE
    )

    block_size: int = setting(16, "Tokens per KV block.", group=MEMORY, least=1)
    num_blocks: int | None = setting(None, "Usable KV blocks; by default what the GPU holds.", group=MEMORY, least=1)
    gpu_memory_utilization: float | None = setting(
        None, "Share of the GPU's memory used; the policy's own rule by default.", group=MEMORY, above=0, most=1
    )
    watermark: float | None = setting(
        None, "Share of the KV blocks that admission leaves free.", group=MEMORY, least=0, below=1
    )
    prefix_caching: bool = setting(
        False, "Share full KV blocks of equal prefixes between requests and turns.", group=MEMORY
    )
    preemption: str = setting(
        "recompute",
        "What preempted requests do: recompute, swap, or the cheaper (auto).",
        group=MEMORY,
        choices=PREEMPTIONS,
    )
    swap_gib: float = setting(64.0, "Host memory of a replica to swap to, in GiB.", group=MEMORY, above=0, below=_MOST)
    swap_page_mib: float = setting(
        16.0, "Page of host memory, the unit of swapping, in MiB.", group=MEMORY, above=0, below=_MOST
    )
    swap_bandwidth: float | None = setting(
        None, "Bytes/s between device and host, one way; the GPU's own by default.", group=MEMORY, above=0, below=_MOST
    )
    replicas_per_link: int = setting(1, "Replicas that share one link to host memory.", group=MEMORY, least=1)
    ladder: str | None = setting(
        None, "Against full memory: preempt, plain, offload, oversubscribe, reject; or all, or none.", group=MEMORY
    )
    trouble_from: float = setting(0.9, "Share of blocks in use from which memory is short.", group=MEMORY)
    plain_tokens: int = setting(
        8192, "Most prefill tokens of a batch without decodes (rung plain).", group=MEMORY, least=1
    )
    risk: float = setting(
        1.0, "Answers counted on: 0 the longest allowed, 1 the expected (rung oversubscribe).", group=MEMORY
    )
    max_wait_s: float = setting(
        60.0,
        "Longest expected wait for a first token, in s (rung reject).",
        group=MEMORY,
        flag="--max-wait",
        above=0,
        below=_MOST,
    )
    kv_store_gib: float | None = setting(
        None,
        "KV store that all replicas share over RDMA: GiB of each replica's host.",
        group=MEMORY,
        above=0,
        below=_MOST,
    )
    kv_compression: str | None = setting(None, "Pack old keys and values: kivi4, kivi2, delta8, ...", group=MEMORY)
    kv_window: int = setting(128, "Most recent tokens that stay in full precision.", group=MEMORY)
    kv_compression_cost: str = setting(
        "bound",
        "Time of packing and reading: bound (bytes over bandwidth), fused, none, cpu, or a file that was measured.",
        group=MEMORY,
    )

    pp: int = setting(1, "Pipeline stages.", group=PIPELINE, least=1)
    layer_split: tuple[int, ...] | None = setting(
        None, "Layers of each stage, as 16,16.", group=PIPELINE, typed=str | None, parse=_split, listed=int
    )
    pp_overlap: bool = setting(
        True,
        "A stage computes while its last output is being sent.",
        group=PIPELINE,
        flag="--pp-overlap/--no-pp-overlap",
    )
    chase_chunks: bool = setting(
        False,
        "A prompt's next chunk may follow its last one through the stages.",
        group=PIPELINE,
    )
    pp_link: str = setting(
        "link", "Stages share a node (link) or not (network).", group=PIPELINE, choices=("link", "network")
    )

    replicas: int = setting(1, "Equal replicas of the engine.", group=CLUSTER, least=1, most=MOST_REPLICAS)
    router: str = setting(
        "least_outstanding_requests",
        "Who gets a request: a router's name, or path/to/file.py:ClassName.",
        group=CLUSTER,
    )
    router_knobs: Mapping[str, Any] = setting(
        make=dict,
        text="A knob of the router, as spill=8; repeatable.",
        group=CLUSTER,
        flag="--router-knob",
        **_repeated_pairs("--router-knob"),
    )
    pools: tuple[Mapping[str, Any], ...] = setting(
        (),
        "Replicas of one kind (serve, prefill or decode), as role=decode,replicas=2; repeatable.",
        group=CLUSTER,
        flag="--pool",
        typed=list[str] | None,
        parse=_pools,
        listed=dict,
    )
    decode_router: str = setting("least_kv", "Who decodes a prompt that is done (with decode pools).", group=CLUSTER)
    decode_router_knobs: Mapping[str, Any] = setting(
        make=dict,
        text="A knob of that router; repeatable.",
        group=CLUSTER,
        flag="--decode-router-knob",
        **_repeated_pairs("--decode-router-knob"),
    )
    kv_bandwidth: float | None = setting(
        None, "Bytes/s of a device's NIC for KV transfers; the GPU's own by default.", group=CLUSTER, above=0
    )
    kv_latency_s: float = setting(
        10e-6, "Seconds of latency of a KV transfer.", group=CLUSTER, flag="--kv-latency", least=0
    )
    layerwise_kv: bool = setting(False, "Send a layer's KV while the next layer is computed.", group=CLUSTER)
    failures: tuple[str, ...] = setting(
        (),
        "REPLICA@SECONDS dies, REPLICA@SECONDS+SECONDS comes back; repeatable.",
        group=CLUSTER,
        flag="--fail",
        typed=list[str] | None,
        parse=tuple,
        listed=str,
    )
    on_failure: str = setting(
        "requeue",
        "requeue the requests of a dead replica, or fail them.",
        group=CLUSTER,
        choices=("requeue", "fail"),
    )
    autoscale: Mapping[str, Any] = setting(
        make=dict,
        text="Grow and shrink a pool, as most=8,by=queue,startup_s=60 (docs/concepts/clusters.md).",
        group=CLUSTER,
        **_one_text_of_pairs("--autoscale"),
    )
    afd: Mapping[str, Any] = setting(
        make=dict,
        text="Attention and FFN on devices of their own, as attention=4,ffn=4 (docs/concepts/clusters.md).",
        group=CLUSTER,
        **_one_text_of_pairs("--afd"),
    )

    rate_scale: float = setting(1.0, "Arrivals this many times as fast.", group=TRACE, above=0)
    limit: int | None = setting(None, "Only the first so many requests.", group=TRACE, least=1)
    seed: int = setting(0, "Seed of everything random.", group=TRACE, least=0)
    warmup: str | None = setting(
        None, "Requests (100), seconds (30s) or auto: left out of the statistics.", group=OUTPUT
    )
    slo: str | None = setting(
        None,
        "Objective, as ttft_p99=2,tbt_p99=0.2 (seconds); by SLO class: chat:ttft_p99=1;...",
        group=OUTPUT,
    )

    def __post_init__(self) -> None:
        check_declared(self, SimulationError)
        if self.warmup is not None or self.slo is not None:
            from metrics.measures.slo import check_statistics

            check_statistics(self.warmup, self.slo, SimulationError)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ReplayConfig:
        """A config from plain data (TOML, config.json); an unknown key is an error that names the known ones."""
        return from_plain(cls, values, SimulationError)
