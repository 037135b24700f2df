"""Preempted requests whose KV waits in host memory instead of being computed again.

A swapped request stands in the waiting queue like any other, but the first `computed` of its tokens need no prefill:
admitting it brings them back. So every policy can resume one without knowing that swapping exists. Host memory is
given out in pages of several blocks; when it is full, the request that was swapped out longest ago loses pages from
its end, and recomputes that part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Literal, NamedTuple

from policies.edges.errors import PolicyError
from policies.work.request import Ns
from policies.work.track import Track

if TYPE_CHECKING:
    from policies.kv_memory.ledger import KVLedger
    from policies.scheduling.lifecycle import Roster

Preemption = Literal["recompute", "swap", "auto"]
PREEMPTIONS: tuple[Preemption, ...] = ("recompute", "swap", "auto")

PAGE_BYTES = 16 * 2**20
"""Bytes of a page, the unit in which host memory is given out."""


class Move(NamedTuple):
    """KV of one request on its way between device and host, in whole blocks.

    blocks: device block ids, in the order of the request's table (none with a counting ledger). slots: where each of
    them lies in host memory, in blocks from its beginning.
    """

    request_id: int
    num_blocks: int
    blocks: Sequence[int]
    slots: Sequence[int]


class SwapCosts(NamedTuple):
    """What `auto` compares. move_ns: to move so many blocks one way; prefill_ns: to compute so many tokens."""

    move_ns: Callable[[int], Ns]
    prefill_ns: Callable[[int], Ns]


@dataclass(slots=True)
class Swapped:
    """One request's KV in host memory: its first `tokens` tokens, in `pages`."""

    track: Track
    tokens: int
    pages: list[int]


@dataclass(slots=True)
class SwapCounts:
    """What swapping did. blocks_out, blocks_in: moved. lost_pages: taken from swapped requests when memory was full."""

    by_swap: int = 0
    by_recompute: int = 0
    blocks_out: int = 0
    blocks_in: int = 0
    lost_pages: int = 0
    peak_pages: int = 0


@dataclass
class HostMemory:
    """How much host memory one engine may swap to. pages of `blocks_per_page` blocks each."""

    pages: int
    blocks_per_page: int

    @classmethod
    def of(cls, host_bytes: int, block_bytes: int, page_bytes: int = PAGE_BYTES) -> HostMemory:
        """The pages that fit into host_bytes; PolicyError for less than a block or a page."""
        per_page = page_bytes // block_bytes
        if per_page < 1:
            raise PolicyError(
                f"swap page: found {page_bytes} bytes, expected at least the {block_bytes} of one KV block"
            )
        pages = host_bytes // page_bytes
        if pages < 1:
            raise PolicyError(f"host memory: found {host_bytes} bytes, expected at least one page of {page_bytes}")
        return cls(pages, per_page)

    @property
    def blocks(self) -> int:
        return self.pages * self.blocks_per_page


