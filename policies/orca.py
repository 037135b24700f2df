"""Iteration-level batching: requests join and leave between iterations, prompts whole, memory reserved in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Policy, Promises, knob
from policies.contract.queues import Queues
from policies.kv_memory.ledger import KVView
from policies.work.request import Ns
from policies.work.track import Track


@dataclass(frozen=True)
class Orca(Policy):
    """In arrival order, every running request's decode and then whole new prompts, in one mixed batch; KV memory for
    input and output is reserved on admission, so nobody is ever preempted."""

    max_batch_size: int = knob(0, "most requests in one batch; 0 for no limit but memory", least=0)
    reserve: str = knob(
        "limit",
        "KV reserved: for input + declared output limit, or for the longest allowed request (longest)",
        choices=("limit", "longest"),
    )

    max_prompts: int = knob(0, "most whole prompts in one batch; 0 for no limit, 1 is SARATHI's best case", least=0)

    promises: ClassVar[Promises] = Promises(decodes=True, keeps_running=True)
    paper: ClassVar[str] = "Orca (OSDI 2022), Algorithm 1"
    # The paper names no share; this is the rule of SARATHI's comparison with it.
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=1.0, headroom=0.2)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        most = self.max_batch_size or 1 << 60
        # No even shares in a pipeline: whatever is not in flight joins, up to the batch size.
        left = most - draft.decode_all(most)
        if self.max_prompts:
            left = min(left, self.max_prompts)
        while left > 0 and queues.waiting:
            head = queues.waiting[0]
            whole = draft.to_prefill(head)
            if whole > draft.budget_left or not draft.admit(head, whole, reserve=self.reserves(head, kv)):
                return
            left -= 1

    def reserves(self, track: Track, kv: KVView) -> int:
        limit = track.request.prompt_tokens + track.request.max_output_tokens
        return max(limit, kv.longest) if self.reserve == "longest" else limit

    def default_max_num_seqs(self) -> int | None:
        return None
