"""Replay a trace in virtual time: trace and config in, a run (tables, summary, config) out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metrics import Recorder
from policies import Policy, Request, Scheduler, Track, make_policy, make_scheduler
from profiler import load_cost_model, load_hardware, load_model_spec
from profiler.capacity import plan_memory
from profiler.cost_model import CostModel
from simulator.arrivals import Arrivals
from simulator.clock import VirtualTime
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.replica import Replica
from workloads import Trace

if TYPE_CHECKING:
    from metrics import RunTables

Progress = Callable[[int, int], None]


@dataclass
class Run:
    """A finished run: its tables, the config that makes it again, and its summary."""

    tables: RunTables
    config: dict[str, Any]
    summary: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def write(self, path: str | Path) -> Path:
        """Write the run folder, whole or not at all."""
        from metrics import write_run

        return write_run(path, self.tables, self.config, self.summary)


@dataclass(frozen=True)
class Engine:
    """What every replica of a run shares: the policy, its costs and its limits."""

    policy: Policy
    cost: CostModel
    num_blocks: int
    max_model_len: int
    config: ReplayConfig

    def scheduler(self) -> Scheduler:
        """A fresh scheduler for one replica."""
        config = self.config
        return make_scheduler(
            self.policy,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            max_model_len=self.max_model_len,
            token_budget=config.token_budget,
            max_num_seqs=config.max_num_seqs,
            watermark=config.watermark,
            micro_batches=config.pp,
            chase_chunks=config.chase_chunks,
            tile=self.cost.tile,
            estimator=self.estimate_ns,
        )

    def estimate_ns(self, shape: Any) -> int:
        """Predicted duration of one iteration, for policies that plan by time."""
        cost = self.cost
        before, after = cost.host_ns(shape)
        return before + after + sum([cost.stage_ns(shape, s) + cost.send_ns(shape, s) for s in range(cost.stages)])


def make_engine(config: ReplayConfig, trace: Trace, cost: CostModel | None = None) -> Engine:
    """Resolve a config's names into a policy, a cost model and a KV pool. `cost` overrides the config's cost model."""
    policy = make_policy(config.policy, config.knobs)
    if config.pp > 1 and getattr(policy, "async_scheduling", False):
        raise SimulationError(
            f"--async with --pp {config.pp}: a pipeline plans ahead already, one micro-batch a stage; leave --async out"
        )
    longest = int((trace.prompt_tokens + trace.max_output_tokens).max()) if len(trace) else 1
    max_model_len = config.max_model_len or longest
    model, gpu = load_model_spec(config.model), load_hardware(config.gpu)
    if cost is None:
        cost = load_cost_model(
            model, gpu, cost_model=config.cost_model, dtype=config.dtype, kv_dtype=config.kv_dtype, tp=config.tp,
            pp=config.pp, layer_split=config.layer_split,
        )  # fmt: skip
    num_blocks = config.num_blocks
    if num_blocks is None:
        rule = policy.memory
        memory: dict[str, Any] = {"utilisation": rule.utilisation}
        if rule.headroom:
            memory = {"headroom": rule.headroom}
        if config.gpu_memory_utilization is not None:
            memory = {"utilisation": config.gpu_memory_utilization}
        num_blocks = plan_memory(
            model, gpu, dtype=_dtype(config.dtype, model), kv_dtype=config.kv_dtype, tp=config.tp, pp=config.pp,
            layer_split=config.layer_split, block_size=config.block_size, **memory,
        ).num_blocks  # fmt: skip
    return Engine(policy, cost, num_blocks, max_model_len, config)


def _dtype(dtype: str, model: Any) -> str:
    if dtype != "auto":
        return dtype
    return model.dtype if model.dtype in ("bfloat16", "float16") else "bfloat16"


def replay(
    trace: Trace,
    config: ReplayConfig | None = None,
    *,
    cost: CostModel | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Run:
    """Replay `trace` under one policy.

    options: fields of `ReplayConfig`; a name that is none of them has to be a knob of the policy. cost: a cost model
    object to use instead of the config's. progress(ended, total) is called now and then.

    Raises SimulationError, PolicyError, ProfileError or TraceError for anything that cannot be run as asked.
    """
    config = _with_options(config or ReplayConfig(), options)
    if config.limit is not None:
        trace = trace.head(config.limit)
    if config.rate_scale != 1.0:
        trace = trace.scaled(config.rate_scale)
    if not len(trace):
        raise SimulationError(f"{trace.name}: found no requests, expected at least one")
    engine = make_engine(config, trace, cost)
    recorder = Recorder()
    simulate(trace, engine, recorder, progress)
    return _finish(trace, engine, recorder)


def simulate(trace: Trace, engine: Engine, recorder: Recorder, progress: Progress | None = None) -> Replica:
    """Run one replica over a trace until every request has ended; records go to `recorder`."""
    env = VirtualTime()
    total = len(trace)
    every = max(1, total // 200)
    ended = 0

    def on_end(track: Track, replica: Replica) -> None:
        nonlocal ended
        ended += 1
        recorder.request(
            track.request, replica.number, track.status, track.reason, track.delivered, track.admitted_ns,
            track.first_token_ns, track.finished_ns, track.preemptions, track.cached_total, track.segments,
        )  # fmt: skip
        arrivals.ended(track.request.id)
        if progress is not None and ended % every == 0:
            progress(ended, total)

    replica = Replica(
        env, 0, engine.scheduler(), engine.cost, recorder, on_end=on_end, overlap_sends=engine.config.pp_overlap,
        leaps=engine.config.leaps,
    )  # fmt: skip

    def submit(request: Request, output_tokens: int) -> None:
        replica.submit(request, output_tokens)

    def give_up(row: int) -> None:
        replica.withdraw([row], "client gave up waiting")

    arrivals = Arrivals(env, trace, submit, give_up)
    env.run()
    replica.close()
    if ended != total:
        raise SimulationError(f"{total - ended} requests never ended: the policy left them waiting")
    return replica


def _with_options(config: ReplayConfig, options: dict[str, Any]) -> ReplayConfig:
    known = ReplayConfig.__dataclass_fields__
    fields = {name: value for name, value in options.items() if name in known}
    knobs = {name: value for name, value in options.items() if name not in known}
    if knobs:
        fields["knobs"] = {**config.knobs, **fields.get("knobs", {}), **knobs}
    return replace(config, **fields)


def _finish(trace: Trace, engine: Engine, recorder: Recorder) -> Run:
    from metrics import summarise
    from simulator.provenance import run_config

    tables = recorder.tables()
    tables.config = run_config(trace, engine)
    config = engine.config
    summary = summarise(tables, warmup=config.warmup or 0, slo=config.slo)
    return Run(tables, tables.config, summary, list(trace.notes))

