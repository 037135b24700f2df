"""vLLM's current scheduler, step-exact: no phases, every request just takes what it lacks from the token budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Policy, knob
from policies.contract.queues import Queues
from policies.kv_memory.ledger import KVView
from policies.work.cohort import Cohort
from policies.work.request import Ns
from policies.work.track import Track


@dataclass(frozen=True)
class VllmV1(Policy):
    """Running requests first, in admission order, each min(what it lacks, budget left); waiting ones only in a step
    that preempted nothing."""

    long_prefill_token_threshold: int = knob(
        0, "most tokens of one prompt in one step, 0 for no limit; ignored while only one request exists", least=0
    )
    reserve_full: bool = knob(True, "admit only if the whole prompt and output so far fit in the free blocks (0.19 on)")
    prefix_caching: bool = knob(False, "share full KV blocks of equal prefixes, also with one's own past self")
    free_order: str = knob(
        "0.32", "where freed blocks go: 0.19 all to the tail, 0.32 unhashed ones to the head", choices=("0.19", "0.32")
    )
    async_scheduling: bool = knob(False, "plan the next step before this one returns, as GPU vLLM does by default")
    scheduling: str = knob(
        "fcfs", "priority: the trace's lowest priority value first, its highest preempted", choices=("fcfs", "priority")
    )

    repeats: ClassVar[bool] = True
    keeps_running: ClassVar[bool] = True
    repeats_chunks: ClassVar[bool] = True
    repeats_in_pipelines: ClassVar[bool] = True
    paper: ClassVar[str] = "vLLM 0.19 to 0.32, v1/core/sched/scheduler.py"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        alone = queues.num_running + len(queues.waiting) == 1
        limit = self.long_prefill_token_threshold if self.long_prefill_token_threshold and not alone else 1 << 60
        by_priority = self.scheduling == "priority"
        for part in queues.running:
            while draft.budget_left and (part.size if isinstance(part, Cohort) else part.context):
                if draft.decode(part) if isinstance(part, Cohort) else draft.chunk(part, min(part.lacking, limit)):
                    break
                victim = max(queues.running_tracks(), key=_least_urgent, default=None) if by_priority else None
                # Who has to give way to itself ends the step's look at the running ones: nobody behind it is asked.
                if (by_priority and victim is None) or draft.preempt(victim) is None or victim is part:
                    return
        while queues.waiting and draft.budget_left and not draft.preempted:
            head = queues.most_urgent if by_priority else queues.waiting[0]
            if not draft.admit(head, min(head.known, limit), must_fit=head.known if self.reserve_full else 0):
                break

    def default_token_budget(self, max_model_len: int) -> int | None:
        return 2048


def _least_urgent(track: Track) -> tuple[int, Ns, int]:
    request = track.request
    return request.priority, request.arrival_ns, request.id
