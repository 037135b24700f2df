"""Deficit round robin over tokens: tenants take turns, each for a quantum of tokens by its weight."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Promises, Served, StatefulPolicy, knob
from policies.contract.queues import Queues
from policies.fair.least_first import PER_TOKEN, parse_weights
from policies.kv_memory.ledger import KVView
from policies.work.request import Ns
from policies.work.track import Track


@dataclass
class Ring:
    """Tenants with requests waiting, the one whose turn it is first, and what each may still take."""

    turns: deque[str | None] = field(default_factory=deque)
    deficit: dict[str | None, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightedFair(StatefulPolicy):
    """As chunked, but waiting tenants take turns. In its turn a tenant's requests start as long as its deficit is above
    0; prompts are charged when they start, output tokens as they are delivered. Then it is the next tenant's turn, and
    the quantum is added for its next one. Whoever has nothing waiting starts anew."""

    chunk_size: int = knob(512, "tokens of one batch; decodes count one each, prompts get the rest", least=1)
    quantum: int = knob(1024, "tokens of a turn, for a tenant of weight 1", least=1, most=1_000_000)
    output_weight: float = knob(2.0, "what an output token counts, in prompt tokens", least=0, most=1e3)
    weights: str = knob("", "shares of tenants, such as gold=2,free=0.5; 1 for whoever is not named")

    counts_by: ClassVar[str] = "tenant"
    decides_by: ClassVar[str] = "tenant"
    promises: ClassVar[Promises] = Promises(decodes=True, chunks=True, keeps_running=True)
    # Charged afterwards, as in surplus round robin, because answers have no known length.
    paper: ClassVar[str] = "deficit round robin (SIGCOMM 1995), surplus round robin (SIGCOMM 1996)"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9, watermark=0.01)

    def __post_init__(self) -> None:
        parse_weights(self.weights)

    def new_state(self) -> Ring:
        return Ring()

    def queued(self, state: Ring, queues: Queues, track: Track) -> None:
        tenant = track.request.tenant
        if tenant not in state.deficit:
            state.turns.append(tenant)
            state.deficit[tenant] = self._quantum(tenant)

    def hear(self, state: Ring, served: Mapping[str | None, Served]) -> None:
        price = round(PER_TOKEN * self.output_weight)
        for tenant, work in served.items():
            if tenant in state.deficit:
                state.deficit[tenant] -= work.output_tokens * price

    def plan(  # type: ignore[override]
        self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns, state: Ring
    ) -> None:
        left = self.chunk_size - draft.decode_all()
        for prompt in queues.partial:
            if left > 0:
                left -= draft.chunk(prompt, left)
        waiting = queues.waiting_of("tenant")
        if not waiting:
            state.turns.clear()
            state.deficit.clear()
        while left > 0 and waiting and not draft.preempted:
            tenant = self._whose_turn(state, waiting)
            head = waiting[tenant][0]
            granted = draft.admit(head, left, reserve=head.known)
            if not granted:
                draft.only_for_now()
                break
            left -= granted
            if not head.preemptions and not head.delivered:
                state.deficit[tenant] -= head.request.prompt_tokens * PER_TOKEN

    def _whose_turn(self, state: Ring, waiting: Mapping[str | None, deque[Track]]) -> str | None:
        while True:
            tenant = state.turns[0]
            if tenant not in waiting:
                del state.deficit[state.turns.popleft()]
            elif state.deficit[tenant] > 0:
                return tenant
            else:
                state.turns.rotate(-1)
                state.deficit[tenant] += self._quantum(tenant)

    def _quantum(self, tenant: str | None) -> int:
        return round(PER_TOKEN * self.quantum * parse_weights(self.weights).get(tenant, 1.0))
