"""What one iteration runs: the batch that a scheduler plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from policies.edges.compiling import mypyc_attr
from policies.work.batch_parts import BatchShape, Chunk, Decodes, Verified
from policies.work.request import Ns

if TYPE_CHECKING:
    from policies.kv_memory.swap import Move
    from policies.work.track import Track

NEVER = -1
NOTHING: Final[Mapping[int, int]] = {}

__all__ = ["Batch", "BatchShape", "Chunk", "Decodes", "Verified"]


def drafts_of(batch: Batch) -> list[tuple[int, int, int, int]]:
    """(request, drafts verified, accepted, tokens delivered) of the speculating decodes of a completed batch; those who
    had gone by then, and placeholders, which are no drafts, left out."""
    accepted = batch.accepted
    return [
        (part[1].request.id, part[2] - 1, accepted.get(part[1].request.id, 0), tokens)
        for part, (_, tokens) in zip(batch.verified, batch.delivered)
        if tokens and not part[4]
    ]


@mypyc_attr(acyclic=True)
class Batch:
    """A planned iteration. It is in flight from `Scheduler.plan` to `Scheduler.complete`.

    It is made from the draft that a policy wrote on (`policies.contract.draft.Draft`).

    parts keep batch order; chunks are those of them that prefill. joins: (track, its admission epoch) for every chunk
    that samples a token. grown: the Decodes of every cohort whose token times this batch extends; a cohort that begins
    with this batch stands there with size 0.
    repeats_at: the state of the queues (`Queues.changes`) in which it may be planned again without asking the policy.
    new_blocks: (request id, table index, block id) of blocks given out for this batch, by the by-id ledger alone.
    verified: the speculating decodes among the parts, in batch order. What becomes of them the world says before the
        batch is completed. accepted: drafts accepted, by request id, none where it is silent; proposed: drafts made
        afterwards for whoever sampled, by request id. delivered: (first step, tokens) of each once it is completed; no
        tokens for who had gone by then.
    swap_out, swap_in: KV to be moved to host memory and back before it runs, in this order.
    """

    __slots__ = (
        "accepted",
        "cached_tokens",
        "chunks",
        "delivered",
        "grown",
        "joins",
        "new_blocks",
        "number",
        "parts",
        "planned_ns",
        "preempted",
        "proposed",
        "repeats_at",
        "shape",
        "swap_in",
        "swap_out",
        "verified",
    )

    def __init__(
        self,
        number: int,
        planned_ns: Ns,
        parts: list[Chunk | Decodes | Verified],
        chunks: list[Chunk],
        grown: list[Decodes],
        joins: list[tuple[Track, int]],
        preempted: list[Track],
        cached_tokens: int,
        shape: BatchShape,
    ) -> None:
        self.number = number
        self.planned_ns = planned_ns
        self.parts = parts
        self.chunks = chunks
        self.grown = grown
        self.joins = joins
        self.preempted = preempted
        self.cached_tokens = cached_tokens
        self.shape = shape
        self.repeats_at = NEVER
        self.verified: Sequence[Verified] = ()
        self.delivered: list[tuple[int, int]] = []
        self.accepted = self.proposed = NOTHING
        self.new_blocks: Sequence[tuple[int, int, int]] = ()
        self.swap_out: Sequence[Move] = ()
        self.swap_in: Sequence[Move] = ()
