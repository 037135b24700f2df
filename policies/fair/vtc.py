"""Virtual token counters: the tenant that has been served least comes next, and idling earns no credit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Promises, Served, StatefulPolicy, knob
from policies.contract.queues import Queues
from policies.fair.least_first import LeastFirst, parse_weights, prices
from policies.kv_memory.ledger import KVView
from policies.work.request import Ns
from policies.work.track import Track


class Counters(LeastFirst):
    """The counter of every tenant. last: whoever left the queue last."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        super().__init__()
        self.last: str | None = None


@dataclass(frozen=True)
class Vtc(StatefulPolicy):
    """As chunked, but the earliest request of the tenant with the lowest counter starts next. A counter grows by the
    prompt when a request is admitted and by every output token; a tenant that comes back is lifted to the lowest of
    those who wait. Tenants with requests waiting get service that differs by at most 2 max(input_weight longest prompt,
    output_weight KV pool in tokens)."""

    chunk_size: int = knob(512, "tokens of one batch; decodes count one each, prompts get the rest", least=1)
    input_weight: float = knob(1.0, "what a prompt token counts", least=0, most=1e3)
    output_weight: float = knob(2.0, "what an output token counts", least=0, most=1e3)
    weights: str = knob("", "shares of tenants, such as gold=2,free=0.5; 1 for whoever is not named")

    counts_by: ClassVar[str] = "tenant"
    decides_by: ClassVar[str] = "tenant"
    promises: ClassVar[Promises] = Promises(decodes=True, chunks=True, keeps_running=True)
    paper: ClassVar[str] = "VTC (Sheng et al., OSDI 2024), Algorithms 2 and 3 (weights), over chunked prefills"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9, watermark=0.01)

    def __post_init__(self) -> None:
        parse_weights(self.weights)

    def new_state(self) -> Counters:
        return Counters()

    def queued(self, state: Counters, queues: Queues, track: Track) -> None:
        tenant, waiting = track.request.tenant, queues.waiting_of("tenant")
        if tenant not in waiting:
            state.raise_to(tenant, state.count.get(state.least(waiting) if waiting else state.last, 0))
            state.line_up(tenant)

    def hear(self, state: Counters, served: Mapping[str | None, Served]) -> None:
        for tenant, work in served.items():
            state.add(tenant, work.output_tokens * self._prices(tenant)[1])

    def plan(  # type: ignore[override]
        self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns, state: Counters
    ) -> None:
        left = self.chunk_size - draft.decode_all()
        for prompt in queues.partial:
            if left > 0:
                left -= draft.chunk(prompt, left)
        waiting = queues.waiting_of("tenant")
        while left > 0 and waiting and not draft.preempted:
            tenant = state.least(waiting)
            head = waiting[tenant][0]
            granted = draft.admit(head, left, reserve=head.known)
            if not granted:
                if len(waiting) > 1:
                    # What others are served meanwhile may change whose turn it is.
                    draft.only_for_now()
                break
            left -= granted
            if not head.preemptions and not head.delivered:
                state.add(tenant, head.request.prompt_tokens * self._prices(tenant)[0])
            if tenant not in waiting:
                state.last = tenant

    def _prices(self, tenant: str | None) -> tuple[int, int]:
        return prices(self.weights, tenant, self.input_weight, self.output_weight)
