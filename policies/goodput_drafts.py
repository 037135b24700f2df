"""Chunked prefill whose number of drafts follows the load: as many as make the most tokens per second.

Few requests leave the device idle, so verifying many drafts is nearly free; at many requests every draft takes a row
from somebody else. The policy knows both sides: what drafts were accepted so far, and what a batch takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.chunked import Chunked
from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import Promises, knob
from policies.contract.queues import Queues
from policies.kv_memory.ledger import KVView
from policies.work.batch import BatchShape
from policies.work.request import Ns
from policies.work.track import Track


@dataclass(frozen=True)
class GoodputDrafts(Chunked):
    """As chunked; after each batch so many tokens are drafted, up to the engine's k, as give the largest goodput:
    expected tokens of the running requests over the estimated time of the batch that verifies the drafts."""

    expected: float = knob(0.6, "acceptance of a draft that is counted on before any was verified", least=0, most=1)
    weight: float = knob(4.0, "drafts that this expectation counts for", least=0)

    promises: ClassVar[Promises] = Promises(chunks=True, decodes=True, keeps_running=True, micro_batches=True)
    paper: ClassVar[str] = "SmartSpec (Liu et al., arXiv 2406.14066), goodput"

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        Chunked.plan(self, queues, draft, kv, host, now_ns)
        if host.speculation is None or host.estimator is None:
            return
        decoding = [part.track for part in draft.verified]
        if decoding:
            draft.propose(self.drafts_worth(decoding, host))

    def drafts_worth(self, decoding: list[Track], host: Host) -> int:
        """The number of drafts with the largest goodput for these requests' next tokens."""
        assert host.speculation is not None
        acceptance = self.acceptance_of(decoding)
        count, contexts = len(decoding), [track.known for track in decoding]
        total, largest = sum(contexts), max(contexts)
        best, most = 0, 0.0
        for drafts in range(host.speculation.tokens + 1):
            rows = count * (1 + drafts)
            shape = BatchShape((), count, total, largest, 0, rows, 0, count * drafts, total * drafts, drafts)
            goodput = expected_tokens(acceptance, drafts) / host.estimate_ns(shape)
            if goodput > most:
                best, most = drafts, goodput
        return best

    def acceptance_of(self, decoding: list[Track]) -> float:
        """Chance that a draft is accepted where those before it were, from what these requests have seen: every step
        ends with a rejection or with all of its drafts accepted."""
        accepted = self.expected * self.weight + sum([track.drafts_accepted for track in decoding])
        tried = self.weight + sum([track.drafts_accepted + track.rejections for track in decoding])
        return accepted / tried if tried else self.expected


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens that a step with so many drafts delivers on average (Leviathan et al., ICML 2023, Eq. 1)."""
    if acceptance >= 1:
        return drafts + 1.0
    return float((1 - acceptance ** (drafts + 1)) / (1 - acceptance))
