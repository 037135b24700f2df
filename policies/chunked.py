"""Stall-free chunked prefill: decodes never wait, prompts fill what the token budget leaves."""

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
class Chunked(Policy):
    """All decodes, then running partial prompts, then new ones, within the token budget; a prompt's KV is reserved
    on admission."""

    chunk_size: int = knob(512, "tokens of one batch; decodes count one each, prompts get the rest", least=1)

    promises: ClassVar[Promises] = Promises(decodes=True, chunks=True, micro_batches=True, keeps_running=True)
    paper: ClassVar[str] = "Sarathi-Serve (OSDI 2024), Algorithm 3"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9, watermark=0.01)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        left = self.chunk_size - draft.decode_all()
        for prompt in queues.partial:
            if left > 0:
                left -= draft.chunk(prompt, left)
        while left > 0 and queues.waiting and not draft.preempted:
            head = queues.waiting[0]
            granted = draft.admit(head, left, reserve=head.known)
            if not granted:
                break
            left -= granted
