"""Replicas behind a router: where every request goes, where it went on, and how it ended, once and only once.

A request usually lives and ends on one replica, and then costs one dictionary entry here. Only one that moves (its KV
is handed over to a decode replica, or its replica died) gets a journey, which adds up what each stop did for it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING, Any, Final

from metrics import Recorder
from policies import Request, Track
from simulator.clock.virtual_time import Nanoseconds, VirtualTime
from simulator.cluster.autoscaling import Autoscaler, make_autoscaling
from simulator.cluster.eligible import hold_alike, who_can_run
from simulator.cluster.failures import parse_failures, schedule_failures
from simulator.cluster.journeys import Journey, Life
from simulator.cluster.kv_transfer import Disaggregation
from simulator.cluster.pools import ClusterPlan
from simulator.cluster.router_checks import RouterChecks
from simulator.cluster.shared_kv_store import KVStore
from simulator.replica.host_link import HostLink
from simulator.replica.memory_measures import ReplicaMemory, memory_facts
from simulator.replica.plain import OnBatch
from simulator.replica.rank_group import Rank, RankGroup, SwapRank
from simulator.replica.running_ahead import Replica
from simulator.replica.variants import PrefillReplica, SwapPrefillReplica, SwapReplica, SwapsKV
from simulator.routers import choose, make_router
from simulator.routers.over_ranks import OverRanks

if TYPE_CHECKING:
    from simulator.cluster.in_own_time import Fleet
    from simulator.replica.replica_kind import Engine

NO_REPLICA = "no replica is up and none will come back"
NOWHERE = -1

_by_number: Final = attrgetter("number")


class Cluster:
    """The replicas of a plan. Requests come in by `submit`; each end is recorded, then told to on_end(row).

    expected: requests of the whole run, so that whoever watches the cluster knows when it is over. coming: per pool,
    replicas that are down or starting and will take requests later; a request waits for them if nobody else is up.
    returning: those of them that have died and come back. on_batch: as every replica has it.
    """

    def __init__(
        self,
        env: Nanoseconds,
        plan: ClusterPlan,
        recorder: Recorder,
        *,
        on_end: Callable[[int], None],
        expected: int,
        on_batch: OnBatch | None = None,
    ) -> None:
        self.env = env
        self.plan = plan
        self.recorder = recorder
        self.on_end = on_end
        self.expected = expected
        self.on_batch = on_batch
        self.ended = 0
        self._last_end_ns = 0
        self.coming = [0] * len(plan.pools)
        self.returning = [0] * len(plan.pools)
        # Engines: ranks of replicas, by number; a replica without ranks is one. teams: the ranks of each replica.
        self.replicas: list[Replica] = []
        self.teams: list[list[Replica]] = []
        self._team_of: list[int] = []
        self.lives: list[Life] = []
        self.journeys: dict[int, Journey] = {}
        self._links: dict[int, HostLink] = {}
        # Requests whose prefix is on its way from the shared store to their replica.
        self._fetching: dict[int, tuple[Request, int]] = {}
        self.store = KVStore(self, plan.config.kv_store_gib) if plan.config.kv_store_gib is not None else None
        config = plan.config
        recorder.ranks = max([pool.engine.ranks for pool in plan.pools])
        self.router = make_router(config.router, config.router_knobs)
        if recorder.ranks > 1:
            lone = len(plan.pools) == 1 and plan.pools[0].replicas == 1 and not config.autoscale
            rank_router = partial(make_router, config.rank_router, config.rank_router_knobs)
            self.router = rank_router() if lone else OverRanks(self.router, rank_router, self._team_of)
        self.router_rng = Random(f"{config.seed} router")
        self._pool_of: list[int] = []
        self._up: list[Replica] = []
        # Where replicas run in their own time.
        self.fleet: Fleet | None = None
        self._draining: list[Replica] = []
        self._home: dict[int, Replica] = {}
        self._stranded: dict[int, tuple[Request, int]] = {}
        self._kv = Disaggregation(self) if any(pool.role == "decode" for pool in plan.pools) else None
        self.autoscaler = Autoscaler(self, make_autoscaling(config.autoscale, plan)) if config.autoscale else None
        for number, pool in enumerate(plan.pools):
            for _ in range(pool.replicas):
                self.start(number)
        self.alike = hold_alike(plan, self.replicas, self.pool_number)
        failures = parse_failures(config.failures, None if config.autoscale else len(self.teams))
        schedule_failures(self, failures, requeue=config.on_failure == "requeue")

    def run_apart(self) -> Fleet:
        """Before anything runs: every replica keeps its own time from now on (simulator/cluster/in_own_time.py)."""
        from simulator.cluster.in_own_time import Fleet

        assert isinstance(self.env, VirtualTime)
        self.fleet = Fleet(self.env, self.replicas, self._up, RouterChecks.of(self.router))
        return self.fleet

    # Requests come and go

    def submit(self, request: Request, output_tokens: int) -> None:
        """A request arrives; output_tokens is its true output length."""
        self._place(request, output_tokens, 0)

    def submit_to(self, replica: Replica, request: Request, output_tokens: int) -> None:
        """`submit` where the router has chosen already and the replica is up."""
        self._home[request.id] = replica
        replica.submit(request, output_tokens)

    def give_up(self, row: int, reason: str = "client gave up waiting", status: str = "aborted") -> None:
        """The client of a request has lost its patience; nothing happens if it has ended."""
        replica = self._home.get(row)
        fleet = self.fleet
        if fleet is not None and replica is not None:
            fleet.catch_up(replica)
            if row in self._home:
                fleet.withdraw(replica, row, reason)
        elif self.store is not None and (fetched := self._fetching.pop(row, None)) is not None:
            self.store.cancel(row)
            self.end_unplaced(*fetched, status, reason)
        elif replica is not None:
            replica.withdraw([row], reason, status=status)
        elif row in self._stranded:
            request, output_tokens = self._stranded.pop(row)
            self.end_unplaced(request, output_tokens, status, reason)
        elif self._kv is not None and self._kv.owns(row):
            move = self._kv.cancel(row)
            assert move is not None
            self.end_journey(move.journey, move.source.number, status, reason)

    def home(self, row: int) -> Replica | None:
        """Where a request is now; None for one that has ended or is on no replica."""
        return self._home.get(row)

    def _place(self, request: Request, output_tokens: int, produced: int) -> None:
        up = self._up
        if not up:
            if self.somebody_comes(decode=False):
                self._stranded[request.id] = (request, output_tokens)
            else:
                self.end_unplaced(request, output_tokens, "failed", NO_REPLICA)
            return
        fleet = self.fleet
        if fleet is not None:
            replica = fleet.choose(self.router, request, self.router_rng)
            self._home[request.id] = replica
            fleet.submit(replica, request, output_tokens, produced)
            return
        if not self.alike:
            up = who_can_run(self.plan, up, request, produced, self.pool_number)
        replica = up[0] if len(up) == 1 else choose(self.router, request, up, self.router_rng)
        self._home[request.id] = replica
        if self._kv is not None and self.plan.pools[self.pool_number(replica)].role == "prefill":
            self._kv.submit(replica, request, output_tokens, produced)
        elif self.store is not None and request.prefix_hashes and not produced:
            self._fetching[request.id] = request, output_tokens
            self.store.fetch(replica, request, partial(self._fetched, replica, request, output_tokens))
        else:
            replica.submit(request, output_tokens, produced=produced)

    def _fetched(self, replica: Replica, request: Request, output_tokens: int, tokens: int) -> None:
        """The first `tokens` tokens of a prompt are at its replica, which may have gone meanwhile."""
        del self._fetching[request.id]
        if self.is_up(replica):
            replica.submit(request, output_tokens, computed=tokens)
        else:
            self._place(request, output_tokens, 0)

    def _on_end(self, track: Track, replica: Replica) -> None:
        request = track.request
        row = request.id
        del self._home[row]
        if self.fleet is not None:
            self.fleet.ended(replica)
        if self._kv is not None:
            if track.hands_over and track.status == "finished":
                self.journeys[row].add(track, replica.number)
                self._kv.prompt_ends(track, replica)
                return
            self._kv.cancel(row)
            self._kv.room(replica)
        if self.store is not None and track.status == "finished":
            self.store.leave(replica, request)
        if self._draining:
            self._let_go(replica)
        if self.journeys and row in self.journeys:
            journey = self.journeys[row]
            journey.add(track, replica.number)
            self.end_journey(journey, replica.number, track.status, track.reason)
            return
        self.recorder.request(
            request,
            replica.number,
            track.status,
            track.reason,
            track.delivered,
            track.admitted_ns,
            track.first_token_ns,
            track.finished_ns,
            track.preemptions,
            track.cached_total,
            track.segments,
        )
        self._count_end(row, track)

    def end_journey(self, journey: Journey, replica: int, status: str, reason: str) -> None:
        """A request that has moved ends now."""
        row = journey.request.id
        self.journeys.pop(row, None)
        self.recorder.request(
            journey.request,
            replica,
            status,
            reason,
            journey.produced,
            journey.admitted_ns,
            journey.first_token_ns,
            self.env.now,
            journey.preemptions,
            journey.cached_tokens,
            journey.segments,
            journey.replicas,
        )
        self._count_end(row, journey)

    def end_unplaced(self, request: Request, output_tokens: int, status: str, reason: str) -> None:
        """A request that is on no replica ends now."""
        self._home.pop(request.id, None)
        self.end_journey(self.journey(request, output_tokens), NOWHERE, status, reason)

    def _count_end(self, row: int, what: Track | Journey) -> None:
        self.ended += 1
        if self.env.now > self._last_end_ns:
            self._last_end_ns = self.env.now
        if self.autoscaler is not None:
            self.autoscaler.saw(what)
        self.on_end(row)

    def journey(self, request: Request, output_tokens: int) -> Journey:
        """The journey of a request, begun if it has none."""
        found = self.journeys.get(request.id)
        if found is None:
            found = self.journeys[request.id] = Journey(request, output_tokens)
        return found

    def arrived(self, journey: Journey, replica: Replica) -> None:
        """The KV of a request has arrived at the replica that decodes it."""
        self._home[journey.request.id] = replica

    def fail_forgotten(self) -> bool:
        """Nothing will happen any more: whoever still waits for a replica fails. Returns whether anybody did."""
        stranded, self._stranded = self._stranded, {}
        for request, output_tokens in stranded.values():
            self.end_unplaced(request, output_tokens, "failed", NO_REPLICA)
        parked = self._kv.fail_unplaced() if self._kv is not None else 0
        return bool(stranded) or bool(parked)

    # Replicas come and go

    def somebody_comes(self, *, decode: bool) -> bool:
        """Whether a replica that takes new requests (or decodes them) will be up later."""
        return any(count and (pool.role == "decode") == decode for count, pool in zip(self.coming, self.plan.pools))

    def order(self, pool: int) -> Life:
        """A replica will be up later: it has its devices from now on, whether or not the run lasts until then."""
        life = Life(-1, pool, self.plan.pools[pool].role, self.env.now, -1)
        self.lives.append(life)
        return life

    def start(self, pool: int, life: Life | None = None) -> None:
        """Add a replica to a pool, as ordered or at once; it takes requests from now on."""
        engine = self.plan.pools[pool].engine
        team = [self._engine(pool, rank) for rank in range(engine.ranks)]
        if engine.together:
            RankGroup(self.env, team, engine.cost, leaps=engine.config.leaps)  # type: ignore[arg-type]
        self.teams.append(team)
        self._open(team, life or self.order(pool))

    def _engine(self, pool: int, rank: int) -> Replica:
        """A rank of the replica that is being started: all of it where it has but one."""
        plan = self.plan.pools[pool]
        engine, memory = plan.engine, plan.engine.memory
        number = len(self.replicas)
        prefill_ahead = self._kv is not None and self._kv.layerwise and plan.role == "prefill"
        replica = _kind(engine, prefill_ahead)(
            self.env,
            number,
            engine.scheduler(),
            engine.cost,
            self.recorder,
            on_end=self._on_end,
            overlap_sends=engine.config.pp_overlap,
            leaps=engine.config.leaps,
        )
        if engine.acceptance is not None:
            replica.decide = engine.acceptance.decide
        replica.on_batch = self.on_batch
        if isinstance(replica, SwapsKV):
            replica.device_block_bytes = memory.device_block_bytes
            replica.link = self._host_link(number, memory)
        if prefill_ahead and self._kv is not None:
            replica.on_last_chunk = self._kv.last_chunk_begins  # type: ignore[attr-defined]
        if self.recorder.ranks > 1:
            self.recorder.places.append((len(self.teams), rank))
        self.replicas.append(replica)
        self._pool_of.append(pool)
        self._team_of.append(len(self.teams))
        return replica

    def _host_link(self, number: int, memory: ReplicaMemory) -> HostLink:
        """The link to host memory of a replica; neighbours may share one."""
        host = number // memory.config.replicas_per_link
        if host not in self._links:
            self._links[host] = memory.link()
        return self._links[host]

    @property
    def shares_links(self) -> bool:
        """Whether replicas queue for a link to host memory together."""
        return 0 < len(self._links) < len(self.replicas)

    def pool_number(self, replica: Replica) -> int:
        return self._pool_of[replica.number]

    def members(self, pool: int) -> list[list[Replica]]:
        """The replicas of a pool that take requests, by number, each as its ranks."""
        takers = self._takers(pool)
        numbers = dict.fromkeys(self._team_of[each.number] for each in takers if self._pool_of[each.number] == pool)
        return [self.teams[number] for number in numbers]

    def is_up(self, replica: Replica) -> bool:
        return replica in self._takers(self.pool_number(replica))

    @property
    def num_stranded(self) -> int:
        """Requests that no replica could take yet."""
        return len(self._stranded)

    def drain(self, team: list[Replica], reason: str) -> None:
        """Send a replica no more requests; it goes when those that it has have ended."""
        takers = self._takers(self.pool_number(team[0]))
        self._life(team[0]).reason = reason
        for replica in team:
            takers.remove(replica)
            self._draining.append(replica)
        self._let_go(team[0])

    def fail(self, team: list[Replica], reason: str, *, requeue: bool) -> None:
        """A replica dies: batches in flight and KV are lost. Its requests start over elsewhere, or fail."""
        fleet = self.fleet
        for replica in team:
            if fleet is not None:
                fleet.catch_up(replica)
        first = team[0]
        if not self.is_up(first) and first not in self._draining:
            return
        draining = first in self._draining
        places = self._draining if draining else self._takers(self.pool_number(first))
        for replica in team:
            places.remove(replica)
            if fleet is not None and not draining:
                fleet.left(replica)
        life = self._life(first)
        life.down_ns, life.reason = self.env.now, reason
        cut_off: list[Callable[[], None]] = []
        homeless: list[tuple[Journey, int]] = []
        for replica in team:
            cut_off += self.store.lose(replica) if self.store is not None else []
            homeless += self._lost_with(replica, reason)
        for journey, number in homeless:
            if requeue:
                self._place(journey.request, journey.output_tokens, journey.produced)
            else:
                self.end_journey(journey, number, "failed", reason)
        for go_on in cut_off:
            go_on()

    def _lost_with(self, replica: Replica, reason: str) -> list[tuple[Journey, int]]:
        """What an engine that dies had to do, and its number; those whose last token was delivered end."""
        homeless: list[Journey] = []
        go_elsewhere: Callable[[], None] | None = None
        if self._kv is not None:
            homeless = self._kv.source_dies(replica)
            go_elsewhere = self._kv.target_dies(replica)
        for track in replica.abandon(reason) if self.fleet is None else self.fleet.abandon(replica, reason):
            if track.status == "finished":
                self._on_end(track, replica)
                continue
            row = track.request.id
            del self._home[row]
            journey = self.journey(track.request, track.ends_after)
            journey.add(track, replica.number)
            homeless.append(journey)
        if go_elsewhere is not None:
            go_elsewhere()
        return [(journey, replica.number) for journey in homeless]

    def restore(self, team: list[Replica]) -> None:
        """A replica that died is back, empty."""
        self._open(team, self.order(self.pool_number(team[0])))

    def close(self) -> None:
        """Hand what is still open to the recorder (a run that was cut short)."""
        for replica in self.replicas:
            replica.close()

    def facts(self) -> dict[str, Any]:
        """What became of the cluster, as plain data: the replicas' lives, device seconds, KV moved."""
        engines = [pool.engine for pool in self.plan.pools]
        blocks = [
            (replica.scheduler, engines[self.pool_number(replica)].memory.block_bytes) for replica in self.replicas
        ]
        end = self._last_end_ns
        return {
            "replicas": len(self.teams),
            "devices": self.plan.devices,
            "device_seconds": sum(life.held_ns(end) / 1e9 * engines[life.pool].devices for life in self.lives),
            "lives": [life.facts() for life in self.lives],
            "memory": memory_facts(blocks, self._links.values(), self.store),
            "kv": self._kv.facts() if self._kv is not None else None,
        }

    def _takers(self, pool: int) -> list[Replica]:
        """Where the replicas of a pool stand while they take requests."""
        if self._kv is not None and self.plan.pools[pool].role == "decode":
            return self._kv.up
        return self._up

    def _open(self, team: list[Replica], life: Life) -> None:
        life.replica, life.up_ns = self._team_of[team[0].number], self.env.now
        if self._kv is not None and life.role == "decode":
            for replica in team:
                self._kv.open(replica)
            return
        for replica in team:
            insort(self._up, replica, key=_by_number)
            if self.fleet is not None:
                self.fleet.joined(replica)
        stranded, self._stranded = self._stranded, {}
        for request, output_tokens in stranded.values():
            journey = self.journeys.get(request.id)
            self._place(request, output_tokens, journey.produced if journey is not None else 0)

    def _let_go(self, replica: Replica) -> None:
        """A draining replica all of whose ranks have become empty goes."""
        if replica not in self._draining:
            return
        team = self.teams[self._team_of[replica.number]]
        if any(rank.scheduler.tracks or rank.scheduler.handover.held for rank in team):
            return
        self._life(replica).down_ns = max([rank.busy_until_ns for rank in team])
        for rank in team:
            self._draining.remove(rank)
        if self.store is not None:  # its host's memory goes with it
            for go_on in self.store.lose(replica):
                go_on()

    def _life(self, replica: Replica) -> Life:
        number = self._team_of[replica.number]
        return next(life for life in reversed(self.lives) if life.replica == number)


def _kind(engine: Engine, prefill_ahead: bool) -> type[Replica]:
    """What an engine of a replica is in virtual time. prefill_ahead: it tells when a prompt is about to end."""
    swaps = engine.memory.swaps
    if engine.together:
        return SwapRank if swaps else Rank
    if swaps:
        return SwapPrefillReplica if prefill_ahead else SwapReplica
    return PrefillReplica if prefill_ahead else Replica