@dataclass
class Swap:
    """The swapped requests of one scheduler, and the moves that its next batch has to make.

    how: the rule for victims whose policy names none: recompute, swap, or whichever is cheaper (auto, needs costs).
    `auto` never takes another request's pages.
    """

    memory: HostMemory
    how: Preemption = "auto"
    costs: SwapCosts | None = None
    held: OrderedDict[int, Swapped] = field(default_factory=OrderedDict)
    counts: SwapCounts = field(default_factory=SwapCounts)

    def __post_init__(self) -> None:
        if self.how not in PREEMPTIONS:
            raise PolicyError(f"preemption: found {self.how!r}, expected one of {', '.join(PREEMPTIONS)}")
        if self.how == "auto" and self.costs is None:
            raise PolicyError("preemption auto: found no costs to compare, expected those of moving and of prefilling")
        self._free = list(range(self.memory.pages - 1, -1, -1))
        self._out: list[Move] = []
        self._in: dict[int, Move] = {}
        self._first_order = 0

    @property
    def free_pages(self) -> int:
        return len(self._free)

    # Out

    def put_out(self, track: Track, scheduler: Roster, how: Preemption | None) -> int:
        """A running request is being preempted and still has its blocks: keep what is computed of it, or not.

        Returns the tokens that are kept in host memory: 0 to recompute them all.
        """
        request_id = track.request.id
        if request_id in self._in:
            # Brought back by this very plan: the copy has not been made, and host memory still has everything.
            move, tokens = self._in.pop(request_id), self.held[request_id].tokens
            self.counts.by_swap += 1
            there = (scheduler.ledger.blocks_for(tokens) - move.num_blocks) * scheduler.ledger.block_size
            track.own_context = min(track.own_context, there)
            return tokens
        # Who was admitted by this very plan has computed nothing yet, and what it found may be this plan's to compute.
        tokens = computed_tokens(track) if track.order < self._first_order else 0
        blocks = scheduler.ledger.blocks_for(tokens)
        if not self._worth_it(tokens, blocks, self.how if how is None else how):
            self.counts.by_recompute += 1
            return 0
        pages = self._take_pages(ceil(blocks / self.memory.blocks_per_page), scheduler)
        self.held[request_id] = Swapped(track, tokens, pages)
        table = scheduler.ledger.table(track)[:blocks] if scheduler.ledger.by_id else ()
        self._out.append(Move(request_id, blocks, table, self._slots(pages, 0, blocks)))
        counts = self.counts
        counts.by_swap += 1
        counts.blocks_out += blocks
        counts.peak_pages = max(counts.peak_pages, self.memory.pages - len(self._free))
        return tokens

    def _worth_it(self, tokens: int, blocks: int, how: Preemption) -> bool:
        if how == "recompute" or not blocks:
            return False
        pages = ceil(blocks / self.memory.blocks_per_page)
        if how == "swap":
            leaving = sum(len(self.held[request_id].pages) for request_id in self._in)
            return pages <= self.memory.pages - leaving
        assert self.costs is not None
        return pages <= len(self._free) and 2 * self.costs.move_ns(blocks) < self.costs.prefill_ns(tokens)

    def _take_pages(self, number: int, scheduler: Roster) -> list[int]:
        for victim in list(self.held.values()):
            if len(self._free) >= number:
                break
            if victim.track.request.id not in self._in:
                self._shorten(victim, number - len(self._free), scheduler)
        return [self._free.pop() for _ in range(number)]

    def _shorten(self, victim: Swapped, pages: int, scheduler: Roster) -> None:
        """Take up to so many pages from the end of a swapped request: it recomputes what lay there."""
        keep = max(0, len(victim.pages) - pages)
        lost = victim.pages[keep:]
        del victim.pages[keep:]
        self._free.extend(reversed(lost))
        self.counts.lost_pages += len(lost)
        left = min(victim.tokens, keep * self.memory.blocks_per_page * scheduler.ledger.block_size)
        scheduler.queues.prefill_tokens += victim.track.computed - left
        victim.track.computed = victim.tokens = left
        if not keep:
            del self.held[victim.track.request.id]
        # A copy out that this plan has not made yet need not be made in full.
        for at, move in enumerate(self._out):
            if move.request_id == victim.track.request.id:
                blocks = scheduler.ledger.blocks_for(left)
                self.counts.blocks_out -= move.num_blocks - blocks
                self._out[at] = Move(move.request_id, blocks, move.blocks[:blocks], move.slots[:blocks])

    def _slots(self, pages: list[int], first: int, last: int) -> list[int]:
        size = self.memory.blocks_per_page
        return [pages[index // size] * size + index % size for index in range(first, last)]

    # Back

    def bring_in(self, track: Track, scheduler: Roster, shared_blocks: int) -> None:
        """A swapped request was just admitted and has its blocks; the first `shared_blocks` hold its KV already."""
        swapped = self.held.get(track.request.id)
        if swapped is None:
            return
        blocks = scheduler.ledger.blocks_for(swapped.tokens)
        first = min(shared_blocks, blocks)
        table = scheduler.ledger.table(track)[first:blocks] if scheduler.ledger.by_id else ()
        slots = self._slots(swapped.pages, first, blocks)
        self._in[track.request.id] = Move(track.request.id, blocks - first, table, slots)

    def coming_in(self, track: Track, ledger: KVLedger) -> tuple[int, int]:
        """Which blocks [first, last) of its table the batch now planned would fill for a request from host memory."""
        move = self._in.get(track.request.id)
        if move is None:
            return 0, 0
        last = ledger.blocks_for(self.held[track.request.id].tokens)
        return last - move.num_blocks, last

    def take_moves(self, admissions: int) -> tuple[Sequence[Move], Sequence[Move]]:
        """The moves (out, back) that come before the batch now planned, in this order. admissions: so far, in all."""
        self._first_order = admissions
        if not self._out and not self._in:
            return (), ()
        out, back = [move for move in self._out if move.num_blocks], list(self._in.values())
        self._out, self._in = [], {}
        for move in back:
            # A later batch's copy out may use these pages: batches run in plan order.
            self._free.extend(reversed(self.held.pop(move.request_id).pages))
            self.counts.blocks_in += move.num_blocks
        return out, [move for move in back if move.num_blocks]

    def forget(self, request_id: int) -> None:
        """A request leaves for good, wherever its KV is."""
        swapped = self.held.pop(request_id, None)
        if swapped is not None:
            self._free.extend(reversed(swapped.pages))
        self._in.pop(request_id, None)
        self._out = [move for move in self._out if move.request_id != request_id]


def computed_tokens(track: Track) -> int:
    """Tokens of a running request whose KV is there once the batches planned before now have run."""
    if track.cohort is None:
        return min(track.own_context, track.own_known - 1)
    return track.request.prompt_tokens + track.delivered - 1
