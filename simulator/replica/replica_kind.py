"""What the replicas of one kind share: policy, cost model, KV pool and limits, resolved from a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from policies import Policy, Scheduler, Speculation, knobs_of, largest_batch, make_policy, make_scheduler
from policies.edges.input_digests import digest_of
from policies.registry import policy_class
from policies.scheduling.make_scheduler import LEAST_ROOM
from profiler import Hardware, ModelSpec, load_cost_model, load_hardware, load_model_spec
from profiler.cost_model import CostModel
from profiler.errors import ProfileError
from profiler.load import is_own_class
from profiler.operators.engine_terms import EngineTerms
from profiler.operators.fitting.error_factors import factors
from profiler.operators.named_engines import NONE, NamedEngine, load_engine
from profiler.own_forms import own_form, whole_ns
from profiler.specs.dtypes import dtype_bytes
from profiler.specs.memory_plan import MemoryPlan, plan_memory
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.replica.attention_ffn_apart import AttentionFfnApart, attention_blocks, check_ffn_fits, make_apart
from simulator.replica.fast_costs import form_of_ranks
from simulator.replica.front_end import FrontEndTimes
from simulator.replica.memory_measures import ReplicaMemory, check_memory, compression_ratio, packed_cost
from simulator.speculation.acceptance import Acceptance, make_acceptance
from simulator.speculation.drafting import blocks_beside_drafter, check_speculation, speculating_cost
from workloads import Trace

LONGEST_BY = "positions of the model; --max-model-len allows more"
SAMPLED_AT_LEAST = 256
"""Rows of logits that memory has room for, however few requests may run at once (vLLM's default)."""


@dataclass(frozen=True)
class Engine:
    """What every replica of a run shares: the policy, its costs and its limits.

    nominal: what a policy that plans by time believes, where `cost` is a draw from a model's error (no engine knows
    its own residual); otherwise None, and it believes `cost` itself. named, front: the engine as it is served, and its
    front end. acceptance: what becomes of its drafts, where it speculates.
    """

    policy: Policy
    cost: CostModel
    num_blocks: int
    max_model_len: int
    config: ReplayConfig
    nominal: CostModel | None = None
    named: NamedEngine = field(default_factory=lambda: NamedEngine(NONE))
    front: FrontEndTimes | None = None
    acceptance: Acceptance | None = None

    @property
    def speculation(self) -> Speculation | None:
        """How it drafts tokens, if it does."""
        return None if self.config.speculation is None else Speculation.parse(self.config.speculation)

    @property
    def devices(self) -> int:
        """Devices of one replica."""
        if self.config.afd:
            return make_apart(self.config.afd).devices
        return self.config.tp * self.config.pp * self.config.dp

    @property
    def kv_devices(self) -> int:
        """Devices of one rank that hold keys and values: attention's alone, where the FFN has devices of its own."""
        return make_apart(self.config.afd).attention if self.config.afd else self.config.tp * self.config.pp

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of one replica, each with a scheduler and KV of its own."""
        return self.config.dp

    @property
    def together(self) -> bool:
        """Whether the ranks of a replica step together: expert layers exchange tokens between them, or somebody says
        so. Ranks of a dense model are independent (vLLM runs their engines apart since 0.12)."""
        wanted = self.config.ranks_step == "together"
        return self.ranks > 1 and (wanted or form_of_ranks(self.cost) is not None)

    @property
    def ahead(self) -> bool:
        """Whether the next batch is planned before the running one returns."""
        on_gpu = load_hardware(self.config.gpu).processor == "gpu"
        method = "" if self.speculation is None else self.speculation.method
        return self.policy.plans_ahead(on_gpu=on_gpu, stages=self.config.pp, speculation=method)

    def scheduler(self) -> Scheduler:
        """A fresh scheduler for one replica."""
        config = self.config
        return make_scheduler(
            self.policy,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            max_model_len=self.max_model_len,
            longest_by="" if config.max_model_len else LONGEST_BY,
            token_budget=config.token_budget,
            max_num_seqs=config.max_num_seqs,
            watermark=config.watermark,
            micro_batches=config.pp,
            chase_chunks=config.chase_chunks,
            tile=self.cost.tile,
            estimator=self.estimate_ns,
            ahead=self.ahead,
            prefix_caching=config.prefix_caching,
            swap=self.memory.swap(),
            admission=self.memory.admission(),
            speculation=self.speculation,
        )

    @cached_property
    def memory(self) -> ReplicaMemory:
        """What a replica does when its KV memory is full."""
        return ReplicaMemory(self)

    def drawn(self, seed: int) -> Engine:
        """The same engine with costs drawn from its cost model's own error; it plans by those that were fitted.

        Raises SimulationError for a cost model that does not know its error (the roofline: nothing was measured).
        """
        perturbed = own_form(self.cost, "perturbed", "host_ns", "stage_ns", "send_ns")
        if perturbed is None:
            raise SimulationError(
                f"--runs: {self.cost.name} was not measured and knows no error; take a fitted cost model"
            )
        front = self.front
        if front is not None and (width := self.named.half_widths.get("front_end")):
            front = front.scaled(factors({"front_end": width}, seed)["front_end"])
        return replace(self, cost=perturbed(seed), nominal=self.nominal or self.cost, front=front)

    def estimate_ns(self, shape: Any) -> int:
        """Predicted duration of one iteration, for policies that plan by time."""
        return whole_ns(self.nominal or self.cost, shape)


def make_engine(config: ReplayConfig, trace: Trace, cost: CostModel | None = None) -> Engine:
    """Resolve a config's names into a policy, a cost model and a KV pool. `cost` overrides the config's cost model."""
    named = load_engine(config.engine)
    terms = EngineTerms.from_mapping({**named.terms, **config.terms}, "--term")
    gpu = load_hardware(config.gpu)
    if config.p2p is not None:
        gpu = replace(gpu, p2p=config.p2p)
    config = _with_defaults_of(named, config, gpu)
    policy = make_policy(config.policy, config.knobs)
    check_memory(config)
    speculation = check_speculation(config)
    if config.pp > 1 and getattr(policy, "async_scheduling", False):
        raise SimulationError(
            f"--async with --pp {config.pp}: a pipeline plans ahead already, one micro-batch a stage; leave --async out"
        )
    if config.afd and (config.pp > 1 or config.tp > 1):
        raise SimulationError(f"--afd with --tp {config.tp} --pp {config.pp}: expected the devices inside --afd alone")
    model, _ = load_model_spec(config.model).served_as(config.dtype, config.weight_dtype)
    _check_ranks(config, model)
    # Beside it there is room for two widths in flight, so that no draft is cut by what is only the trace's longest.
    room = 0 if speculation is None else 2 * (1 + speculation.tokens)
    max_model_len = config.max_model_len or min(trace.longest + room, model.context_length)
    if cost is None:
        cost = _apart_cost(config, model, gpu, max_model_len) if config.afd else _cost(config, model, gpu, config.tp)
    cost = packed_cost(config, cost, make_apart(config.afd).attention if config.afd else config.tp)
    cost = speculating_cost(config, cost, model, gpu)
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = int(_num_blocks(config, policy, model, gpu, max_model_len) * blocks_by_windows(model, trace))
        num_blocks = blocks_beside_drafter(config, model, num_blocks)
    if config.num_blocks is None and config.kv_compression is not None and len(trace):
        # As many more as a request of the trace's mean length becomes smaller.
        mean_tokens = int((trace.prompt_tokens + trace.output_tokens).mean())
        num_blocks = int(num_blocks * compression_ratio(config, mean_tokens))
    acceptance = None
    if speculation is not None:
        acceptance = make_acceptance(str(config.acceptance), config.drafts_found, speculation, trace, config.seed)
    front = FrontEndTimes.of(terms)
    engine = Engine(policy, cost, num_blocks, max_model_len, config, named=named, front=front, acceptance=acceptance)
    ranks = getattr(cost, "ranks", config.dp)
    if form_of_ranks(cost) is not None and ranks != config.dp:
        raise SimulationError(f"cost model {cost.name}: found {ranks} ranks, expected {config.dp}, as --dp says")
    if engine.together and config.pp > 1:
        raise SimulationError(
            f"--dp {config.dp} with --pp {config.pp}: ranks that step together have one stage each; leave --pp out"
        )
    return engine


def _check_ranks(config: ReplayConfig, model: ModelSpec) -> None:
    """SimulationError for what does not go together with ranks."""
    if config.dp > 1 and config.afd:
        raise SimulationError(f"--afd with --dp {config.dp}: expected the devices inside --afd alone")
    if config.ep and not model.experts:
        raise SimulationError(f"--ep: {model.name} has no experts to deal over devices; leave --ep out")


def _with_defaults_of(named: NamedEngine, config: ReplayConfig, gpu: Hardware) -> ReplayConfig:
    """The config with the engine's own defaults where it leaves a setting open and its policy has the knob."""
    if named.policy is None:
        return config
    has = knobs_of(policy_class(config.policy))
    knobs = {
        name: value
        for name, value in named.knobs.items()
        if name in has and not (name == "async_scheduling" and config.pp > 1)
    }
    limits: dict[str, Any] = {
        name: named.limit(name, gpu) for name in ("token_budget", "max_num_seqs") if getattr(config, name) is None
    }
    if "chunk_size" in config.knobs:
        limits.pop("token_budget", None)
    return replace(config, knobs={**knobs, **config.knobs}, **limits)


def blocks_by_windows(model: ModelSpec, trace: Trace) -> float:
    """How many times the blocks a pool comes to where layers with a sliding window hold no more than that: over the
    trace's own requests, since the ledger counts a request's whole context in every layer."""
    if model.sliding_window is None or not len(trace):
        return 1.0
    tokens = (trace.prompt_tokens + trace.output_tokens).astype(float)
    return float(tokens.sum() / model.kv_tokens_held(tokens).sum())


def _cost(config: ReplayConfig, model: ModelSpec, gpu: Hardware, tp: int) -> CostModel:
    split = tuple(config.layer_split) if config.layer_split is not None else None
    name, content = config.cost_model, ""
    if is_own_class(name):
        # Made anew: what it keeps is nobody else's.
        options: dict[str, Any] = {} if config.pp_link == "link" else {"pipeline_link": config.pp_link}
        options |= {"dtype": config.dtype, "kv_dtype": config.kv_dtype, "tp": tp, "pp": config.pp, "layer_split": split}
        options |= {"dp": config.dp, "ep": config.ep, "routing": config.routing}
        return load_cost_model(model, gpu, cost_model=name, **options)
    if name not in ("auto", "roofline") and (file := Path(name)).is_file():
        name, content = str(file.resolve()), digest_of(name)
    return _shared_cost(
        model,
        gpu,
        name,
        content,
        config.dtype,
        config.kv_dtype,
        tp,
        config.pp,
        split,
        config.pp_link,
        load_engine(config.engine),
        tuple(sorted(config.terms.items())),
        config.dp if model.experts else 1,
        config.ep,
        config.routing,
    )


@lru_cache(maxsize=16)
def _shared_cost(
    model: ModelSpec,
    gpu: Hardware,
    cost_model: str,
    content: str,
    dtype: str,
    kv_dtype: str,
    tp: int,
    pp: int,
    layer_split: tuple[int, ...] | None,
    pp_link: str,
    engine: NamedEngine,
    terms: tuple[tuple[str, Any], ...],
    dp: int,
    ep: bool,
    routing: str,
) -> CostModel:
    """A cost model never changes, and its tables take longer to load than a short replay: runs of one process share it.

    content: digest of the files that it is read from.
    """
    options: dict[str, Any] = {} if pp_link == "link" else {"pipeline_link": pp_link}
    return load_cost_model(
        model,
        gpu,
        cost_model=cost_model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tp=tp,
        pp=pp,
        layer_split=layer_split,
        engine=engine,
        terms=dict(terms),
        dp=dp,
        ep=ep,
        routing=routing,
        **options,
    )


def _apart_cost(config: ReplayConfig, model: ModelSpec, gpu: Hardware, max_model_len: int) -> CostModel:
    """Two groups of devices, each with the cost model of its GPU and width."""
    apart = make_apart(config.afd)
    model.refuse_experts("--afd knows dense layers only; leave --afd out")
    if model.weight_bits is not None or model.latent:
        raise SimulationError(f"--afd: {model.name}: expected 16-bit weights, and keys and values of every head")
    ffn_gpu = load_hardware(apart.ffn_gpu) if apart.ffn_gpu else gpu
    policy = make_policy(config.policy, config.knobs)
    tokens = largest_batch(policy, config.token_budget, max_model_len)
    share = _memory_rule(config, policy)
    check_ffn_fits(model, ffn_gpu, apart, dtype=_dtype(config.dtype, model), share=share, activation_tokens=tokens)
    return AttentionFfnApart(
        _cost(config, model, gpu, apart.attention),
        _cost(config, model, ffn_gpu, apart.ffn),
        apart,
        layers=model.layers,
        hidden_bytes=model.hidden * max(2, dtype_bytes(_dtype(config.dtype, model))),
        bytes_per_s=apart.bytes_per_s(gpu, ffn_gpu),
    )


def _num_blocks(config: ReplayConfig, policy: Policy, model: ModelSpec, gpu: Hardware, max_model_len: int) -> int:
    """What the device's memory holds beside weights and the activations of the largest batch."""
    share = _memory_rule(config, policy)
    room: dict[str, Any] = {
        "activation_tokens": largest_batch(policy, config.token_budget, max_model_len),
        "max_num_seqs": max(SAMPLED_AT_LEAST, config.max_num_seqs or policy.default_max_num_seqs() or 0),
    }
    dtype = _dtype(config.dtype, model)
    if config.afd:
        kv_dtype = model.kv_dtype(dtype, config.kv_dtype)
        return attention_blocks(
            model,
            gpu,
            make_apart(config.afd),
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=config.block_size,
            share=share,
            **room,
        )
    plan = partial(
        plan_memory,
        model,
        gpu,
        dtype=dtype,
        kv_dtype=config.kv_dtype,
        tp=config.tp,
        pp=config.pp,
        dp=config.dp,
        ep=config.ep,
        layer_split=config.layer_split,
        block_size=config.block_size,
        utilisation=share,
        max_num_seqs=room["max_num_seqs"],
    )
    whole_prompt = room["activation_tokens"] >= max_model_len
    return plan(
        activation_tokens=room["activation_tokens"] if not whole_prompt else _longest_prompt(plan, room)
    ).num_blocks


def _longest_prompt(plan: Callable[..., MemoryPlan], room: Mapping[str, int]) -> int:
    """Tokens of the longest prompt whose activations and KV fit together: a longer one never runs, so nothing is kept
    for it, and it is rejected by the pool that this leaves."""
    least, most = min(LEAST_ROOM, room["activation_tokens"]), room["activation_tokens"]

    def fits(tokens: int) -> bool:
        try:
            found = plan(activation_tokens=tokens)
        except ProfileError:
            return False
        return found.num_blocks * found.block_size >= tokens

    if fits(most) or not fits(least):
        return most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _memory_rule(config: ReplayConfig, policy: Policy) -> float:
    """Share of a device's memory that may be used: as the config says, or as the policy's system has it."""
    if config.gpu_memory_utilization is not None:
        return config.gpu_memory_utilization
    rule = policy.memory
    return 1.0 - rule.headroom if rule.headroom else rule.utilisation


def _dtype(dtype: str, model: Any) -> str:
    if dtype != "auto":
        return dtype
    return model.dtype if model.dtype in ("bfloat16", "float16") else "bfloat16"
