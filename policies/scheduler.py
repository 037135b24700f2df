"""The scheduler that simulator and executor share: it keeps the books, the policy decides.

A batch has two moments. `plan` advances contexts and takes blocks; `complete` delivers tokens and frees blocks. Between
them it is in flight; how far planning may run ahead is the host's setting, so pipelines, asynchronous scheduling and
vLLM V1's chasing chunks are one mechanism. Stages run batches in plan order, so blocks given up at plan time may be
used by a later batch at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil
from typing import NamedTuple

from policies.admission import AdmissionControl
from policies.batch import Batch
from policies.cohort import Cohort
from policies.draft import UNLIMITED, Draft
from policies.errors import PolicyError
from policies.handover import Handover
from policies.host import Host
from policies.ledger import KVLedger
from policies.lockstep import Lockstep
from policies.policy import Policy
from policies.queues import Queues
from policies.request import Ns, Request
from policies.swap import Preemption, Swap
from policies.track import Track


class Outcome(NamedTuple):
    """What one completed batch delivered.

    gaps: (time since the previous token, how many requests saw it). A resumed request's stall is a gap of its own; a
    token dropped by preemption in flight is none. Always: sum of the counts + len(first_tokens) == tokens delivered.
    """

    first_tokens: Sequence[Track]
    finished: Sequence[Track]
    gaps: Sequence[tuple[Ns, int]]


class Scheduler(Lockstep):
    """One engine's queues, ledger and policy.

    token_budget: most tokens of one batch, None for no limit. max_num_seqs: most requests admitted at once.
    max_model_len: longest prompt + declared output; a longer request is rejected. watermark: share of the pool that
    admission leaves free (by default as the policy's memory rule says). swap: host memory for preempted requests.
    admission: what to do when memory runs short, beyond what the policy does.
    """

    def __init__(
        self,
        policy: Policy,
        ledger: KVLedger,
        host: Host | None = None,
        *,
        token_budget: int | None = None,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        watermark: float | None = None,
        swap: Swap | None = None,
        admission: AdmissionControl | None = None,
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self.host = host if host is not None else Host()
        self.micro_batches, self.chase_decodes = self.host.micro_batches, self.host.chase_decodes
        self.repeats, self.repeats_chunks = policy.repeats, policy.repeats_chunks
        self.token_budget = UNLIMITED if token_budget is None else token_budget
        self.max_num_seqs = UNLIMITED if max_num_seqs is None else max_num_seqs
        self.max_model_len = UNLIMITED if max_model_len is None else max_model_len
        for name, value in (("token_budget", self.token_budget), ("max_num_seqs", self.max_num_seqs)):
            if value < 1:
                raise PolicyError(f"{name}: found {value}, expected at least 1")
        share = policy.memory.watermark if watermark is None else watermark
        self.watermark_blocks = ceil(share * ledger.total_blocks)
        self.queues = Queues(self.host)
        self.swap = swap
        self.admission = admission
        if swap is not None:
            self.queues.in_host_memory = swap.held
        self.alarm_ns: Ns | None = None
        self.tracks: dict[int, Track] = {}
        self.handover = Handover(self)
        self.preemptions = 0
        self.retired: list[Cohort] = []
        self._admissions = 0
        self._cohorts = 0
        self._batches = 0
        self._stopped: list[Track] = []
        self._only_now = False

    @property
    def depth(self) -> int:
        """Batches that may be in flight at once: one a micro-batch, and one more where planning runs ahead."""
        return self.micro_batches + self.chase_decodes

    # Requests come and go

    def add(
        self,
        request: Request,
        now_ns: Ns,
        *,
        ends_after: int | None = None,
        computed: int = 0,
        produced: int = 0,
        hands_over: bool = False,
    ) -> Track:
        """Queue a request. Its track's status is "rejected" (with a reason) if it could never run here.

        ends_after: the oracle's output length; None where only the model knows (the declared limit then holds).
        computed: prompt tokens whose KV is handed over with it; produced: output tokens delivered elsewhere.
        hands_over: keep its blocks when it has finished, until `handover.release`.
        """
        track = self.enter(request, now_ns, ends_after, computed, produced)
        if track.status != "rejected":
            track.hands_over = hands_over
            self.queues.enqueue(track)
        return track

    def enter(self, request: Request, now_ns: Ns, ends_after: int | None, computed: int, produced: int) -> Track:
        """Book a request and its work, without queueing it. Nobody is turned away in the middle of an answer."""
        if request.id in self.tracks:
            raise PolicyError(f"request {request.id} was added twice")
        track = Track(request, request.max_output_tokens if ends_after is None else ends_after, computed, produced)
        if produced:
            track.first_token_ns = track.last_token_ns = now_ns
        reason = self.why_not(request)
        if not reason and self.admission is not None and not produced:
            reason = self.admission.why_not(request, self, now_ns)
        if reason:
            track.status, track.reason, track.finished_ns = "rejected", reason, now_ns
            return track
        self.tracks[request.id] = track
        queues = self.queues
        queues.prefill_tokens += self._unplanned(track)
        queues.decode_tokens_promised += track.limit_after - produced
        return track

    def withdraw(self, ids: Sequence[int], reason: str, now_ns: Ns = 0, *, status: str = "aborted") -> list[Track]:
        """Take requests out, wherever they are: client gone, failure, hand-over. Tokens in flight are dropped."""
        gone = []
        for request_id in ids:
            track = self.tracks.pop(request_id, None)
            if track is None:
                continue
            unplanned = self._unplanned(track)
            if track.closing:
                self._reopen(track)
            if track.order >= 0:
                self._vacate(track)
            else:
                if self.handover.expected.pop(request_id, None) is None:
                    self.queues.dequeue(track)
                if track.blocks:
                    self.ledger.release(track)
                    self.queues.changes += 1
                if self.swap is not None:
                    self.swap.forget(request_id)
            self._forget(track, unplanned)
            track.status, track.reason, track.finished_ns = status, reason, now_ns
            gone.append(track)
        return gone

    def abandon(self, reason: str, now_ns: Ns = 0) -> list[Track]:
        """The engine died: batches in flight never return and its KV is lost. Every request comes back, "failed"."""
        for request_id in list(self.handover.held):
            self.handover.release(request_id)
        gone = self.withdraw(list(self.tracks), reason, now_ns, status="failed")
        for cohort in self.retired:
            # Steps in flight will not complete; nobody has a segment that claims them.
            cohort.planned = len(cohort.times)
        self.queues.in_flight_batches = 0
        self.alarm_ns = None
        self.ledger.forget()
        return gone

    def reject_stuck(self, now_ns: Ns) -> Track | None:
        """End the head of the queue: nothing is in flight, no alarm is set, and the policy still plans nothing.

        It is rejected, or failed if it has delivered tokens already (it cannot come back after a preemption).
        """
        queues = self.queues
        if queues.in_flight_batches or self.alarm_ns is not None or not queues.waiting:
            return None
        # Blocks of a hand-over will be free one day; who is expected and has none yet waits as the head does.
        if self.handover.held or any(track.blocks for track in self.handover.expected.values()):
            return None
        head, ledger = queues.waiting[0], self.ledger
        budget = str(self.token_budget) if self.token_budget < UNLIMITED else "none"
        reason = (
            f"{type(self.policy).__name__} cannot start it on an idle engine ({head.own_known} tokens, token budget "
            f"{budget}, {ledger.blocks_for(head.own_known)} KV blocks of {ledger.free_blocks} free)"
        )
        self.withdraw([head.request.id], reason, now_ns, status="failed" if head.produced else "rejected")
        return head

    def why_not(self, request: Request) -> str:
        """Why a request could never run here; empty if it can."""
        length = request.prompt_tokens + request.max_output_tokens
        if length > self.max_model_len:
            return f"prompt + output limit = {length} tokens, more than the longest allowed {self.max_model_len}"
        ledger = self.ledger
        # The last token's key and value are never stored.
        needed = ledger.blocks_for(length - 1)
        usable = ledger.total_blocks - self.watermark_blocks
        if needed > usable:
            return f"needs {needed} KV blocks, the pool has {usable}"
        return ""

    # The two moments of a batch

    def plan(self, now_ns: Ns) -> Batch | None:
        """Let the policy write the next batch. None: nothing to run now (see `alarm_ns`, `reject_stuck`)."""
        queues = self.queues
        if self.chase_decodes and queues.in_flight_batches:
            self._set_exhausted_aside()
        policy, ledger, host = self.policy, self.ledger, self.host
        while True:
            draft = Draft(self, now_ns)
            if self.admission is None:
                policy.plan(queues, draft, ledger, host, now_ns)
            else:
                self.admission.plan(self, draft, now_ns)
            # A plan that only preempted has freed blocks: ask again, until it grants or has nobody left to stop.
            if draft.parts:
                break
            self._stopped += draft.preempted
            if draft.preempted:
                if not queues.num_running:
                    # Who ran alone gave way to blocks of those who only wait, and would do so again.
                    self.handover.reclaim()
            elif queues.in_flight_batches or not queues.waiting or not self.handover.reclaim():
                break
        self.alarm_ns = draft.alarm_ns
        self._only_now = draft.only_now
        if not draft.parts:
            return None
        batch = draft._finish(self._batches)
        if self._stopped:
            # Whoever holds something for a victim hears of it with the next batch, whichever plan stopped it.
            batch.preempted = [*self._stopped, *batch.preempted]
            self._stopped = []
        self._batches += 1
        queues.in_flight_batches += 1
        queues.decode_tokens_promised -= batch.shape[5]
        if ledger.by_id:
            batch.new_blocks = ledger.take_new_blocks()
        if self.swap is not None:
            batch.swap_out, batch.swap_in = self.swap.take_moves(self._admissions)
        for chunk in batch.chunks:
            if chunk[3]:
                self._join(chunk[0], batch)
        if self.micro_batches > 1:
            self.mark_repeatable(batch)
        return batch

    def complete(self, batch: Batch, now_ns: Ns, stopped: Sequence[int] = ()) -> Outcome:
        """The last stage is done with `batch`: deliver its tokens, end who is done, free their blocks.

        stopped: ids of requests whose token in this batch ended them (a stop token was sampled).
        """
        gaps: list[tuple[Ns, int]] = []
        first_tokens: list[Track] = []
        for cohort, step, received, _, _ in batch.grown:
            if cohort.lost:
                received -= cohort.lost.get(step, 0)
            if received:
                gaps.append((now_ns - cohort.times[-1], received))
        for track, epoch in batch.joins:
            if track.epoch != epoch:
                continue
            if track.first_token_ns < 0:
                first_tokens.append(track)
            else:
                gaps.append((now_ns - track.last_token_ns, 1))
        return Outcome(first_tokens, list(self.deliver(batch, now_ns, stopped)), gaps)

    def deliver(self, batch: Batch, now_ns: Ns, stopped: Sequence[int] = ()) -> Sequence[Track]:
        """`complete` for whoever reads token times off the cohorts afterwards: returns those who have finished."""
        self.queues.in_flight_batches -= 1
        for chunk in batch.chunks:
            chunk[0].chunks_in_flight -= 1
        finished: Sequence[Track] = ()
        grown = batch.grown
        for part in grown:
            cohort, step = part[0], part[1]
            times = cohort.times
            assert len(times) == step, "batches complete in plan order"
            times.append(now_ns)
            step += 1
            if cohort.lost:
                cohort.lost.pop(step - 1, 0)
            if step in cohort.ends_at:
                finished = [*finished, *cohort.ending()]
            if cohort.closing:
                finished = [*finished, *cohort.closing.pop(step, ())]
        for track, epoch in batch.joins:
            if track.epoch == epoch and track.first_token_ns < 0:
                track.first_token_ns = now_ns
        for request_id in stopped:
            ended = self.tracks.get(request_id)
            if ended is not None and ended not in finished:
                finished = [*finished, ended]
        for track in finished:
            self._finish(track, now_ns)
        if len(grown) > 1:
            self._merge([part[0] for part in grown])
        return finished

    # Books kept for the draft

    def start(self, track: Track, cached: int, now_ns: Ns) -> None:
        """Move a waiting track to the running ones, its first `cached` tokens being there already."""
        queues = self.queues
        queues.dequeue(track)
        track.order = self._admissions
        self._admissions += 1
        track.status = "running"
        hit = cached - track.computed
        if track.admitted_ns < 0:
            track.admitted_ns = now_ns
            track.cached_total = hit  # what a preempted request finds of its own later was not saved
        track.own_context = cached
        queues.prefill_tokens -= hit
        queues.count_running(track, 1)
        queues.parts.append(track)
        queues.parts_changed()

    def stop(self, track: Track, how: Preemption | None = None, empty: Collection[int] = ()) -> None:
        """Preempt a running track: back to the front of the queue, to recompute everything or to be swapped in.

        empty: blocks that it may hold and that were never filled, because the plan that would have done so is undone.
        """
        queues = self.queues
        unplanned = self._unplanned(track)
        if empty:
            table = self.ledger.table(track)
            filled = next((at for at, block in enumerate(table) if block in empty), len(table))
            track.own_context = min(track.own_context, filled * self.ledger.block_size)
        kept = 0 if self.swap is None else self.swap.put_out(track, self, how)
        self._vacate(track)
        track.computed = kept
        track.own_context = 0
        track.status = "waiting"
        track.preemptions += 1
        self.preemptions += 1
        queues.prefill_tokens += track.own_known - kept - unplanned
        queues.enqueue_in_front(track)

    # Inside

    @staticmethod
    def _unplanned(track: Track) -> int:
        """Tokens of a track that have to be prefilled and are not planned yet."""
        if track.cohort is not None or track.closing:
            return 0
        return track.own_known - max(track.own_context, track.computed)

    def _finish(self, track: Track, now_ns: Ns) -> None:
        if track.hands_over:
            self.handover.held[track.request.id] = track
        self._vacate(track)
        if self.admission is not None:
            self.admission.ended(track)
        del self.tracks[track.request.id]
        track.last_token_ns = now_ns
        self._forget(track, 0)
        track.status, track.finished_ns = "finished", now_ns

    def _forget(self, track: Track, lacking: int) -> None:
        """Work that a request leaving for good will not ask for."""
        queues = self.queues
        queues.prefill_tokens -= lacking
        queues.decode_tokens_promised -= track.limit_after - track.produced

    def _vacate(self, track: Track) -> None:
        """Out of the running ones: cohort or partial prompt, blocks and slot."""
        queues = self.queues
        cohort = track.cohort
        if cohort is not None:
            # Promised tokens of its flight are dropped: they are owed again.
            first = len(cohort.times)
            unreceived = cohort.planned - (first if first > track.segment_start else track.segment_start)
            cohort.leave(track)
            if unreceived > 0:
                queues.decode_tokens_promised += unreceived
            if not cohort.size:
                self._drop_empty_parts()
        elif not track.closing:
            queues.parts.remove(track)
            queues.parts_changed()
        track.closing = False
        held = self.handover.held
        if not held or track.request.id not in held:
            self.ledger.release(track)
        queues.count_running(track, -1)
        if self.admission is not None:
            self.admission.left(track)
        track.order = -1
        track.epoch += 1
