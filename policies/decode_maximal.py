"""Decode-maximal batching: exactly one prefill chunk, filled up with decodes that ride along almost for free.

The chunk makes the batch compute-bound, so the decodes' weights are already paid for. KV memory is B slots of the
longest request; the chunk is C - (B - 1), so that chunk and decodes together are a whole number of GEMM tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.draft import Draft
from policies.host import Host
from policies.ledger import KVView
from policies.policy import MemoryRule, Policy, knob
from policies.queues import Queues
from policies.request import Ns
from policies.track import Track


def plan_decode_maximal(
    queues: Queues, draft: Draft, kv: KVView, host: Host, rows: int, align: str, *, slots: int
) -> None:
    """One decode-maximal batch of `rows` rows: up to `slots` decodes, and one chunk of rows - (slots - 1) tokens."""
    granted = 0
    for cohort in queues.cohorts:
        while cohort.size and granted < slots:
            decoded = draft.decode(cohort, slots - granted)
            granted += decoded
            if decoded:
                break
            if draft.preempt() is None:
                return
    if granted >= slots:
        return
    if rows < slots:
        # More decodes than the chunk size: the batch becomes the next whole number of tiles above them.
        rows = ((slots - 1) // host.tile + 1) * host.tile
    chunk = rows - (slots - 1)
    if _one_chunk(queues, draft, kv, chunk, granted, host.tile if align == "shrink" else 1) and align != "none":
        draft.pad(host.tile)


def _one_chunk(queues: Queues, draft: Draft, kv: KVView, chunk: int, decodes: int, tile: int) -> int:
    def fit(track: Track, done: int) -> int:
        tokens = min(chunk, track.known - done)
        aligned = (tokens + decodes) // tile * tile - decodes
        return aligned if aligned > 0 else tokens

    partial = queues.partial
    if partial:
        return draft.chunk(partial[0], fit(partial[0], partial[0].context))
    if not queues.waiting or draft.preempted:
        return 0
    head = queues.waiting[0]
    slot = max(kv.longest, head.request.prompt_tokens + head.request.max_output_tokens)
    return draft.admit(head, fit(head, kv.cached_tokens(head)), reserve=slot)


@dataclass(frozen=True)
class DecodeMaximal(Policy):
    """Exactly one prefill chunk of C - (B - 1) tokens a batch, filled up with decodes; B slots, tile-aligned."""

    chunk_size: int = knob(256, "C: rows of a batch, chunk and B - 1 decodes together", least=1)
    align: str = knob(
        "pad",
        "what fills the last tile: dummy tokens (pad), a smaller chunk where that is possible, else dummy tokens "
        "(shrink), or nothing (none)",
        choices=("shrink", "pad", "none"),
    )

    repeats: ClassVar[bool] = True
    paper: ClassVar[str] = "SARATHI (arXiv 2308.16369), Sec. 4.3 and 4.4"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=1.0, headroom=0.2)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        slots = max(1, kv.slots // host.micro_batches)
        plan_decode_maximal(queues, draft, kv, host, self.chunk_size, self.align, slots=slots)

    def default_max_num_seqs(self) -> int | None:
        return None
