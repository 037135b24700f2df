"""Decode-maximal batching whose chunk size follows the load: large chunks while prompts pile up, small ones while
mostly decodes are left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.decode_maximal import plan_decode_maximal
from policies.draft import Draft
from policies.host import Host
from policies.ledger import KVView
from policies.policy import MemoryRule, Policy, knob
from policies.queues import Queues
from policies.request import Ns


@dataclass(frozen=True)
class DynamicChunk(Policy):
    """Decode-maximal with C chosen by p, the prefill share of the tokens of work at hand."""

    prefill_heavy: float = knob(0.7, "above this p the large chunk size is used", least=0, most=1)
    decode_heavy: float = knob(0.3, "below this p the small chunk size is used", least=0, most=1)
    large: int = knob(256, "chunk size of a prefill-heavy load", least=1)
    middle: int = knob(192, "chunk size in between", least=1)
    small: int = knob(128, "chunk size of a decode-heavy load", least=1)
    align: str = knob("pad", "what fills the last tile, as in decode_maximal", choices=("shrink", "pad", "none"))

    repeats: ClassVar[bool] = True
    paper: ClassVar[str] = "SARATHI (arXiv 2308.16369), Sec. 4.4, made to follow the load"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=1.0, headroom=0.2)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        slots = max(1, kv.slots // host.micro_batches)
        plan_decode_maximal(queues, draft, kv, host, self.rows_for(queues), self.align, slots=slots)

    def rows_for(self, queues: Queues) -> int:
        """C for the work at hand: prompt tokens not yet prefilled against output tokens still promised."""
        prefill = queues.prefill_tokens
        work = prefill + queues.decode_tokens_promised
        share = prefill / work if work else 0.0
        if share > self.prefill_heavy:
            return self.large
        if share < self.decode_heavy:
            return self.small
        return self.middle

    def default_max_num_seqs(self) -> int | None:
        return None
