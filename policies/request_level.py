"""Request-level (static) batching: a batch forms, runs until its last request is done, and only then the next forms."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Policy, Promises, knob
from policies.contract.queues import Queues
from policies.kv_memory.ledger import KVView
from policies.work.cohort import Cohort
from policies.work.request import NS_PER_S, Ns
from policies.work.track import Track


@dataclass(frozen=True)
class RequestLevel(Policy):
    """A batch of waiting requests: prompts padded to the longest and prefilled together, then decoded until all are
    done; their answers are returned together. In a pipeline its micro-batches start together, and the next ones when
    all of them have finished."""

    max_batch_size: int = knob(32, "most requests in one batch (in a pipeline: in one micro-batch)", least=1)
    keep_finished: bool = knob(True, "finished rows keep their slot: executed as dummy rows until all are done")
    max_delay_s: float = knob(0.0, "how long the oldest request waits for its batch to fill, seconds", least=0)
    early_return: bool = knob(False, "return each answer when it is done, instead of a batch's answers together")
    reserve: str = knob(
        "limit",
        "KV reserved: for input + declared output limit, or for the longest allowed request (longest)",
        choices=("limit", "longest"),
    )

    promises: ClassVar[Promises] = Promises(decodes=True, keeps_running=True)
    paper: ClassVar[str] = "FasterTransformer, as Orca (OSDI 2022), Sec. 3, describes it"
    # No share is known; this is the rule of SARATHI's comparison with it.
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=1.0, headroom=0.2)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        if self._prefill(queues, draft, kv, host, now_ns):
            return
        cohorts = queues.cohorts
        if host.speculation is not None:
            # Speculating decodes are cohorts of one: nobody can tell which of them began together.
            draft.decode_all()
        elif cohorts:
            # One cohort is one micro-batch; the one that has waited longest is next.
            batch = min(cohorts, key=lambda cohort: cohort.last_token_ns)
            # Blocks are short only where less than the limit was reserved (an oversubscribed memory).
            while batch.size and not draft.decode(batch):
                draft.preempt()
            if draft.parts and self.keep_finished:
                draft.pad_to(batch.peak)

    def _prefill(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> bool:
        """Prefill a micro-batch of the round that is forming; False if none is, or if it may not start yet."""
        micro_batches = host.micro_batches - queues.in_flight_batches
        if micro_batches <= 0 or not queues.waiting or not _forming(queues):
            return False
        most = self.max_batch_size * micro_batches
        ready = _ready(queues, most)
        if not queues.num_running and ready < most:
            starts_ns = queues.waiting[0].request.arrival_ns + round(self.max_delay_s * NS_PER_S)
            if now_ns < starts_ns:
                draft.wait_until(starts_ns)
                return False
        budget = draft.budget_left
        admitted = longest = 0
        for _ in range(-(-ready // micro_batches)):
            head = queues.waiting[0]
            whole = draft.to_prefill(head)
            fits = max(longest, whole) * (admitted + 1) <= budget
            if not (fits and draft.admit(head, whole, reserve=self.reserves(head, kv))):
                break
            admitted += 1
            longest = max(longest, whole)
        draft.pad_to(longest * admitted)
        return admitted > 0

    @property
    def answers_together(self) -> bool:
        return not self.early_return

    def reserves(self, track: Track, kv: KVView) -> int:
        limit = track.request.prompt_tokens + track.request.max_output_tokens
        return max(limit, kv.longest) if self.reserve == "longest" else limit

    def default_max_num_seqs(self) -> int | None:
        return None


def _forming(queues: Queues) -> bool:
    """Whether micro-batches may still join this round: nothing runs, or nothing has come back yet."""
    if not queues.num_running:
        return not queues.in_flight_batches
    parts = queues.parts
    return bool(parts) and all(isinstance(part, Cohort) and part.planned == 1 and part.in_flight for part in parts)


def _ready(queues: Queues, most: int) -> int:
    """Waiting requests, at most `most`, that belong to the round that is forming: those that had arrived when its
    first micro-batch was planned."""
    if not queues.num_running:
        return min(len(queues.waiting), most)
    formed_ns = min((track.admitted_ns for track in queues.running_tracks()), default=-1)
    return sum(track.request.arrival_ns <= formed_ns for track in islice(queues.waiting, most))
