"""Replay a trace for real: trace and config in, a run (tables, summary, config) out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.kv_memory.block_names import TextNames
from executor.kv_memory.compressed_pool import CompressedKVCache
from executor.machine.device_timing import annotate
from executor.machine.threads import set_threads
from executor.model.loading import Loaded, load_model, pick_device
from executor.model.sampler import Sampling
from executor.serving.conversation import Conversations, keeps_history
from executor.serving.device_memory import choose_allocator
from executor.serving.live_engine import LiveEngine, Outcome
from executor.serving.memory_measures import (
    MeasuredCosts,
    make_admission,
    make_cache,
    make_host_cache,
    make_swap,
    moved_block_bytes,
)
from executor.serving.pool_size import default_blocks
from executor.serving.prompts import Prompts, file_prompts, trace_prompts
from executor.serving.request_text import Text
from executor.serving.runner import Runner
from executor.serving.warm_up import measure_costs, warm_up
from policies import BatchShape, Ns, Policy, Scheduler, Track, knobs_of, largest_batch, make_policy, make_scheduler
from policies.contract.draft import UNLIMITED
from policies.scheduling.memory_counts import memory_counts
from profiler.own_forms import whole_ns
from workloads.generating.shared_prefixes import with_prefix_hashes
from workloads.trace import Trace

if TYPE_CHECKING:
    from metrics import RunTables
    from profiler.cost_model import CostModel

LONGEST_BY = "positions of the model"
PACKAGES = ("charioteer", "torch", "numpy", "safetensors", "tokenizers", "pyarrow")


@dataclass
class LiveRun:
    """A finished live run. answers: row -> output token ids."""

    tables: RunTables
    config: dict[str, Any]
    summary: dict[str, Any]
    outcome: Outcome

    @property
    def answers(self) -> dict[int, list[int]]:
        return self.outcome.answers

    def write(self, path: str | Path) -> Path:
        """Write the run folder, whole or not at all."""
        from metrics import write_run

        return write_run(path, self.tables, self.config, self.summary)


def replay_live(
    trace: Trace,
    config: LiveConfig | None = None,
    *,
    loaded: Loaded | None = None,
    prompts: Prompts | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_token: Callable[[int, int], None] | None = None,
    on_ended: Callable[[Track], None] | None = None,
    stop_ids: tuple[int, ...] = (),
    cost: CostModel | None = None,
    between: Callable[[], None] | None = None,
    **options: Any,
) -> LiveRun:
    """Serve `trace` with a real model under one policy.

    options: fields of `LiveConfig`; a name that is none of them has to be a knob of the policy. loaded: a model that
    is loaded already (it then overrides the config's model, device and dtypes). prompts: row -> token ids. cost: what
    iterations of this engine are expected to take, for policies that plan by time. on_token(row, token) and
    on_ended(track) are called while the run goes on, between() after every batch (see `executor.machine.speed_gauge`).

    Raises ExecutorError, PolicyError, ProfileError or TraceError for anything that cannot be run as asked.
    """
    config = _with_options(config or LiveConfig(), options)
    if config.limit is not None:
        trace = trace.head(config.limit)
    if not len(trace):
        raise ExecutorError(f"{trace.name}: found no requests, expected at least one")
    trace = with_prefix_hashes(trace, config.block_size)
    set_threads(config.threads)
    policy = make_policy(config.policy, config.knobs)
    longest = config.max_model_len or trace.longest
    if loaded is None:
        with load_for(config, longest) as loaded:
            return replay_live(
                trace,
                config,
                loaded=loaded,
                prompts=prompts,
                progress=progress,
                on_token=on_token,
                on_ended=on_ended,
                stop_ids=stop_ids,
                cost=cost,
                between=between,
            )
    max_model_len = min(longest, loaded.max_tokens)
    devices = devices_of(loaded)
    costs = MeasuredCosts()
    names = TextNames()
    scheduler = scheduler_of(policy, config, loaded, trace, max_model_len, cost, costs, names)
    if config.poison and scheduler.ledger.prefix_caching:
        raise ExecutorError("--poison: freed blocks of a prefix cache may be read again; switch one of them off")
    from metrics import Recorder

    recorder = Recorder()
    rows = min(scheduler.max_num_seqs, len(trace), 256)
    most_tokens = min(scheduler.token_budget, int(trace.prompt_tokens.sum()))
    runner = devices.make_runner(config, scheduler, max_model_len, rows, most_tokens)
    names.texts = runner.texts
    said = prompts or _prompts(config, trace, loaded)
    conversations = Conversations(trace, said) if prompts is None and keeps_history(trace) else None

    def on_end(row: int, text: Text) -> None:
        names.forget(row)
        if conversations is not None:
            conversations.ended(row, text.ids[: text.length])

    engine = devices.make_engine(
        scheduler,
        runner,
        recorder,
        trace,
        conversations or said,
        sampling=lambda row: Sampling(config.temperature, config.top_k, config.top_p, config.seed * 1_000_003 + row),
        stop_ids=stop_ids,
        pinned=config.ignore_eos,
        time_scale=config.time_scale,
        at_once=config.as_fast_as_possible,
        progress=progress,
        on_token=on_token,
        inside=None if cost is None else cost.inside,
        on_end=on_end,
        on_ended=on_ended,
        between=between,
    )
    devices.make_ready(runner, scheduler, costs)
    gc.collect()
    gc.freeze()  # what is alive now stays: collections during the run need not walk it
    try:
        outcome = engine.run()
    finally:
        gc.unfreeze()
    facts = devices.after(engine)
    return finish(trace, config, policy, scheduler, runner, recorder, outcome, max_model_len, facts)


class OneRank:
    """A model on one device: how `replay_live` makes its runner and engine. `executor.distributed` has its twin."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded

    def make_runner(
        self, config: LiveConfig, scheduler: Scheduler, longest: int, rows: int, most_tokens: int
    ) -> Runner:
        """With the KV pool of the run. rows: requests at once; most_tokens: of one batch."""
        blocks = scheduler.ledger.total_blocks
        cache = make_cache(config, self.loaded, blocks, rows, most_tokens)
        speculation = scheduler.speculation
        if speculation is None:
            runner = Runner(self.loaded, cache, scheduler.ledger, longest, rows=rows, poison=config.poison)
        else:
            from executor.speculation.speculating_runner import SpeculatingRunner, load_drafter

            runner = SpeculatingRunner(
                self.loaded,
                cache,
                scheduler.ledger,
                longest,
                rows=rows,
                poison=config.poison,
                speculation=speculation,
                drafter=load_drafter(config, self.loaded, blocks, longest),
            )
        runner.host = make_host_cache(scheduler.swap, cache)
        return runner

    def make_engine(self, *arguments: Any, **options: Any) -> LiveEngine:
        scheduler: Scheduler = arguments[0]
        if scheduler.speculation is None:
            return LiveEngine(*arguments, **options)
        from executor.speculation.speculating_runner import SpeculatingEngine

        return SpeculatingEngine(*arguments, **options)

    def make_ready(self, runner: Runner, scheduler: Scheduler, costs: MeasuredCosts) -> None:
        """Whatever has to be done before time counts."""
        warm_up(runner)
        measure_costs(runner, scheduler, costs)

    def after(self, engine: LiveEngine) -> dict[str, Any]:
        """What the run folder says beyond a single device's run."""
        return {}


def devices_of(loaded: Loaded) -> OneRank:
    if not loaded.is_sharded:
        return OneRank(loaded)
    from executor.distributed.sharded_replay import ManyRanks

    return ManyRanks(loaded)


def load_for(config: LiveConfig, longest: int) -> Loaded:
    """The model that a config names, for contexts up to `longest` (or as far as the model reaches).

    A context manager: with several ranks (`tp`, `pp`) leaving it ends the others.
    """
    if config.tp * config.pp > 1:
        from executor.distributed import load_sharded

        return load_sharded(config, longest)
    choose_allocator(config.allocator)
    config = _reading_packed(config)
    loaded = load_model(
        config.model,
        device=config.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        kernels=config.kernels,
        attention=config.attention,
        seed=config.seed,
        max_tokens=longest,
        clip_max_tokens=True,
        trim_last_layer=config.trim_last_layer,
        graphs=config.graphs,
        block_size=config.block_size,
    )
    if config.streams:
        _take_two_streams(loaded)
    if config.nvtx:
        annotate(loaded.model)
    return loaded


def _reading_packed(config: LiveConfig) -> LiveConfig:
    """With compression, `auto` means what reads a compressed pool: one flag is enough."""
    if config.kv_compression is None:
        return config
    on_cuda = pick_device(config.device).type == "cuda"
    attention = ("packed" if on_cuda else "reading") if config.attention == "auto" else config.attention
    return replace(config, attention=attention, kernels="torch" if config.kernels == "auto" else config.kernels)


def _take_two_streams(loaded: Loaded) -> None:
    from executor.attention.triton import TritonAttention

    attention = loaded.model.attention
    if not isinstance(attention, TritonAttention) or loaded.device.type != "cuda":
        raise ExecutorError(
            f"--streams: found attention {attention.name} on {loaded.device}, expected --attention triton on CUDA"
        )
    attention.two_streams = True


def _with_options(config: LiveConfig, options: dict[str, Any]) -> LiveConfig:
    known = LiveConfig.__dataclass_fields__
    fields = {name: value for name, value in options.items() if name in known}
    knobs = {name: value for name, value in options.items() if name not in known}
    if knobs:
        fields["knobs"] = {**config.knobs, **fields.get("knobs", {}), **knobs}
    return replace(config, **fields)


def scheduler_of(
    policy: Policy,
    config: LiveConfig,
    loaded: Loaded,
    trace: Trace,
    max_model_len: int,
    cost: CostModel | None,
    costs: MeasuredCosts,
    names: TextNames,
) -> Scheduler:
    """The scheduler of a live run; its pool is sized for `trace`."""
    from executor.speculation.speculating_runner import speculation_of

    speculation = speculation_of(config)
    known = {} if cost is None else {"estimator": _estimator(cost), "tile": cost.tile}
    return make_scheduler(
        policy,
        num_blocks=config.num_blocks
        or default_blocks(
            config,
            loaded,
            trace,
            max_model_len,
            most_tokens=config.token_budget or largest_batch(policy, None, max_model_len),
        ),
        block_size=config.block_size,
        max_model_len=max_model_len,
        longest_by=LONGEST_BY if config.max_model_len is None or max_model_len < config.max_model_len else "",
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        watermark=config.watermark,
        by_id=True,
        ahead=False if (config.tp * config.pp > 1 or speculation) and config.ahead is None else config.ahead,
        on_gpu=loaded.device.type != "cpu",
        prefix_caching=config.prefix_caching,
        names=names,
        swap=make_swap(config, moved_block_bytes(config, loaded), costs),
        admission=make_admission(config),
        micro_batches=config.pp,
        chase_chunks=config.chase_chunks,
        speculation=speculation,
        **known,
    )


def _estimator(cost: CostModel) -> Callable[[BatchShape], Ns]:
    """Predicted duration of one iteration, host and device."""
    return partial(whole_ns, cost)


def _prompts(config: LiveConfig, trace: Trace, loaded: Loaded) -> Prompts:
    if config.prompts is None:
        return trace_prompts(trace, loaded.spec.vocab, config.seed)
    from executor.model.tokenizer import load_tokenizer

    return file_prompts(Path(config.prompts), trace, load_tokenizer(loaded.source), loaded.spec.vocab)


def finish(
    trace: Trace,
    config: LiveConfig,
    policy: Policy,
    scheduler: Scheduler,
    runner: Runner,
    recorder: Any,
    outcome: Outcome,
    max_model_len: int,
    facts: Mapping[str, Any],
) -> LiveRun:
    """The run that an engine's records make: its config and summary."""
    from metrics import summarise
    from metrics.measures.slo import parse_objectives

    tables = recorder.tables()
    tables.config = {**_run_config(trace, config, policy, scheduler, runner, outcome, max_model_len), **facts}
    slo = parse_objectives(config.slo) if config.slo else None
    summary = summarise(tables, warmup=config.warmup or 0, slo=slo)
    return LiveRun(tables, tables.config, summary, outcome)


def _run_config(
    trace: Trace,
    config: LiveConfig,
    policy: Policy,
    scheduler: Scheduler,
    runner: Runner,
    outcome: Outcome,
    max_model_len: int,
) -> dict[str, Any]:
    from metrics.run_folder.folder import versions_of
    from profiler.specs.useful_work import byte_coefficients, flop_coefficients

    loaded = runner.loaded
    knobs = {name: getattr(policy, name) for name in knobs_of(type(policy))}
    described = loaded.describe()
    dtype, kv_dtype = str(described["dtype"]), str(described["kv_dtype"])
    countable = dtype != "float64" and kv_dtype != "float64"
    return {
        "world": "live",
        "policy": config.policy,
        "knobs": knobs,
        **described,
        "gpu": str(loaded.device),
        "cost_model": "live",
        "cost_kind": "live",
        "calibrated": True,
        "tp": 1,
        "pp": 1,
        "ahead": scheduler.host.chase_decodes,
        "token_budget": _limit(scheduler.token_budget),
        "max_num_seqs": _limit(scheduler.max_num_seqs),
        "max_model_len": max_model_len,
        "block_size": config.block_size,
        "num_blocks": scheduler.ledger.total_blocks,
        "watermark_blocks": scheduler.watermark_blocks,
        "slots": max(1, scheduler.ledger.slots // scheduler.host.micro_batches),
        "chunk_size": knobs.get("chunk_size"),
        "trace": trace.facts(),
        "live": {**config.as_dict(), "knobs": dict(config.knobs)},
        "memory": _memory_facts(scheduler, runner),
        **runner.routed.facts(),
        "seed": config.seed,
        "stopped_by": outcome.stopped_by,
        "wall_s": outcome.wall_s,
        "cpu_s": outcome.cpu_s,
        "versions": versions_of(PACKAGES),
        "model_flops": flop_coefficients(loaded.source.spec),
        **({"model_bytes": byte_coefficients(loaded.source.spec, dtype, kv_dtype)} if countable else {}),
    }


def _memory_facts(scheduler: Scheduler, runner: Runner) -> dict[str, Any]:
    cache = runner.cache
    block_bytes = runner.loaded.kv_bytes_per_token * cache.block_size
    if isinstance(cache, CompressedKVCache):
        facts = memory_counts([(scheduler, cache.packed_block_bytes)])
        facts["kv_packed_tokens"], facts["kv_pack_s"] = cache.sealed_tokens, cache.seal_ns / 1e9
    else:
        facts = memory_counts([(scheduler, block_bytes)])
    facts["kv_pool_bytes"] = cache.num_bytes
    if runner.host is not None:
        times = runner.host.times
        facts["swap_moved_bytes"] = times.bytes
        facts["swap_link_busy_s"] = (times.out_ns + times.in_ns) / 1e9
    return facts


def _limit(value: int) -> int | None:
    return None if value >= UNLIMITED else value
