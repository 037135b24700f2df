"""The KV ledger by block id, with an optional prefix cache.

Free blocks stand in one queue. Blocks are taken from its head; a freed block that still carries a hash (its contents
can be found again) goes to the tail, so that the least recently used one is overwritten first. Where freed blocks
*without* a hash go is a knob, because vLLM changed it: 0.19 put every freed block at the tail, 0.32 puts unhashed ones
at the head, where they are reused before anything worth keeping (vLLM, v1/core/kv_cache_utils.py and block_pool.py).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import Literal

from policies.edges.errors import PolicyError
from policies.kv_memory.block_names import BlockNames, TraceNames
from policies.kv_memory.ledger import KVLedger
from policies.work.track import Track

FreeOrder = Literal["0.19", "0.32"]


class BlockLedger(KVLedger):
    """Hands out block ids 1..total_blocks (0 is the null block and never handed out).

    total_blocks: usable blocks, the null block not counted.
    prefix_caching: full blocks get a hash when the batch that fills them is planned and can be found by later requests
        with the same prefix, by a later turn of the same session, or by their own request after a preemption.
    drops_last_hit: the last block of every prefix hit is computed again.
    names: what tells equal contents (see `policies.kv_memory.block_names`); a trace's hashes and sessions by default.
    """

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        longest: int = 0,
        *,
        prefix_caching: bool = False,
        free_order: FreeOrder = "0.32",
        names: BlockNames | None = None,
        drops_last_hit: bool = False,
    ) -> None:
        if total_blocks < 1 or block_size < 1:
            raise PolicyError(f"KV pool: found {total_blocks} blocks of {block_size} tokens, expected at least 1 of 1")
        if free_order not in ("0.19", "0.32"):
            raise PolicyError(f"free order: found {free_order!r}, expected '0.19' or '0.32'")
        self.by_id = True
        self.block_size = block_size
        self.total_blocks = self.free_blocks = total_blocks
        self.prefix_caching = prefix_caching
        self.free_order = free_order
        # A slot is never longer than the pool: what does not fit there never runs.
        self.longest = min(longest, total_blocks * block_size)
        self.slots = total_blocks // max(1, self.blocks_for(self.longest))
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, total_blocks + 1))
        self._drops_last_hit = drops_last_hit
        self._users = [0] * (total_blocks + 1)
        self._hash_of: dict[int, Hashable] = {}
        # A hash may name several blocks: two requests can compute the same prefix side by side.
        self._blocks_of: dict[Hashable, dict[int, None]] = {}
        self._new_blocks: list[tuple[int, int, int]] = []
        self._names: BlockNames = TraceNames() if names is None else names
        # The last look-up, kept up to date, because a queue's head asks again in every plan: whose it is, the blocks
        # found and their places, how many of them are in use, and the first that was not there by its own name.
        self._looked: tuple[Track | None, int] = (None, 0)
        self._found: list[int] = []
        self._place: dict[int, int] = {}
        self._found_in_use = 0
        self._first_missed = -1
        self._missed_name: Hashable = None

    def cached_tokens(self, track: Track) -> int:
        hits = len(self._hits(track))
        if hits and self._drops_last_hit:
            hits -= 1
        return max(hits * self.block_size, track.computed)

    def admission_blocks(self, track: Track, cached: int, tokens: int) -> int:
        hits = self._hits(track)
        if len(hits) == cached // self.block_size:
            in_use = self._found_in_use if hits else 0
        else:
            users = self._users
            in_use = sum(1 for block in hits[: cached // self.block_size] if users[block])
        return max(0, self.blocks_for(tokens) - in_use)

    def admit(self, track: Track, cached: int) -> None:
        hits = self._hits(track)[: cached // self.block_size]
        for index, block in enumerate(hits):
            if not self._users[block]:
                del self._free[block]
                self.free_blocks -= 1
                if block in self._place:
                    self._found_in_use += 1
            self._users[block] += 1
            name = self._names.name(track, index, self.block_size)
            if self._hash_of[block] != name:
                # An earlier turn's answer is now part of a prompt, and known by that prompt's name from here on.
                self._unname(block)
                self._give_name(block, name)
        track.table = array("i", hits)
        track.blocks = len(hits)
        self.extend(track, cached)

    def extend(self, track: Track, tokens: int) -> None:
        table = track.table
        assert table is not None
        while len(table) * self.block_size < tokens:
            self._append(track, table)
        track.blocks = len(table)

    def grow(self, tracks: Collection[Track]) -> None:
        for track in sorted(tracks, key=lambda track: track.order):
            table = track.table
            assert table is not None
            self._append(track, table)

    def take(self, blocks: int) -> None:
        raise PolicyError("a ledger by block id gives blocks to requests, one by one")

    def computed(self, track: Track, tokens: int) -> None:
        if self.prefix_caching:
            self._name_full_blocks(track, tokens)

    def release(self, track: Track) -> None:
        table = track.table
        assert table is not None
        if self.prefix_caching:
            # Decoded blocks get their names here, not step by step: nobody else could have asked for them earlier.
            self._name_full_blocks(track, min(track.own_context, track.own_known - 1))
        to_head = []
        for block in reversed(table):
            self._users[block] -= 1
            if self._users[block]:
                continue
            self.free_blocks += 1
            if block in self._place:
                self._found_in_use -= 1
            if block in self._hash_of or self.free_order == "0.19":
                self._free[block] = None
            else:
                to_head.append(block)
        for block in reversed(to_head):
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        track.table = None
        track.blocks = 0

    def hold_nothing(self, track: Track, first: int, last: int, empty: set[int]) -> set[int]:
        blocks = self.table(track)[first:last]
        for block in blocks:
            if block in self._hash_of:
                self._unname(block)
        empty.update(blocks)
        return {block for block in blocks if self._users[block] > 1}

    def holds_any(self, track: Track, blocks: set[int]) -> bool:
        return not blocks.isdisjoint(self.table(track))

    def filled_blocks(self, track: Track, empty: set[int]) -> int:
        table = self.table(track)
        return next((at for at, block in enumerate(table) if block in empty), len(table))

    def forget(self) -> None:
        self._hash_of.clear()
        self._blocks_of.clear()
        self._new_blocks.clear()
        self._look_anew(None, 0)

    def next_overwritten(self) -> list[Hashable]:
        """Names of the free blocks in the order in which they will be given out; None for those without a name."""
        return [self._hash_of.get(block) for block in self._free]

    def take_new_blocks(self) -> list[tuple[int, int, int]]:
        new, self._new_blocks = self._new_blocks, []
        return new

    def table(self, track: Track) -> array[int]:
        if track.table is None:
            raise PolicyError(f"request {track.request.id} holds no blocks: it is {track.status}")
        return track.table

    def _append(self, track: Track, table: array[int]) -> None:
        block, _ = self._free.popitem(last=False)
        self.free_blocks -= 1
        if block in self._hash_of:
            self._unname(block)
        self._users[block] = 1
        self._new_blocks.append((track.request.id, len(table), block))
        table.append(block)

    def shared_blocks(self, track: Track, cached: int) -> int:
        return len(self._hits(track)[: cached // self.block_size])

    # Names of block contents

    def _give_name(self, block: int, name: Hashable) -> None:
        self._hash_of[block] = name
        self._blocks_of.setdefault(name, {})[block] = None
        if self._first_missed >= 0 and name == self._missed_name:
            self._find_again_from(self._first_missed)

    def _unname(self, block: int) -> None:
        name = self._hash_of.pop(block)
        blocks = self._blocks_of[name]
        del blocks[block]
        if not blocks:
            del self._blocks_of[name]
        if block in self._place:
            self._find_again_from(self._place[block])

    def _name_full_blocks(self, track: Track, tokens: int) -> None:
        table = track.table
        assert table is not None
        size = self.block_size
        for index in range(min(tokens // size, len(table)) - 1, -1, -1):
            block = table[index]
            if block in self._hash_of:
                return
            self._give_name(block, self._names.name(track, index, size))

    def _hits(self, track: Track) -> list[int]:
        if not self.prefix_caching:
            return []
        if self._looked != (track, track.own_known):
            self._look_anew(track, track.own_known)
        size, names, blocks_of, hits = self.block_size, self._names, self._blocks_of, self._found
        for index in range(len(hits), (track.own_known - 1) // size):
            blocks: dict[int, None] | None = None
            if self._first_missed < 0:
                name = names.name(track, index, size)
                blocks = blocks_of.get(name)
                if not blocks:
                    self._first_missed, self._missed_name = index, name
            if not blocks:
                earlier = names.history(track, index, size, self._first_missed)
                blocks = blocks_of.get(earlier) if earlier is not None else None
                if not blocks:
                    break
            block = next(iter(blocks))
            self._place[block] = index
            hits.append(block)
            if self._users[block]:
                self._found_in_use += 1
        return hits

    def _look_anew(self, track: Track | None, known: int) -> None:
        self._looked = (track, known)
        self._found, self._place = [], {}
        self._found_in_use = 0
        self._first_missed, self._missed_name = -1, None

    def _find_again_from(self, index: int) -> None:
        """What was found from here on may be found no more, or by another name."""
        users, place = self._users, self._place
        for block in self._found[index:]:
            del place[block]
            if users[block]:
                self._found_in_use -= 1
        del self._found[index:]
        if index <= self._first_missed:
            self._first_missed, self._missed_name = -1, None
