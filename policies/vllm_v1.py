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

    repeats: ClassVar[bool] = True
    keeps_running: ClassVar[bool] = True
    repeats_chunks: ClassVar[bool] = True
    repeats_in_pipelines: ClassVar[bool] = True
    paper: ClassVar[str] = "vLLM 0.19 to 0.32, v1/core/sched/scheduler.py"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        alone = queues.num_running + len(queues.waiting) == 1
        limit = self.long_prefill_token_threshold if self.long_prefill_token_threshold and not alone else 1 << 60
        for part in queues.running:
            while draft.budget_left and (part.size if isinstance(part, Cohort) else part.context):
                if draft.decode(part) if isinstance(part, Cohort) else draft.chunk(part, min(part.lacking, limit)):
                    break
                if draft.preempt() is None:
                    return
        while queues.waiting and draft.budget_left and not draft.preempted:
            head = queues.waiting[0]
            if not draft.admit(head, min(head.known, limit), must_fit=head.known if self.reserve_full else 0):
                break

    def default_token_budget(self, max_model_len: int) -> int | None:
        return 2048
