"""The scheduler that simulator and executor share: it keeps the books, the policy decides.

A batch has two moments. `plan` advances contexts and takes blocks; `complete` delivers tokens and frees blocks. Between
them it is in flight; how far planning may run ahead is the host's setting, so pipelines, asynchronous scheduling and
vLLM V1's chasing chunks are one mechanism. Stages run batches in plan order, so blocks given up at plan time may be
used by a later batch at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from operator import attrgetter
from typing import Final, NamedTuple

from policies.contract.draft import UNLIMITED, Draft
from policies.contract.host import Host
from policies.contract.policy import Policy, Promises, StatefulPolicy
from policies.contract.queues import Queues
from policies.edges.errors import PolicyError
from policies.kv_memory.ledger import KVLedger
from policies.kv_memory.swap import Swap
from policies.scheduling.handover import Handover
from policies.scheduling.lifecycle import Roster
from policies.scheduling.overload_ladder import AdmissionControl
from policies.work.batch import Batch
from policies.work.cohort import Cohort
from policies.work.request import Ns
from policies.work.track import Track

_by_order: Final = attrgetter("order")


class Outcome(NamedTuple):
    """What one completed batch delivered.

    gaps: (time since the previous token, how many requests saw it). A resumed request's stall is a gap of its own; a
    token dropped by preemption in flight is none. Tokens that a speculating decode delivers together are seen at one
    moment: they have one gap. Always: sum of the counts + len(first_tokens) == deliveries.
    """

    first_tokens: Sequence[Track]
    finished: Sequence[Track]
    gaps: Sequence[tuple[Ns, int]]


class Scheduler(Roster):
    """One engine's queues, ledger and policy.

    token_budget: most tokens of one batch, None for no limit. max_num_seqs: most requests admitted at once.
    max_model_len: longest prompt + declared output; a longer request is rejected, and longest_by says whose
    limit it is. watermark: share of the pool that admission leaves free (by default as the policy's memory rule says).
    swap: host memory for preempted requests. admission: what to do when memory runs short, beyond what the policy does.
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
        longest_by: str = "",
        watermark: float | None = None,
        swap: Swap | None = None,
        admission: AdmissionControl | None = None,
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self.host = host if host is not None else Host()
        self.micro_batches, self.chase_decodes = self.host.micro_batches, self.host.chase_decodes
        self.speculation = speculation = self.host.speculation
        # A speculating decode advances by as much as is accepted: no plan of it repeats.
        self.promises = policy.promises if speculation is None else Promises()
        self.lookahead = self.input_slots = self.drafting = 0
        if speculation is not None:
            self.lookahead, self.input_slots = speculation.lookahead, speculation.input_slots
            self.drafting = speculation.tokens
        self.stateful = policy if isinstance(policy, StatefulPolicy) else None
        self.state = None if self.stateful is None else self.stateful.new_state()
        self.served: dict[object, list[int]] = {}
        self.token_budget = UNLIMITED if token_budget is None else token_budget
        self.max_num_seqs = UNLIMITED if max_num_seqs is None else max_num_seqs
        self.max_model_len = UNLIMITED if max_model_len is None else max_model_len
        self.longest_by = longest_by
        for name, value in (("token_budget", self.token_budget), ("max_num_seqs", self.max_num_seqs)):
            if value < 1:
                raise PolicyError(f"{name}: found {value}, expected at least 1")
        # Memory for B requests is of use to no more than may run.
        ledger.slots = min(ledger.slots, self.max_num_seqs)
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
        self.answers_together = policy.answers_together
        self.withheld: dict[int, tuple[Track, Cohort | None]] = {}
        self.retired: list[Cohort] = []
        self._admissions = 0
        self._cohorts = 0
        self._batches = 0
        self._stopped: list[Track] = []
        self._left_out = []
        self._only_now = False

    @property
    def depth(self) -> int:
        """Batches that may be in flight at once: one a micro-batch, and one more where planning runs ahead."""
        return self.micro_batches + self.chase_decodes

    # The two moments of a batch

    def plan(self, now_ns: Ns) -> Batch | None:
        """Let the policy write the next batch. None: nothing to run now (see `alarm_ns`, `reject_stuck`)."""
        queues = self.queues
        if self.chase_decodes and queues.in_flight_batches:
            self._set_exhausted_aside()
        policy, ledger, host = self.policy, self.ledger, self.host
        stateful = self.stateful
        if stateful is not None and self.served:
            self._tell_of_service()
        while True:
            draft = Draft(self, now_ns)
            if self.admission is not None:
                self.admission.plan(self, draft, now_ns)
            elif stateful is None:
                policy.plan(queues, draft, ledger, host, now_ns)
            else:
                stateful.plan(queues, draft, ledger, host, now_ns, self.state)
            # A plan that only preempted has freed blocks: ask again, until it grants or has nobody left to stop.
            if draft.parts:
                break
            self._stopped += draft.preempted
            if draft.preempted:
                continue
            if queues.in_flight_batches or not queues.waiting or draft.alarm_ns is not None:
                break
            if not self.handover.reclaim():
                break
        if self._left_out:
            self._take_back_in()
        self.alarm_ns = draft.alarm_ns
        self._only_now = draft.only_now
        if not draft.parts:
            return None
        if isinstance(draft.budget_left, float):
            name = type(policy).__name__
            raise PolicyError(f"policy {name}: asked for a part of a token; counts are whole: use // or int()")
        batch = draft._finish(self._batches)
        if self._stopped:
            # Whoever holds something for a victim hears of it with the next batch, whichever plan stopped it.
            batch.preempted = [*self._stopped, *batch.preempted]
            self._stopped = []
        self._batches += 1
        queues.in_flight_batches += 1
        queues.decode_tokens_promised -= batch.shape[5]
        if batch.verified:
            # Of a speculating decode only its next token is certain.
            queues.decode_tokens_promised += batch.shape[7]
        if ledger.by_id:
            batch.new_blocks = ledger.take_new_blocks()
        if self.swap is not None:
            batch.swap_out, batch.swap_in = self.swap.take_moves(self._admissions)
        for chunk in batch.chunks:
            if chunk[3]:
                self._join(chunk[0], batch)
        if self.speculation is not None and self.chase_decodes:
            # Who plans ahead counts on as many drafts as are wanted: the next batch is planned before they are made.
            for part in batch.verified:
                part[1].drafts = batch.shape[9]
            for track, _ in batch.joins:
                track.drafts = batch.shape[9]
        if self.chase_decodes:
            batch.repeats_at = queues.changes
        elif self.micro_batches > 1:
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
        for cohort, track, _, _, _ in batch.verified:
            if track.cohort is cohort and track.first_token_ns >= 0:
                gaps.append((now_ns - (cohort.times[-1] if cohort.times else track.last_token_ns), 1))
            elif track.cohort is cohort:
                first_tokens.append(track)
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
        if self.stateful is not None:
            self._count_served(batch)
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
        if batch.verified:
            finished = [*finished, *self._deliver_verified(batch, now_ns)]
        if self.speculation is not None and not self.chase_decodes:
            for track, epoch in batch.joins:
                if track.epoch == epoch:
                    track.drafts = batch.proposed.get(track.request.id, 0)
        for request_id in stopped:
            ended = self.tracks.get(request_id)
            if ended is not None and ended not in finished:
                finished = [*finished, ended]
        if finished:
            if len(finished) > 1:
                # In admission order, however they are spread over cohorts: blocks are freed and followers come in it.
                finished = sorted(finished, key=_by_order)
            if self.answers_together:
                finished = self._answer_together(finished, now_ns)
            else:
                for track in finished:
                    self._finish(track, now_ns)
        if len(grown) > 1 and self.speculation is None:
            self._merge([part[0] for part in grown])
        return finished

    def ask_policy(self, draft: Draft, now_ns: Ns) -> None:
        """Let the policy write on a draft."""
        stateful = self.stateful
        if stateful is None:
            self.policy.plan(self.queues, draft, self.ledger, self.host, now_ns)
        else:
            stateful.plan(self.queues, draft, self.ledger, self.host, now_ns, self.state)
