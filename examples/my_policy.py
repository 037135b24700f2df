"""A policy of one's own, complete: prompts gather until a batch of them is worth it, decodes run meanwhile.

python -m simulator replay examples/trace.csv --policy examples/my_policy.py:GatheredPrefills --enough 4096
"""

from dataclasses import dataclass
from typing import ClassVar

from policies import NS_PER_S, Draft, Host, KVView, MemoryRule, Ns, Policy, Promises, Queues, knob


@dataclass(frozen=True)
class GatheredPrefills(Policy):
    """Prompts are prefilled together once `enough` of their tokens wait, or the oldest has waited `patience_s`; all
    other batches decode."""

    enough: int = knob(2048, "waiting prompt tokens that are worth a prefill batch", least=1)
    patience_s: float = knob(0.5, "longest wait of the oldest prompt, seconds", least=0)

    # With only decodes to run it would plan the same again; while prompts gather, the alarm set below says when not.
    promises: ClassVar[Promises] = Promises(decodes=True)
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9, watermark=0.01)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        for prompt in queues.partial:
            draft.chunk(prompt, prompt.lacking)
        if queues.waiting:
            patience_ends_ns = queues.waiting[0].request.arrival_ns + round(self.patience_s * NS_PER_S)
            if queues.prefill_tokens < self.enough and now_ns < patience_ends_ns:
                draft.wait_until(patience_ends_ns)
            else:
                while queues.waiting and draft.admit(queues.waiting[0], queues.waiting[0].known):
                    pass
        if not draft.tokens:
            draft.decode_all()

    def default_token_budget(self, max_model_len: int) -> int | None:
        return 8192
