"""First come first served by program: an agent's tenth call does not wait behind programs that began after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Promises, StatefulPolicy, knob
from policies.contract.queues import Queues
from policies.kv_memory.ledger import KVView
from policies.work.request import Ns
from policies.work.track import Track


@dataclass
class Begun:
    """When each program's first call came to this engine."""

    at_ns: dict[str, Ns] = field(default_factory=dict)

    def rank(self, track: Track) -> Ns:
        """The moment at which a request's program began; its own arrival where it has none."""
        program = track.request.program
        return track.request.arrival_ns if program is None else self.at_ns[program]


@dataclass(frozen=True)
class ProgramFcfs(StatefulPolicy):
    """As chunked, but of the waiting calls the one whose program began first starts next."""

    chunk_size: int = knob(512, "tokens of one batch; decodes count one each, prompts get the rest", least=1)

    counts_by: ClassVar[str] = "program"
    decides_by: ClassVar[str] = "program"
    promises: ClassVar[Promises] = Promises(decodes=True, chunks=True, keeps_running=True)
    paper: ClassVar[str] = "first come first served over programs, as in Autellix (arXiv 2502.13965), Sec. 4"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9, watermark=0.01)

    def new_state(self) -> Begun:
        return Begun()

    def queued(self, state: Begun, queues: Queues, track: Track) -> None:
        if track.request.program is not None:
            state.at_ns.setdefault(track.request.program, track.request.arrival_ns)

    def plan(  # type: ignore[override]
        self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns, state: Begun
    ) -> None:
        left = self.chunk_size - draft.decode_all()
        for prompt in queues.partial:
            if left > 0:
                left -= draft.chunk(prompt, left)
        while left > 0 and queues.waiting and not draft.preempted:
            first = queues.first_by(state.rank)
            granted = draft.admit(first, left, reserve=first.known)
            if not granted:
                break
            left -= granted
