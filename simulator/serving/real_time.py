"""A cluster whose virtual clock is the wall's: events are played once they are due, requests arrive as they are sent.

Times in the tables stay virtual: an iteration ends when the cost model says, not when the event was played, so that a
served session replayed from its trace gives the same nanoseconds. How late events were played is counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from metrics import Recorder
from policies import Batch, Ns, Request, Track
from simulator.clock.virtual_time import ARRIVAL, FAR, Moment, VirtualTime
from simulator.cluster.cluster import Cluster
from simulator.cluster.pools import ClusterPlan, looks_for_prefixes
from simulator.replica.front_end import FrontEnd
from simulator.replica.running_ahead import Replica
from workloads.door.contract import Ask, Clock, Ended, Load, Step
from workloads.generating.lengths import Lengths

PART_ROWS = 256
"""Iterations that are turned into columns at once: more of them would make the next ones late."""
NAP_S = 0.5
"""Longest sleep of an idle engine."""
FOR_EVER: Final = 1 << 60


@dataclass
class Growing:
    """A request that has been accepted: sent: tokens that its client has been told of."""

    ask: Ask
    word: int
    sent: int = 0


class EngineRecorder(Recorder):
    """A recorder that also tells of every request that ends."""

    def __init__(self, ended: Callable[..., None], **options: Any) -> None:
        super().__init__(**options)
        self._tell = ended

    def request(
        self,
        request: Request,
        replica: int,
        status: str,
        reason: str,
        output_tokens: int,
        admitted_ns: Ns,
        first_token_ns: Ns,
        finished_ns: Ns,
        preemptions: int,
        cached_tokens: int,
        segments: Sequence[tuple[int, int, int]],
        segment_replicas: Sequence[int] | None = None,
    ) -> None:
        super().request(
            request,
            replica,
            status,
            reason,
            output_tokens,
            admitted_ns,
            first_token_ns,
            finished_ns,
            preemptions,
            cached_tokens,
            segments,
            segment_replicas,
        )
        self._tell(
            request,
            replica,
            status,
            reason,
            output_tokens,
            admitted_ns,
            first_token_ns,
            finished_ns,
            preemptions,
            cached_tokens,
        )


class RealTimeCluster:
    """An `workloads.door.contract.Engine`. answers: ids that simulated answers are made of. lengths: how long answers
    are where a client does not say (ignore_eos); up to their limit unless given.

    scratch: a folder to stream the records into; in memory without one.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        *,
        answers: Sequence[int],
        vocab: int,
        lengths: Lengths | None = None,
        scratch: Path | None = None,
    ) -> None:
        self.plan = plan
        self.model = Path(str(plan.config.model)).name
        self.max_model_len = min(pool.engine.max_model_len for pool in plan.pools)
        self.vocab = vocab
        self.clock = Clock()
        self.finds_prefixes = looks_for_prefixes(plan)
        self._answers, self._lengths = answers, lengths
        self.env = VirtualTime()
        self.recorder = EngineRecorder(self._on_record, stream_to=scratch, part_rows=PART_ROWS)
        self.cluster = Cluster(
            self.env, plan, self.recorder, on_end=_nothing, expected=FOR_EVER, on_batch=self._on_batch
        )
        times = plan.engine.front
        replicas = sum(pool.replicas for pool in plan.pools if pool.role != "decode")
        self.front = FrontEnd(times, replicas) if times is not None else None
        self._leaves_ns: dict[int, Ns] = {}
        # Requests in the front end, on their way in.
        self._entering: dict[int, Ask] = {}
        self._growing: dict[int, Growing] = {}
        self._inbox: deque[tuple[str, Any]] = deque()
        self._wake = threading.Event()
        self._stopping: str | None = None
        # What the moment that is being played has brought.
        self._tokens: dict[int, list[int]] = {}
        self._ended: list[Ended] = []
        self._accepted: list[tuple[int, Ns, int]] = []
        self._batches: list[tuple[int, int]] = []
        # Steps on their way through the front end: (due, number, step).
        self._leaving: list[tuple[Ns, int, Step]] = []
        self._numbers = 0
        # Prompt tokens looked for in each replica's prefix cache, and those found.
        self._looked_up: dict[int, tuple[int, int]] = {}

    # Called from any thread

    def submit(self, ask: Ask) -> None:
        self._inbox.append(("submit", ask))
        self._wake.set()

    def cancel(self, number: int, reason: str, status: str = "aborted") -> None:
        self._inbox.append(("cancel", (number, reason, status)))
        self._wake.set()

    def stop(self, reason: str) -> None:
        self._stopping = reason
        self._wake.set()

    def loads(self) -> Sequence[Load]:
        loads = []
        for replica in list(self.cluster.replicas):
            scheduler = replica.scheduler
            total = replica.total_blocks
            usage = 1 - replica.free_blocks / total if total else 0.0
            queries, hits = self._looked_up.get(replica.number, (0, 0))
            counts = (scheduler.preemptions, queries, hits, total, replica.block_size)
            loads.append(Load(replica.num_running, replica.num_waiting, usage, *counts))
        return loads

    def facts(self) -> dict[str, Any]:
        engine = self.plan.engine
        return {
            "world": "simulated",
            "policy": engine.config.policy,
            "gpu": str(engine.config.gpu),
            "cost_model": engine.cost.name,
            "calibrated": engine.cost.calibrated,
            "replicas": sum(pool.replicas for pool in self.plan.pools),
        }

    # In the engine's thread

    def serve(self, tell: Callable[[Step], None]) -> None:
        env, clock, inbox, wake = self.env, self.clock, self._inbox, self._wake
        while self._stopping is None:
            wake.clear()
            while inbox:
                self._take(*inbox.popleft(), tell)
            now = clock.now_ns()
            self._play(now, tell)
            due = min(env.next_ns(), self._leaving[0][0] if self._leaving else FAR)
            left = due - clock.now_ns()
            if left > 0 and not inbox:
                wake.wait(min(left / 1e9, NAP_S))
        while inbox:
            self._take(*inbox.popleft(), tell)
        reason = self._stopping
        for number in [*self._entering, *self._growing]:
            now = clock.now_ns()
            self._at(now, partial(self._withdraw, number, now, reason, "aborted"), tell)
        while self._leaving:
            tell(heappop(self._leaving)[2])
        self.cluster.close()

    def _play(self, until_ns: Ns, tell: Callable[[Step], None]) -> None:
        """Play what is due by then, and tell of each moment by itself."""
        env, late, clock = self.env, self.clock.lateness.late, self.clock
        while (due := env.next_ns()) <= until_ns:
            late(clock.now_ns() - due)
            env.step()
            while env.next_ns() == due:
                env.step()
            self._tell(due, tell)
        while self._leaving and self._leaving[0][0] <= until_ns:
            tell(heappop(self._leaving)[2])

    def _at(self, now: Ns, action: Callable[[], None], tell: Callable[[Step], None]) -> None:
        """Something from outside happens now, before whatever else happens in this moment."""
        env = self.env
        self._play(now - 1, tell)
        Moment(env, max(0, now - env.now), lambda event: action(), ARRIVAL)
        self._play(max(now, env.now), tell)

    def _take(self, what: str, about: Any, tell: Callable[[Step], None]) -> None:
        now = max(self.clock.now_ns(), self.env.now)
        if what == "cancel":
            number, reason, status = about
            self._at(now, lambda: self._withdraw(number, now, reason, status), tell)
            return
        ask: Ask = about
        if self.front is not None:
            reached = self.front.enter(ask.number, now, len(ask.prompt_ids))
            self._play(now, tell)
            self._entering[ask.number] = ask
            Moment(self.env, reached - self.env.now, lambda event: self._reach(ask.number, reached), ARRIVAL)
            return
        self._at(now, lambda: self._arrive(ask, now), tell)

    def _withdraw(self, number: int, now: Ns, reason: str, status: str) -> None:
        self._reach(number, now)
        if number in self._growing:
            self.cluster.give_up(number, reason, status)

    def _reach(self, number: int, now: Ns) -> None:
        """A request has passed the front end, unless it was withdrawn there."""
        ask = self._entering.pop(number, None)
        if ask is not None:
            self._arrive(ask, now)

    def _arrive(self, ask: Ask, now: Ns) -> None:
        number = ask.number
        block = self.plan.config.block_size if self.finds_prefixes else 0
        request = Request(
            number,
            now,
            len(ask.prompt_ids),
            ask.max_tokens,
            names_of_blocks(ask.prompt_ids, block) if block else (),
            block,
            ask.session,
            ask.priority,
            tenant=ask.tenant,
            program=ask.session,
        )
        self._growing[number] = Growing(ask, (number * 7919 + ask.seed * 104_729) % len(self._answers))
        self.cluster.submit(request, self._length(ask))
        if number in self._growing:
            home = self.cluster.home(number)
            self._accepted.append((number, now, home.number if home is not None else 0))

    def _length(self, ask: Ask) -> int:
        """The true length of an answer."""
        if ask.ignore_eos or self._lengths is None:
            return ask.max_tokens
        draw = Random(f"{self.plan.config.seed} {ask.seed} {len(ask.prompt_ids)} answer").random()
        return min(ask.max_tokens, int(self._lengths.of(np.array([draw]))[0]))

    # What the cluster tells

    def _on_batch(self, replica: Replica, batch: Batch, end: Ns, finished: Sequence[Track]) -> None:
        shape = batch.shape
        computed = shape.decodes + sum(chunk.tokens for chunk in batch.chunks)
        self._batches.append((replica.number, computed))
        for track in finished:
            self._grew(track.request.id, track.delivered)
        seen = set()
        for part in batch.grown:
            cohort = part.cohort
            if cohort.number in seen:
                continue
            seen.add(cohort.number)
            for track in cohort.members():
                self._grew(track.request.id, track.delivered)
            if cohort.closing:
                done = len(cohort.times)
                for step, tracks in cohort.closing.items():
                    for track in tracks:
                        self._grew(track.request.id, track.produced - (step - done))

    def _grew(self, number: int, delivered: int) -> None:
        growing = self._growing.get(number)
        if growing is None or delivered <= growing.sent:
            return
        words, first = self._answers, growing.word + growing.sent * 31
        new = [words[(first + 31 * at) % len(words)] for at in range(delivered - growing.sent)]
        growing.sent = delivered
        self._tokens.setdefault(number, []).extend(new)

    def _on_record(
        self,
        request: Request,
        replica: int,
        status: str,
        reason: str,
        output_tokens: int,
        admitted_ns: Ns,
        first_token_ns: Ns,
        finished_ns: Ns,
        preemptions: int,
        cached_tokens: int,
    ) -> None:
        number = request.id
        self._grew(number, output_tokens)
        growing = self._growing.pop(number)
        ask = growing.ask
        by_stop = status == "finished" and output_tokens < ask.max_tokens
        if admitted_ns >= 0 and self.finds_prefixes:
            queries, hits = self._looked_up.get(replica, (0, 0))
            self._looked_up[replica] = queries + request.prompt_tokens, hits + cached_tokens
        self._ended.append(
            Ended(
                number,
                status,
                reason,
                by_stop,
                request.arrival_ns if self.front is None else self.front.sent_ns[number],
                admitted_ns,
                first_token_ns,
                finished_ns,
                output_tokens,
                cached_tokens,
                preemptions,
                max(0, replica),
            )
        )

    def _tell(self, now: Ns, tell: Callable[[Step], None]) -> None:
        if not (self._tokens or self._ended or self._accepted or self._batches):
            return
        step = Step(now, tuple(self._tokens.items()), self._ended, self._accepted, self._batches)
        self._tokens, self._ended, self._accepted, self._batches = {}, [], [], []
        front = self.front
        if front is None:
            tell(step)
            return
        # Tokens of a step leave one after the other through the front end's processor: in its middle, on average.
        replica = step.batches[0][0] if step.batches else 0
        busy = round(sum(len(ids) for _, ids in step.tokens) * front.times.token_ns)
        done = max(now, self._leaves_ns.get(replica, 0)) + busy
        self._leaves_ns[replica] = done
        due = done - busy // 2 + front.after_ns
        self._numbers += 1
        heappush(self._leaving, (due, self._numbers, step._replace(time_ns=due)))


def names_of_blocks(ids: Sequence[int], size: int) -> tuple[int, ...]:
    """A number for each whole block of `size` tokens and all that goes before it; hashes of whole numbers never change
    from run to run."""
    names, before = [], 0
    for start in range(0, len(ids) - size + 1, size):
        before = hash((before, *ids[start : start + size]))
        names.append(before & (1 << 62) - 1)
    return tuple(names)


def _nothing(row: int) -> None:
    pass
