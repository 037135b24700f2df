"""Decode-maximal batching: exactly one prefill chunk, filled up with decodes that ride along almost for free.

The chunk makes the batch compute-bound, so the weights that the decodes need are already paid for. KV memory is B slots
of the longest request; the chunk is C - (B - 1), so that chunk and decodes together are a whole number of GEMM tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Policy, Promises, knob
from policies.contract.queues import Queues
from policies.kv_memory.ledger import KVView
from policies.work.request import Ns
from policies.work.track import Track

ALIGNMENTS = ("shrink", "pad", "none")


@dataclass(frozen=True)
class DecodeMaximal(Policy):
    """Exactly one prefill chunk of C - (B - 1) tokens a batch, filled up with decodes; B slots, tile-aligned."""

    chunk_size: int = knob(256, "C: rows of a batch, chunk and B - 1 decodes together", least=1)
    align: str = knob(
        "pad",
        "what fills the last tile: dummy tokens (pad), a smaller chunk where that is possible, else dummy tokens "
        "(shrink), or nothing (none)",
        choices=ALIGNMENTS,
    )

    promises: ClassVar[Promises] = Promises(decodes=True, chunks=True, keeps_running=True)
    paper: ClassVar[str] = "SARATHI (arXiv 2308.16369), Sec. 4.3 and 4.4"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=1.0, headroom=0.2)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        if decode_beside_a_prompt(queues, draft, kv, host):
            prefill_beside_decodes(queues, draft, kv, host, self.chunk_size, self.align)

    def reserves(self, track: Track, kv: KVView) -> int:
        return slot_tokens(track, kv)

    def default_max_num_seqs(self) -> int | None:
        return None


def slots_of_batch(kv: KVView, host: Host) -> int:
    """B: requests of the longest length that fit in memory at once, per micro-batch in a pipeline."""
    return max(1, kv.slots // host.micro_batches)


def rows_of_slots(kv: KVView, host: Host) -> int:
    """Rows of a batch that B - 1 decodes and one more row take: B, or with speculation as many as their drafts need."""
    width = 1 if host.speculation is None else 1 + host.speculation.tokens
    return (slots_of_batch(kv, host) - 1) * width + 1


def slot_tokens(track: Track, kv: KVView) -> int:
    """KV tokens of one slot: the longest allowed request, whatever this one needs."""
    return max(kv.longest, track.request.prompt_tokens + track.request.max_output_tokens)


def decode_beside_a_prompt(queues: Queues, draft: Draft, kv: KVView, host: Host) -> Track | None:
    """Grant the decodes of a decode-maximal batch and return the prompt that it carries: B - 1 decodes beside a half
    done prompt or a new one that finds a free slot, B without."""
    slots = slots_of_batch(kv, host)
    prompt = next(chain(queues.partial, queues.waiting), None)
    if prompt is not None and prompt.order < 0:
        # What was handed over with it is there already.
        needed = kv.blocks_for(slot_tokens(prompt, kv)) - prompt.blocks
        prompt = prompt if needed <= kv.free_blocks else None
    draft.decode_all(slots if prompt is None else slots - 1)
    return None if draft.preempted else prompt


def chunk_beside_decodes(rows: int, slots: int, decodes: int, tile: int) -> int:
    """Prefill tokens of a batch of `rows` rows (C): C - (B - 1), however many of the B - 1 decodes there are.

    With B > C that would be nothing. The paper leaves it open; here the batch then has C rows or, with at least C
    decodes, the next whole number of tiles above them, and the chunk is whatever the decodes leave of that.
    """
    if rows >= slots:
        return rows - (slots - 1)
    if decodes < rows:
        return rows - decodes
    return (decodes // tile + 1) * tile - decodes


def prefill_beside_decodes(
    queues: Queues, draft: Draft, kv: KVView, host: Host, rows: int, align: str, *, merge: bool = False
) -> None:
    """Put the chunk of a batch of `rows` rows (C) beside the decodes granted so far, and align the batch to tiles.

    merge: what one prompt leaves of the chunk is given to the next ones; else the chunk is of one prompt.
    """
    tile = host.tile
    decode_rows = draft.decodes + draft.draft_tokens
    left = chunk_beside_decodes(rows, rows_of_slots(kv, host), decode_rows, tile)
    shares = _shares(queues, draft, kv, left, merge)
    if align == "shrink" and shares:
        prompt, tokens = shares[-1]
        before = decode_rows + sum([share for _, share in shares[:-1]])
        whole_tiles = (before + tokens) // tile * tile - before
        if whole_tiles > 0:
            shares[-1] = prompt, whole_tiles
    for prompt, tokens in shares:
        if prompt.order >= 0:
            granted = draft.chunk(prompt, tokens)
        else:
            granted = draft.admit(prompt, tokens, reserve=slot_tokens(prompt, kv))
        if not granted:
            break
    if draft.chunks and align != "none":
        draft.pad(tile)


def _shares(queues: Queues, draft: Draft, kv: KVView, left: int, merge: bool) -> list[tuple[Track, int]]:
    """How the chunk is dealt out: in the order of the prompts, until it is used up or the next one finds no slot."""
    shares: list[tuple[Track, int]] = []
    free = kv.free_blocks
    for prompt in chain(queues.partial, queues.waiting):
        if prompt.order >= 0:
            lacking = prompt.lacking
        else:
            free -= kv.blocks_for(slot_tokens(prompt, kv)) - prompt.blocks
            if free < 0:
                break
            lacking = draft.to_prefill(prompt)
        shares.append((prompt, min(left, lacking)))
        left -= lacking
        if left <= 0 or not merge:
            break
    return shares
