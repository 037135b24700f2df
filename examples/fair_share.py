"""A policy that remembers, complete: the SLO class that has been served least comes first.

python -m simulator replay examples/trace.csv --policy examples/fair_share.py:FairShare --chunk-size 512
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

from policies import Draft, Host, KVView, MemoryRule, Ns, Promises, Queues, Served, StatefulPolicy, knob


@dataclass
class Tokens:
    """What every class has had so far, in weighted tokens."""

    by_class: dict[str | None, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FairShare(StatefulPolicy):
    """As `chunked`, but of the waiting requests the first of the class with the fewest weighted tokens starts next."""

    chunk_size: int = knob(512, "tokens of one batch; decodes count one each, prompts get the rest", least=1)
    output_weight: float = knob(2.0, "what an output token counts, in prompt tokens", least=0)
    window: int = knob(64, "requests of the queue that are looked at", least=1)

    counts_by: ClassVar[str] = "slo"
    # Plans repeat where nobody waits. Where somebody waits in vain, the order may change with what others are served.
    promises: ClassVar[Promises] = Promises(decodes=True, keeps_running=True)
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9, watermark=0.01)

    def new_state(self) -> Tokens:
        return Tokens()

    def hear(self, state: Tokens, served: Mapping[str | None, Served]) -> None:
        for name, work in served.items():
            weighted = work.prompt_tokens + self.output_weight * work.output_tokens
            state.by_class[name] = state.by_class.get(name, 0.0) + weighted

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns, state: Tokens) -> None:
        left = self.chunk_size - draft.decode_all()
        for prompt in queues.partial:
            if left > 0:
                left -= draft.chunk(prompt, left)
        while left > 0 and queues.waiting and not draft.preempted:
            waiting = islice(queues.waiting, self.window)
            least = min(waiting, key=lambda track: state.by_class.get(track.request.slo, 0.0))
            granted = draft.admit(least, left, reserve=least.known)
            if not granted:
                draft.only_for_now()
                break
            left -= granted
