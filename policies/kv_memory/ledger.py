"""The KV ledger: who holds how many blocks. Three implementations behind one interface, tested against each other.

`CountingLedger` keeps numbers and is what a simulation without prefix sharing needs. `ExtentLedger` (extent_ledger.py)
is the simulation's prefix cache. `BlockLedger` (block_ledger.py) hands out block ids, which an executor needs, with a
prefix cache or without. All grant or refuse identically.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Protocol

from policies.edges.errors import PolicyError
from policies.work.track import Track


class KVView(Protocol):
    """The ledger as a policy sees it.

    total_blocks, free_blocks: blocks of `block_size` tokens. slots: requests of the longest allowed length that fit
    at once, B = floor((M_G - M_S) / (L * m_kv)) (SARATHI, Sec. 4.3.1), at most as many as may run
    (`--max-num-seqs`). longest: that length L in tokens, 0 if unknown.
    """

    block_size: int
    total_blocks: int
    slots: int
    longest: int
    prefix_caching: bool
    by_id: bool

    @property
    def free_blocks(self) -> int: ...

    def blocks_for(self, tokens: int) -> int: ...

    def cached_tokens(self, track: Track) -> int:
        """Tokens that need no prefill: the longest prefix hit (whole blocks), or what was handed over if that is more;
        at most `track.known` - 1."""
        ...


class KVLedger:
    """What draft and scheduler ask of a ledger; policies see it as a `KVView`.

    A class and not a protocol, because compiled code then reads its numbers where they lie.
    """

    block_size: int
    total_blocks: int
    free_blocks: int
    slots: int
    longest: int
    prefix_caching: bool
    by_id: bool

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def cached_tokens(self, track: Track) -> int:
        """As `KVView` has it."""
        raise NotImplementedError

    def admission_blocks(self, track: Track, cached: int, tokens: int) -> int:
        """Free blocks used up if `track` held blocks for `tokens` tokens, `cached` of them being a prefix hit."""
        raise NotImplementedError

    def admit(self, track: Track, cached: int) -> None:
        """Give a waiting track the blocks of its prefix hit."""
        raise NotImplementedError

    def shared_blocks(self, track: Track, cached: int) -> int:
        """Blocks of those first `cached` tokens of a waiting track that are on the device already (a prefix hit)."""
        raise NotImplementedError

    def extend(self, track: Track, tokens: int) -> None:
        """Let a track that is in no cohort hold blocks for `tokens` tokens in all."""
        raise NotImplementedError

    def grow(self, tracks: Collection[Track]) -> None:
        """One more block for each of these cohort members."""
        raise NotImplementedError

    def take(self, blocks: int) -> None:
        """What many calls of `grow` would take, from a ledger that only counts."""
        raise NotImplementedError

    def computed(self, track: Track, tokens: int) -> None:
        """A batch now planned computes a prompt up to its first `tokens` tokens: their full blocks may be shared."""
        raise NotImplementedError

    def release(self, track: Track) -> None:
        """Take back everything from a track that is in no cohort; its context says how much of it is computed."""
        raise NotImplementedError

    def hold_nothing(self, track: Track, first: int, last: int, empty: set[int]) -> set[int]:
        """The batch that would have filled blocks [first, last) of a track's table is not planned after all: nobody
        finds them any more. Adds them to `empty`, as numbers that mean nothing outside of the ledger, and returns those
        that another request holds already."""
        raise NotImplementedError

    def holds_any(self, track: Track, blocks: set[int]) -> bool:
        """Whether a running track holds some of the blocks that `hold_nothing` named."""
        raise NotImplementedError

    def filled_blocks(self, track: Track, empty: set[int]) -> int:
        """Blocks of a running track that come before the first of those that `hold_nothing` named."""
        raise NotImplementedError

    def forget(self) -> None:
        """Forget what free blocks contain: the memory was lost."""
        raise NotImplementedError

    def take_new_blocks(self) -> list[tuple[int, int, int]]:
        """(request id, table index, block id) handed out since the last call; empty for a counting ledger."""
        raise NotImplementedError

    def table(self, track: Track) -> array[int]:
        """Block ids of a running track, in order."""
        raise NotImplementedError


class CountingLedger(KVLedger):
    """Counts blocks; no ids, no sharing. `slots` follows from the longest allowed request."""

    def __init__(self, total_blocks: int, block_size: int, longest: int = 0) -> None:
        if total_blocks < 1 or block_size < 1:
            raise PolicyError(f"KV pool: found {total_blocks} blocks of {block_size} tokens, expected at least 1 of 1")
        self.prefix_caching = False
        self.by_id = False
        self.block_size = block_size
        self.total_blocks = total_blocks
        self.free_blocks = total_blocks
        # A slot is never longer than the pool: what does not fit there never runs.
        self.longest = min(longest, total_blocks * block_size)
        self.slots = total_blocks // max(1, self.blocks_for(self.longest))

    def cached_tokens(self, track: Track) -> int:
        return track.computed

    def admission_blocks(self, track: Track, cached: int, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def admit(self, track: Track, cached: int) -> None:
        track.blocks = -(-cached // self.block_size)
        self.free_blocks -= track.blocks

    def shared_blocks(self, track: Track, cached: int) -> int:
        return 0

    def extend(self, track: Track, tokens: int) -> None:
        blocks = -(-tokens // self.block_size)
        if blocks > track.blocks:
            self.free_blocks -= blocks - track.blocks
            track.blocks = blocks

    def grow(self, tracks: Collection[Track]) -> None:
        self.free_blocks -= len(tracks)

    def take(self, blocks: int) -> None:
        self.free_blocks -= blocks

    def computed(self, track: Track, tokens: int) -> None:
        return

    def release(self, track: Track) -> None:
        self.free_blocks += track.blocks
        track.blocks = 0

    def hold_nothing(self, track: Track, first: int, last: int, empty: set[int]) -> set[int]:
        return set()

    def holds_any(self, track: Track, blocks: set[int]) -> bool:
        return False

    def filled_blocks(self, track: Track, empty: set[int]) -> int:
        return track.blocks

    def forget(self) -> None:
        return

    def take_new_blocks(self) -> list[tuple[int, int, int]]:
        return []

    def table(self, track: Track) -> array[int]:
        raise PolicyError("a counting ledger has no block tables: use the by-id ledger")
