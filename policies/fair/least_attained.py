"""Least attained service by program: short programs pass long ones, whatever the length of their next call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Promises, Served, StatefulPolicy, knob
from policies.contract.queues import Queues
from policies.fair.least_first import PER_TOKEN, LeastFirst
from policies.kv_memory.ledger import KVView
from policies.work.request import Ns
from policies.work.track import Track


class Attained(LeastFirst):
    """count: the level of every program; service: what it has had, in millionths of weighted tokens."""

    __slots__ = ("service",)

    def __init__(self) -> None:
        super().__init__()
        self.service: dict[str, int] = {}


@dataclass(frozen=True)
class LeastAttained(StatefulPolicy):
    """As chunked, but of the waiting calls the first of a program at the lowest level starts next. A program rises a
    level when what all its calls have had reaches `quantum`, twice that, four times that, ..."""

    chunk_size: int = knob(512, "tokens of one batch; decodes count one each, prompts get the rest", least=1)
    quantum: int = knob(4096, "weighted tokens of the lowest level", least=1, most=1_000_000_000)
    output_weight: float = knob(2.0, "what an output token counts, in prompt tokens", least=0, most=1e3)

    counts_by: ClassVar[str] = "program"
    decides_by: ClassVar[str] = "program"
    promises: ClassVar[Promises] = Promises(decodes=True, chunks=True, keeps_running=True)
    paper: ClassVar[str] = "PLAS of Autellix (arXiv 2502.13965), Sec. 4.2, without stopping those who run"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9, watermark=0.01)

    def new_state(self) -> Attained:
        return Attained()

    def queued(self, state: Attained, queues: Queues, track: Track) -> None:
        if track.request.program not in queues.waiting_of("program"):
            state.line_up(track.request.program)

    def hear(self, state: Attained, served: Mapping[str | None, Served]) -> None:
        price = round(PER_TOKEN * self.output_weight)
        for program, work in served.items():
            if program is not None:
                had = work.prompt_tokens * PER_TOKEN + work.output_tokens * price
                state.service[program] = state.service.get(program, 0) + had
                state.raise_to(program, (state.service[program] // (self.quantum * PER_TOKEN)).bit_length())

    def plan(  # type: ignore[override]
        self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns, state: Attained
    ) -> None:
        left = self.chunk_size - draft.decode_all()
        for prompt in queues.partial:
            if left > 0:
                left -= draft.chunk(prompt, left)
        waiting = queues.waiting_of("program")
        while left > 0 and waiting and not draft.preempted:
            head = waiting[state.least(waiting)][0]
            granted = draft.admit(head, left, reserve=head.known)
            if not granted:
                if len(waiting) > 1:
                    # What others are served meanwhile may change whose turn it is.
                    draft.only_for_now()
                break
            left -= granted
