"""Shortest prompt first with ageing: the smallest example of a policy that does not serve in arrival order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Policy, Promises, knob
from policies.contract.queues import Queues
from policies.kv_memory.ledger import KVView
from policies.work.request import NS_PER_S, Ns
from policies.work.track import Track


@dataclass(frozen=True)
class ShortestPromptFirst(Policy):
    """As chunked, but of those that waited longest the one with the fewest prompt tokens starts next; every second of
    waiting counts like so many tokens less."""

    chunk_size: int = knob(512, "tokens of one batch; decodes count one each, prompts get the rest", least=1)
    ageing: float = knob(50.0, "tokens that a second of waiting is worth; 0 lets a long prompt starve", least=0)
    window: int = knob(128, "how many waiting requests are compared, from the head of the queue", least=1)

    promises: ClassVar[Promises] = Promises(decodes=True, chunks=True, keeps_running=True)
    paper: ClassVar[str] = "shortest job first over prompts, with linear ageing; batches as in Sarathi-Serve"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9, watermark=0.01)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        left = self.chunk_size - draft.decode_all()
        for prompt in queues.partial:
            if left > 0:
                left -= draft.chunk(prompt, left)
        while left > 0 and queues.waiting and not draft.preempted:
            shortest = min(islice(queues.waiting, self.window), key=self.rank)
            granted = draft.admit(shortest, left, reserve=shortest.known)
            if not granted:
                break
            left -= granted

    def rank(self, track: Track) -> tuple[float, int]:
        """Tokens less what waiting is worth. All age alike, so `now` falls out and the order never changes by itself:
        tokens - ageing (now - arrival) orders as tokens + ageing arrival does."""
        aged = self.ageing * track.request.arrival_ns / NS_PER_S
        return track.known + aged, track.request.id
