"""Prefill first: whole waiting prompts run before any decode continues, as in vLLM before V1.

It fills the decode batch as fast as memory allows, and running decodes stall behind every prompt that comes: the
generation stall that chunked prefills remove.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Policy, Promises, knob
from policies.contract.queues import Queues
from policies.kv_memory.ledger import KVView
from policies.work.request import Ns


@dataclass(frozen=True)
class PrefillPriority(Policy):
    """Whole waiting prompts first, up to the token budget; only when none can start, every decode runs."""

    max_prompts: int = knob(0, "most prompts in one prefill batch; 0 for no limit but the token budget", least=0)

    promises: ClassVar[Promises] = Promises(decodes=True, keeps_running=True)
    paper: ClassVar[str] = "vLLM (SOSP 2023), Sec. 4.5, scheduler before V1"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9, watermark=0.01)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        prompts = 0
        while queues.waiting and not (self.max_prompts and prompts >= self.max_prompts):
            head = queues.waiting[0]
            whole = draft.to_prefill(head)
            if whole > draft.budget_left or not draft.admit(head, whole):
                break
            prompts += 1
        if not prompts:
            draft.decode_all()

    def default_token_budget(self, max_model_len: int) -> int | None:
        return max(2048, max_model_len)
