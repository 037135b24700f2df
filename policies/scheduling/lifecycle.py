"""Who is in an engine: how requests come, are started and stopped, and go, and what their work adds up to.

The part of the scheduler between lockstep (`policies/scheduling/lockstep.py`) and the two moments of a batch
(`policies/scheduling/scheduler.py`). Whoever leaves a state takes along what it counted there: blocks, slot, prefill
tokens, promised answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.contract.draft import UNLIMITED, Draft
from policies.edges.errors import PolicyError
from policies.kv_memory.swap import Preemption
from policies.scheduling.handover import Handover
from policies.scheduling.lockstep import Lockstep
from policies.work.request import Ns, Request
from policies.work.speculator import Speculator
from policies.work.track import Track


class Roster(Lockstep):
    """The requests of one scheduler, by id in `tracks` until they end; its limits as `Scheduler` has them."""

    token_budget: int
    max_num_seqs: int
    longest_by: str
    watermark_blocks: int
    tracks: dict[int, Track]
    handover: Handover
    preemptions: int
    answers_together: bool
    _admissions: int

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
        """Queue a request. If it could never run here, its track's status is "rejected" (with a reason), or "failed" in
        the middle of an answer.

        ends_after: the oracle's output length; None where only the model knows (the declared limit then holds).
        computed: prompt tokens whose KV is handed over with it; produced: output tokens delivered elsewhere.
        hands_over: keep its blocks when it has finished, until `handover.release`.
        """
        track = self.enter(request, now_ns, ends_after, computed, produced)
        if track.status == "waiting":
            track.hands_over = hands_over
            self.announce(track)
            self.queues.enqueue(track)
        return track

    def enter(self, request: Request, now_ns: Ns, ends_after: int | None, computed: int, produced: int) -> Track:
        """Book a request and its work, without queueing it. Nobody is overloaded in the middle of an answer."""
        if request.id in self.tracks:
            raise PolicyError(f"request {request.id} was added twice")
        track = Track(request, request.max_output_tokens if ends_after is None else ends_after, computed, produced)
        if produced:
            track.first_token_ns = track.last_token_ns = now_ns
        reason = self.why_not(request)
        if not reason and self.admission is not None and not produced:
            reason = self.admission.why_not(request, self, now_ns)
        if reason:
            track.status, track.reason, track.finished_ns = "failed" if produced else "rejected", reason, now_ns
            return track
        self.tracks[request.id] = track
        queues = self.queues
        queues.prefill_tokens += self._unplanned(track)
        queues.decode_tokens_promised += track.limit_after - produced
        return track

    def withdraw(self, ids: Sequence[int], reason: str, now_ns: Ns = 0, *, status: str = "aborted") -> list[Track]:
        """Take requests out, wherever they are: client gone, failure, hand-over. Tokens in flight are dropped.

        Returns those that were found, and those that have finished because they had waited for these alone.
        """
        gone = []
        for request_id in ids:
            track = self.tracks.pop(request_id, None)
            if track is None:
                continue
            unplanned = self._unplanned(track)
            if track.closing and track.cohort is None:
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
                if self.admission is not None:
                    self.admission.left(track)
            self._forget(track, unplanned)
            self.withheld.pop(request_id, None)
            track.status, track.reason, track.finished_ns = status, reason, now_ns
            gone.append(track)
        if self.withheld:
            gone += self._return_answers(now_ns)
        return gone

    def abandon(self, reason: str, now_ns: Ns = 0) -> list[Track]:
        """The engine died: batches in flight never return and its KV is lost. Every request comes back, "failed", but
        those whose last token had been delivered, which have finished."""
        for request_id in list(self.handover.held):
            self.handover.release(request_id)
        done = [track for track, _ in self.withheld.values()]
        self.withheld.clear()
        for track in done:
            self._finish(track, now_ns)
        gone = done + self.withdraw(list(self.tracks), reason, now_ns, status="failed")
        for cohort in self.retired:
            # Steps in flight will not complete; nobody has a segment that claims them.
            cohort.planned = len(cohort.times)
        self.queues.in_flight_batches = 0
        self.alarm_ns = None
        self.ledger.forget()
        return gone

    def reject_stuck(self, now_ns: Ns) -> Track | None:
        """End the head of the queue: nothing is in flight, no alarm is set, and the policy still plans nothing.

        First comes whoever is done and waits for a batch of which nobody is left: its blocks may be what is missing.
        The head is rejected, or failed if it has delivered tokens already (it cannot come back after a preemption).
        """
        queues = self.queues
        if queues.in_flight_batches or self.alarm_ns is not None:
            return None
        if self.withheld and not queues.num_running:
            done, _ = self.withheld.pop(next(iter(self.withheld)))
            self._finish(done, now_ns)
            return done
        if not queues.waiting:
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
            whose = f" ({self.longest_by})" if self.longest_by else ""
            return f"prompt + output limit = {length} tokens, more than the longest allowed {self.max_model_len}{whose}"
        ledger = self.ledger
        # The last token's key and value are never stored.
        needed = ledger.blocks_for(length - 1)
        usable = ledger.total_blocks - self.watermark_blocks
        if needed > usable:
            kept = f", {self.watermark_blocks} of them kept free by the watermark" if self.watermark_blocks else ""
            return f"needs {needed} KV blocks, the pool has {ledger.total_blocks}{kept}"
        return ""

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

    def stop(self, track: Track, how: Preemption | None = None, empty: set[int] | None = None) -> None:
        """Preempt a running track: back to the front of the queue, to recompute everything or to be swapped in.

        empty: blocks that it may hold and that were never filled, because the plan that would have done so is undone.
        """
        queues = self.queues
        unplanned = self._unplanned(track)
        if empty:
            filled = self.ledger.filled_blocks(track, empty)
            track.own_context = min(track.own_context, filled * self.ledger.block_size)
        kept = 0 if self.swap is None else self.swap.put_out(track, self, how)
        self._vacate(track)
        track.computed = kept
        track.own_context = 0
        track.status = "waiting"
        track.preemptions += 1
        self.preemptions += 1
        queues.prefill_tokens += track.own_known - kept - unplanned
        self.announce(track)
        queues.enqueue_in_front(track)

    def announce(self, track: Track) -> None:
        """Tell a policy that remembers who is about to join the queue."""
        stateful = self.stateful
        if stateful is not None:
            if self.served:
                self._tell_of_service()
            stateful.queued(self.state, self.queues, track)

    def ask_policy(self, draft: Draft, now_ns: Ns) -> None:
        """Let the policy write on a draft."""
        raise NotImplementedError

    # Inside

    @staticmethod
    def _unplanned(track: Track) -> int:
        """Tokens of a track that have to be prefilled and are not planned yet."""
        if track.cohort is not None or track.closing or track.status == "withheld":
            return 0
        return track.own_known - max(track.own_context, track.computed)

    def _answer_together(self, done: Sequence[Track], now_ns: Ns) -> list[Track]:
        """Requests whose last token has been delivered wait for the last of their batch; returns those that end now."""
        for track in done:
            cohort = track.cohort
            self._leave_running(track)
            self._forget(track, 0)
            # It runs no more and will ask for nothing, but keeps its blocks.
            self.queues.count_running(track, -1)
            track.closing, track.status, track.last_token_ns = False, "withheld", now_ns
            # Tokens that are computed for it in flight are dropped.
            track.epoch += 1
            self.withheld[track.request.id] = track, cohort
        return self._return_answers(now_ns)

    def _return_answers(self, now_ns: Ns) -> list[Track]:
        """End the withheld requests of batches in which nobody decodes any more."""
        all_done = not self.queues.num_running
        ended = [
            track
            for track, cohort in self.withheld.values()
            if all_done or (self.micro_batches > 1 and cohort is not None and not cohort.size)
        ]
        for track in ended:
            del self.withheld[track.request.id]
            self._finish(track, now_ns)
        return ended

    def _finish(self, track: Track, now_ns: Ns) -> None:
        if track.hands_over:
            self.handover.held[track.request.id] = track
        withheld = track.status == "withheld"
        self._vacate(track)
        if self.admission is not None:
            self.admission.ended(track)
        del self.tracks[track.request.id]
        if not withheld:
            track.last_token_ns = now_ns
        self._forget(track, 0)
        track.status, track.finished_ns = "finished", now_ns

    def _forget(self, track: Track, lacking: int) -> None:
        """Work that a request leaving for good will not ask for."""
        queues = self.queues
        queues.prefill_tokens -= lacking
        if track.status != "withheld":
            queues.decode_tokens_promised -= track.limit_after - track.produced

    def _vacate(self, track: Track) -> None:
        """Out of the running ones: cohort or partial prompt, blocks and slot."""
        if track.status != "withheld":
            self._leave_running(track)
        track.closing = False
        held = self.handover.held
        if not held or track.request.id not in held:
            self.ledger.release(track)
        if track.status != "withheld":
            self.queues.count_running(track, -1)
        if self.admission is not None:
            self.admission.left(track)
        track.order = -1
        track.epoch += 1

    def _leave_running(self, track: Track) -> None:
        """Out of its cohort, or of the partial prompts; blocks and slot stay."""
        queues = self.queues
        cohort = track.cohort
        if cohort is not None:
            # Promised tokens of its flight are dropped: they are owed again.
            first = len(cohort.times)
            unreceived = cohort.planned - (first if first > track.segment_start else track.segment_start)
            if isinstance(cohort, Speculator):
                unreceived = cohort.promised
            cohort.leave(track)
            if unreceived > 0:
                queues.decode_tokens_promised += unreceived
            if track.closing:
                self.retired.append(cohort)
            elif not cohort.size:
                self._drop_empty_parts()
        elif not track.closing:
            queues.parts.remove(track)
            queues.parts_changed()
