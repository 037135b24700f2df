"""Replay a trace in virtual time: trace and config in, a run (tables, summary, config) out."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metrics import Recorder
from profiler.cost_model import CostModel
from simulator.clock.arrivals import Arrivals
from simulator.clock.virtual_time import VirtualTime
from simulator.cluster.cluster import Cluster
from simulator.cluster.in_turn import are_independent, only_arrivals_join, run_in_turn
from simulator.cluster.pools import ClusterPlan, looks_for_prefixes, make_cluster_plan
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.replica.front_end import FrontEnd
from simulator.replica.replica_kind import Engine, make_engine
from simulator.settings_without_effect import notes_of_run
from workloads import Trace
from workloads.generating.shared_prefixes import with_prefix_hashes

if TYPE_CHECKING:
    from metrics import RunTables

Progress = Callable[[int, int], None]

__all__ = ["Engine", "Run", "make_cluster_plan", "make_engine", "replay", "simulate"]


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


def replay(
    trace: Trace,
    config: ReplayConfig | None = None,
    *,
    cost: CostModel | None = None,
    plan: ClusterPlan | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Run:
    """Replay `trace` under one policy.

    options: fields of `ReplayConfig`; a name that is none of them has to be a knob of the policy. cost: a cost model
    object to use instead of the config's. plan: a cluster of the same config, for repeated runs or other costs in
    each pool. progress(ended, total) is called now and then.

    Raises SimulationError, PolicyError, ProfileError or TraceError for anything that cannot be run as asked.
    """
    config = _with_options(config or ReplayConfig(), options)
    if config.limit is not None:
        trace = trace.head(config.limit)
    if config.rate_scale != 1.0:
        trace = trace.scaled(config.rate_scale)
    if not len(trace):
        raise SimulationError(f"{trace.name}: found no requests, expected at least one")
    cluster_plan = plan or make_cluster_plan(config, trace, cost)
    if config.reference:
        return _replay_plainly(trace, cluster_plan)
    tables, cluster = play(trace, cluster_plan, progress)
    return finish(trace, cluster_plan, cluster.facts(), tables)


def play(trace: Trace, plan: ClusterPlan, progress: Progress | None = None) -> tuple[RunTables, Cluster]:
    """The tables of a replay as its clients know them, without config and summary; arguments as `replay` has them."""
    recorder = Recorder()
    front, played = _through_front_end(trace, plan)
    cluster = simulate(played, plan, recorder, progress, front=front if trace.closed_loop else None)
    return recorder.tables() if front is None else front.seen_by_clients(recorder.tables()), cluster


def _through_front_end(trace: Trace, plan: ClusterPlan) -> tuple[FrontEnd | None, Trace]:
    """The front end that requests pass, if the engine has one, and the trace as it reaches the engine; a closed loop
    passes it while it is played."""
    times = plan.engine.front
    if times is None:
        return None, trace
    front = FrontEnd(times, sum(pool.replicas for pool in plan.pools if pool.role != "decode"))
    return front, trace if trace.closed_loop else front.into_engine(trace)


def _replay_plainly(trace: Trace, plan: ClusterPlan) -> Run:
    """The same run by the reference simulator, which shares nothing with `simulate` but what it is asked for."""
    from simulator import reference

    reference.refuse(plan)
    if plan.engine.front is not None and trace.closed_loop:
        raise SimulationError("--reference: plays no closed loop through a front end; leave --engine out")
    front, played = _through_front_end(trace, plan)
    cluster = reference.Cluster(played, plan)
    cluster.run()
    if cluster.ended != len(trace):
        raise SimulationError(f"{len(trace) - cluster.ended} requests never ended: the policy left them waiting")
    tables = cluster.recording.tables()
    return finish(trace, plan, cluster.facts(plan), tables if front is None else front.seen_by_clients(tables))


def simulate(
    trace: Trace,
    plan: ClusterPlan | Engine,
    recorder: Recorder,
    progress: Progress | None = None,
    *,
    front: FrontEnd | None = None,
) -> Cluster:
    """Run a cluster over a trace until every request has ended; records go to `recorder`.

    plan: pools of replicas, or the engine that all replicas of its config share. front: the front end that a closed
    loop passes; an open loop's trace has passed it already.
    """
    env = VirtualTime()
    plan = plan if isinstance(plan, ClusterPlan) else ClusterPlan.of(plan)
    if looks_for_prefixes(plan):
        trace = with_prefix_hashes(trace, plan.config.block_size)
    total = len(trace)
    every = max(1, total // 200)

    def on_end(row: int) -> None:
        arrivals.ended(row)
        if progress is not None and cluster.ended % every == 0:
            progress(cluster.ended, total)

    policies = [pool.engine.policy for pool in plan.pools]
    knobs = [dict(getattr(policy, "__dict__", {})) for policy in policies]
    cluster = Cluster(env, plan, recorder, on_end=on_end, expected=total)
    arrivals = Arrivals(env, trace, cluster.give_up, front)
    if progress is None:
        cluster.on_end = arrivals.ended
    try:
        if are_independent(cluster, trace):
            run_in_turn(cluster, arrivals)
        else:
            fleet = cluster.run_apart() if only_arrivals_join(cluster, trace) else None
            arrivals.play(cluster.submit)
            env.run()
            if fleet is not None:
                fleet.finish()
            while cluster.fail_forgotten():
                env.run()  # those who waited for these answers arrive now
        cluster.close()
    except (struct.error, OverflowError) as error:
        raise SimulationError(
            "a time or a count is beyond 2^63 (ns, tokens or blocks), which no table holds: found costs, memory or "
            "lengths that no machine has"
        ) from error
    for policy, before in zip(policies, knobs):
        if getattr(policy, "__dict__", {}) != before:
            raise SimulationError(
                f"policy {type(policy).__name__} changed itself during the run; what a policy remembers belongs into a "
                "state (policies.StatefulPolicy), which every replica and draw gets anew"
            )
    if cluster.ended != total:
        left = total - cluster.ended
        raise SimulationError(f"{left} requests never ended: the policy left them waiting{_who(cluster)}")
    return cluster


def _who(cluster: Cluster) -> str:
    """One of those that a policy left, and how far it had come."""
    for replica in cluster.replicas:
        for track in replica.scheduler.tracks.values():
            request = track.request
            return (
                f" (such as request {request.id}, {track.status} on replica {replica.number} under "
                f"{type(replica.scheduler.policy).__name__}, with {min(track.context, request.prompt_tokens)} of "
                f"{request.prompt_tokens} prompt tokens computed and {track.delivered} of {track.ends_after} answered)"
            )
    return ""


def _with_options(config: ReplayConfig, options: dict[str, Any]) -> ReplayConfig:
    known = ReplayConfig.__dataclass_fields__
    fields = {name: value for name, value in options.items() if name in known}
    knobs = {name: value for name, value in options.items() if name not in known}
    if knobs:
        fields["knobs"] = {**config.knobs, **fields.get("knobs", {}), **knobs}
    return replace(config, **fields)


def finish(trace: Trace, plan: ClusterPlan, facts: dict[str, Any], tables: RunTables) -> Run:
    """The run that tables make: its config and summary."""
    from metrics import summarise
    from metrics.measures.slo import parse_objectives
    from simulator.provenance import run_config

    tables.config = run_config(trace, plan, facts, tables)
    config = plan.config
    expected = getattr(plan.engine.cost, "activated_experts", None)
    if expected is not None:
        from profiler.specs.shape_columns import ShapeColumns

        tables.put_column("iterations", "activated_experts", expected(ShapeColumns.of_iterations(tables.iterations)))
    summary = summarise(tables, warmup=config.warmup or 0, slo=parse_objectives(config.slo) if config.slo else None)
    return Run(tables, tables.config, summary, notes_of_run(config, trace))
