"""A trace played into replicas behind a router, and what the reference simulator leaves to the fast path."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from random import Random
from typing import Any

from policies.work.request import Ns
from profiler.cost_model import CostModel
from simulator.cluster.pools import looks_for_prefixes
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.reference.books import Books, Job, Limits
from simulator.reference.clock import Clock
from simulator.reference.pages import PAGES
from simulator.reference.rank_group import RankGroup
from simulator.reference.recording import Recording
from simulator.reference.replica import Engine, Process, Replica
from simulator.routers import choose, make_router
from simulator.routers.over_ranks import OverRanks
from workloads import Trace
from workloads.follow_ups import FollowUps
from workloads.generating.shared_prefixes import with_prefix_hashes

CANNOT = {
    "failures": "replicas that die",
    "autoscale": "autoscaling",
    "ladder": "the overload ladder",
    "kv_store_gib": "a shared KV store",
    "layerwise_kv": "KV sent layer by layer",
}
"""Settings that it has no page for, and what they are."""


def refuse(plan: Any) -> None:
    """SimulationError names the first thing of a cluster's plan that the reference simulator cannot express."""
    config: ReplayConfig = plan.config
    found = [f"--{name.replace('_', '-')} ({what})" for name, what in CANNOT.items() if getattr(config, name)]
    if config.preemption != "recompute":
        found.append(f"--preemption {config.preemption} (KV swapped to host memory)")
    found += [f"--pool role={pool.role} (KV that moves)" for pool in plan.pools if pool.role != "serve"]
    for pool in plan.pools:
        if type(pool.engine.policy) not in PAGES:
            why = "it has a page for each built-in policy without a state alone"
            found.append(f"--policy {pool.engine.config.policy} ({why})")
    if found:
        raise SimulationError(f"--reference: cannot express {found[0]}; leave one of the two out")


def limits_of(engine: Any) -> Limits:
    """What the replicas of an engine may do, as its config and its policy say."""
    config, policy = engine.config, engine.policy
    ahead = engine.ahead
    budget, seqs, watermark = config.token_budget, config.max_num_seqs, config.watermark
    return Limits(
        num_blocks=engine.num_blocks,
        block_size=config.block_size,
        longest=engine.max_model_len,
        token_budget=policy.default_token_budget(engine.max_model_len) if budget is None else budget,
        max_num_seqs=policy.default_max_num_seqs() if seqs is None else seqs,
        watermark=policy.memory.watermark if watermark is None else watermark,
        micro_batches=config.pp,
        ahead=ahead,
        chase=config.chase_chunks or ahead,
        together=config.policy == "request_level",
        answers_together=policy.answers_together,
        tile=engine.cost.tile,
        prefix_caching=config.prefix_caching or bool(getattr(policy, "prefix_caching", False)),
        free_order=getattr(policy, "free_order", "0.32"),
        estimate=engine.estimate_ns,
    )


class Cluster:
    """Clients, a router and replicas. ended: requests that have ended, each in exactly one way."""

    def __init__(self, trace: Trace, plan: Any) -> None:
        config = plan.config
        # What turns of one session, or prompts with shared parts, have in common is known by name where anybody looks.
        self.trace = trace = with_prefix_hashes(trace, config.block_size) if looks_for_prefixes(plan) else trace
        self.recording = Recording()
        self.ended = self.preemptions = 0
        self.last_end_ns: Ns = 0
        self.home: dict[int, Engine] = {}
        self.router = make_router(config.router, config.router_knobs)
        self.rng = Random(f"{config.seed} router")
        engines = [pool.engine for pool in plan.pools for _ in range(pool.replicas)]
        self.recording.places = [(at, rank) for at, engine in enumerate(engines) for rank in range(engine.ranks)]
        if any(engine.ranks > 1 for engine in engines):
            rank_router = partial(make_router, config.rank_router, config.rank_router_knobs)
            replica_of = [replica for replica, _ in self.recording.places]
            self.router = rank_router() if len(engines) == 1 else OverRanks(self.router, rank_router, replica_of)
        self.clock = Clock(len(self.recording.places))
        self.replicas: list[Engine] = []
        for engine in engines:
            self.replicas += self._replica(len(self.replicas), engine)
        self.followers = FollowUps(trace)
        self.clock.process(self._arrivals())

    def _replica(self, first: int, engine: Any) -> Sequence[Engine]:
        """The engines of a replica, numbered from `first` on: one, or its data-parallel ranks."""
        cost: CostModel = engine.cost
        page = PAGES[type(engine.policy)]
        books = [Books(page, engine.policy, limits_of(engine)) for _ in range(engine.ranks)]
        if engine.together:
            return RankGroup(self.clock, first, books, cost, self.recording, self._on_end).ranks
        overlap = engine.config.pp_overlap
        return [
            Replica(self.clock, first + rank, own, cost, self.recording, overlap, self._on_end)
            for rank, own in enumerate(books)
        ]

    def run(self) -> None:
        """Until nothing happens any more."""
        self.clock.run()

    def _arrivals(self) -> Process:
        trace = self.trace
        following = trace.after_row
        rows = [row for row in range(len(trace)) if following is None or following[row] < 0]
        for at_ns, together in groupby(rows, key=lambda row: int(trace.arrival_ns[row])):
            yield self.clock.until(at_ns, Clock.ARRIVE)
            for row in together:
                self._arrive(row)

    def _arrive(self, row: int) -> None:
        now_ns = self.clock.now_ns
        request = self.trace.request(row)._replace(arrival_ns=now_ns)
        patience_ns = self.trace.timeout_ns(row)
        if patience_ns >= 0:
            self.clock.call(now_ns + patience_ns, Clock.ARRIVE, partial(self._give_up, row))
        able = [replica for replica in self.replicas if not replica.books.why_not(request)] or self.replicas
        replica = able[0] if len(able) == 1 else choose(self.router, request, able, self.rng)
        self.home[row] = replica
        replica.submit(request, int(self.trace.output_tokens[row]))

    def _give_up(self, row: int) -> None:
        if row in self.home:
            self.home[row].cancel(row, "client gave up waiting")

    def _on_end(self, job: Job, replica: Engine) -> None:
        row = job.request.id
        del self.home[row]
        self.ended += 1
        self.last_end_ns = self.clock.now_ns
        self.preemptions += job.preemptions
        self.recording.request(job, replica.number)
        for follower in self.followers.free(row):
            assert self.trace.think_ns is not None
            think_ns = int(self.trace.think_ns[follower])
            self.clock.call(self.clock.now_ns + think_ns, Clock.ARRIVE, partial(self._arrive, follower))

    def facts(self, plan: Any) -> dict[str, Any]:
        """What became of the cluster, as the fast path tells it (`Cluster.facts`)."""
        from simulator.cluster.journeys import Life

        numbers = [number for number, pool in enumerate(plan.pools) for _ in range(pool.replicas)]
        lives = [Life(replica, pool, "serve", 0, 0) for replica, pool in enumerate(numbers)]
        return {
            "replicas": len(numbers),
            "devices": plan.devices,
            "device_seconds": self.last_end_ns / 1e9 * plan.devices,
            "lives": [life.facts() for life in lives],
            "memory": {"preemptions_by_swap": 0, "preemptions_by_recompute": self.preemptions},
            "kv": None,
        }
