"""Shortest job first by predicted answer lengths, with ageing: as good as the predictions are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Policy, Promises, knob
from policies.contract.queues import Queues
from policies.kv_memory.ledger import KVView
from policies.work.request import NS_PER_S, Ns
from policies.work.track import Track


@dataclass(frozen=True)
class PredictedSjf(Policy):
    """As chunked, but the waiting request with the least predicted work starts next: its prompt, and the output tokens
    that the trace's prediction (without one, its declared limit) leaves; every second of waiting counts like so many
    tokens less."""

    chunk_size: int = knob(512, "tokens of one batch; decodes count one each, prompts get the rest", least=1)
    output_weight: float = knob(2.0, "what an output token counts, in prompt tokens", least=0, most=1e3)
    ageing: float = knob(50.0, "tokens that a second of waiting is worth; 0 lets a long job starve", least=0)

    decides_by: ClassVar[str] = "predicted_tokens"
    promises: ClassVar[Promises] = Promises(decodes=True, chunks=True, keeps_running=True)
    paper: ClassVar[str] = (
        "shortest job first by predicted lengths (S3, NeurIPS 2023; Qiu et al., arXiv 2404.08509), linear ageing"
    )
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9, watermark=0.01)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        left = self.chunk_size - draft.decode_all()
        for prompt in queues.partial:
            if left > 0:
                left -= draft.chunk(prompt, left)
        while left > 0 and queues.waiting and not draft.preempted:
            shortest = queues.first_by(self.rank)
            granted = draft.admit(shortest, left, reserve=shortest.known)
            if not granted:
                break
            left -= granted

    def rank(self, track: Track) -> float:
        """Work left less what waiting is worth. All age alike, so that `now` falls out and the order stands still."""
        request = track.request
        predicted = request.predicted_tokens or request.max_output_tokens
        left = max(1, min(predicted, request.max_output_tokens) - track.delivered)
        return track.known + self.output_weight * left + self.ageing * request.arrival_ns / NS_PER_S
