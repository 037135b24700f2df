"""The prefix cache of a simulation: blocks that belong together are kept together, as extents.

It decides what `BlockLedger` with a prefix cache decides, block by block (hits, refusals, what is overwritten next),
but hands out no ids. An extent is a run of consecutive blocks of one text whose names share a key: the blocks under one
hash of a trace, or one answer. All of its blocks have the same users, so one count serves them; where somebody wants a
part, it is split. Work and memory go with the extents touched and not with blocks: 32 times fewer for Mooncake's hashes
of 512 tokens. Without ids it is the same which free block a request gets, so decodes take theirs by number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable

from policies.edges.errors import PolicyError
from policies.kv_memory.block_ledger import FreeOrder
from policies.kv_memory.block_names import TraceNames
from policies.kv_memory.ledger import KVLedger
from policies.work.track import Track


class Extent:
    """Blocks [start, end) of a text: their places in the tables of whoever holds them.

    key: what their names have in common (see `TraceNames.run`); None for blocks without a name. users: requests that
    hold them, each of them all of them. before, after: neighbours in the queue of free extents, nearest to its head
    first. An extent gives its blocks away from its end: that is the order in which a request frees them.
    rest: whatever was split from its end while it was held; its holders hold that as well.
    place: where the look-up of the moment found it, -1 if it did not. emptied: a number that marks blocks whose batch
    was not planned after all, 0 for others.
    """

    __slots__ = ("after", "before", "emptied", "end", "key", "place", "rest", "start", "users")

    def __init__(self, key: Hashable, start: int, end: int, users: int) -> None:
        self.key = key
        self.start = start
        self.end = end
        self.users = users
        self.place = -1
        self.emptied = 0
        self.rest: Extent | None = None
        self.before: Extent | None = None
        self.after: Extent | None = None


class ExtentLedger(KVLedger):
    """A pool of total_blocks blocks with a prefix cache; free_order, drops_last_hit as `BlockLedger` has them."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        longest: int = 0,
        *,
        free_order: FreeOrder = "0.32",
        drops_last_hit: bool = False,
    ) -> None:
        if total_blocks < 1 or block_size < 1:
            raise PolicyError(f"KV pool: found {total_blocks} blocks of {block_size} tokens, expected at least 1 of 1")
        if free_order not in ("0.19", "0.32"):
            raise PolicyError(f"free order: found {free_order!r}, expected '0.19' or '0.32'")
        self.by_id = False
        self.prefix_caching = True
        self.block_size = block_size
        self.total_blocks = self.free_blocks = total_blocks
        # A slot is never longer than the pool: what does not fit there never runs.
        self.longest = min(longest, total_blocks * block_size)
        self.slots = total_blocks // max(1, self.blocks_for(self.longest))
        self._drops_last_hit = drops_last_hit
        self._blank_last = free_order == "0.19"
        self._names = TraceNames()
        # Copies of one text, each of its blocks first found in the copy that was named first.
        self._copies: dict[Hashable, list[Extent]] = {}
        # A ring through all free extents; this one has no blocks and stands between the tail and the head.
        self._ring = ring = Extent(None, 0, 0, 0)
        ring.before = ring.after = ring
        self._put_between(Extent(None, 0, total_blocks, 0), ring, ring)
        self._emptied = 0
        # The last look-up, kept up to date, because a queue's head asks again in every plan: whose it is, the extents
        # found and where each of them begins to be of use, how many blocks that is, how many of them are in use, and
        # the first block that was not there by its own name.
        self._looked: Track | None = None
        self._looked_known = 0
        self._found: list[Extent] = []
        self._found_from: list[int] = []
        self._found_blocks = 0
        self._found_in_use = 0
        self._first_missed = -1
        self._missed_key: Hashable = None

    # What a scheduler asks

    def cached_tokens(self, track: Track) -> int:
        found = self._look(track)
        if found and self._drops_last_hit:
            found -= 1
        found *= self.block_size
        return found if found > track.computed else track.computed

    def shared_blocks(self, track: Track, cached: int) -> int:
        return min(self._look(track), cached // self.block_size)

    def admission_blocks(self, track: Track, cached: int, tokens: int) -> int:
        found, limit = self._look(track), cached // self.block_size
        in_use = self._found_in_use
        if limit < found:
            in_use = 0
            for at, extent in enumerate(self._found):
                if extent.users:
                    in_use += max(0, min(self._found_to(at), limit) - self._found_from[at])
        return max(0, -(-tokens // self.block_size) - in_use)

    def admit(self, track: Track, cached: int) -> None:
        left = min(self._look(track), cached // self.block_size)
        found, begins = self._found, self._found_from
        ends = [*begins[1:], self._found_blocks]
        self._look_anew(None, 0)
        held: list[Extent] = []
        track.extents = held
        for at, extent in enumerate(found):
            first, last = begins[at], min(ends[at], left)
            if first >= last:
                break
            if extent.start < first:
                extent = self._split(extent, first)
            if last < extent.end:
                self._split(extent, last)
            if not extent.users:
                self._take_out(extent)
                self.free_blocks -= last - first
            extent.users += 1
            held.append(extent)
            self._call_by_own_names(track, extent)
        track.named_blocks = track.blocks = left
        self.extend(track, cached)

    def extend(self, track: Track, tokens: int) -> None:
        more = -(-tokens // self.block_size) - track.blocks
        if more > 0:
            self.take(more)
            track.blocks += more

    def grow(self, tracks: Collection[Track]) -> None:
        self.take(len(tracks))

    def take(self, blocks: int) -> None:
        self.free_blocks -= blocks
        ring = self._ring
        while blocks > 0:
            head = ring.after
            assert head is not None
            assert head is not ring
            more = head.end - head.start
            if more > blocks:
                more = blocks
            blocks -= more
            head.end -= more
            if head.place >= 0:
                self._find_again_from(head.place)
            if head.end == head.start:
                self._take_out(head)
                if head.key is not None:
                    self._remove_copy(head)

    def computed(self, track: Track, tokens: int) -> None:
        upto = tokens // self.block_size
        if upto > track.blocks:
            upto = track.blocks
        first = track.named_blocks
        while first < upto:
            key, end = self._names.run(track, first, self.block_size)
            if end > upto:
                end = upto
            self._name(track, key, first, end)
            first = end

    def release(self, track: Track) -> None:
        # Decoded blocks get their names here, not step by step: nobody else could have asked for them earlier.
        self.computed(track, min(track.own_context, track.own_known - 1))
        self._free_blank(track.blocks - track.named_blocks)
        for extent in reversed(self._table(track)):
            extent.users -= 1
            if extent.users:
                continue
            blocks = extent.end - extent.start
            extent.rest = None
            if extent.place >= 0:
                at = extent.place
                self._found_in_use -= self._found_to(at) - self._found_from[at]
            if extent.key is None:
                self._free_blank(blocks)
            else:
                self.free_blocks += blocks
                self._free_named(extent)
        track.extents = None
        track.blocks = track.named_blocks = 0

    def hold_nothing(self, track: Track, first: int, last: int, empty: set[int]) -> set[int]:
        shared: set[int] = set()
        held = track.extents
        if held is not None and track.named_blocks < last:
            held.append(Extent(None, track.named_blocks, last, 1))
            track.named_blocks = last
        for extent in self._table(track):
            if extent.end <= first or extent.start >= last:
                continue
            if extent.start < first:
                extent = self._split(extent, first)
            if extent.end > last:
                self._split(extent, last)
            if extent.key is not None:
                self._remove_copy(extent)
                extent.key = None
            if extent.place >= 0:
                self._find_again_from(extent.place)
            self._emptied += 1
            extent.emptied = self._emptied
            empty.add(extent.emptied)
            if extent.users > 1:
                shared.add(extent.emptied)
        return shared

    def holds_any(self, track: Track, blocks: set[int]) -> bool:
        return any(extent.emptied in blocks for extent in self._table(track))

    def filled_blocks(self, track: Track, empty: set[int]) -> int:
        for extent in self._table(track):
            if extent.emptied in empty:
                return extent.start
        return track.blocks

    def forget(self) -> None:
        self._look_anew(None, 0)
        for copies in self._copies.values():
            for extent in copies:
                extent.key = extent.before = extent.after = None
        self._copies.clear()
        ring = self._ring
        ring.before = ring.after = ring
        if self.free_blocks:
            self._put_between(Extent(None, 0, self.free_blocks, 0), ring, ring)

    def next_overwritten(self) -> list[Hashable]:
        """Names of the free blocks in the order in which they will be given out; None for those without a name."""
        names: list[Hashable] = []
        extent = self._ring.after
        while extent is not None and extent is not self._ring:
            key = extent.key
            names += [None if key is None else (key, at) for at in range(extent.end - 1, extent.start - 1, -1)]
            extent = extent.after
        return names

    # Tables

    def _table(self, track: Track) -> list[Extent]:
        """What a track holds, in order, but the blocks without a name at the end."""
        held = track.extents
        if held is None:
            raise PolicyError(f"request {track.request.id} holds no blocks: it is {track.status}")
        table: list[Extent] = []
        reached = 0
        for extent in held:
            # The table goes on without a gap: whatever was split from the one before comes first.
            while reached < extent.start:
                rest = table[-1].rest
                assert rest is not None
                table.append(rest)
                reached = rest.end
            table.append(extent)
            reached = extent.end
        while reached < track.named_blocks:
            rest = table[-1].rest
            assert rest is not None
            table.append(rest)
            reached = rest.end
        return table

    def _split(self, extent: Extent, at: int) -> Extent:
        """Cut an extent in two; returns the second, blocks [at, end)."""
        later = Extent(extent.key, at, extent.end, extent.users)
        later.emptied = extent.emptied
        if extent.place >= 0:
            self._find_again_from(extent.place)
        extent.end = at
        if extent.key is not None:
            copies = self._copies[extent.key]
            copies.insert(copies.index(extent) + 1, later)
        if extent.users:
            later.rest = extent.rest
            extent.rest = later
        else:
            before = extent.before
            assert before is not None
            self._put_between(later, before, extent)
        return later

    # Names

    def _name(self, track: Track, key: Hashable, first: int, end: int) -> None:
        """Blocks [first, end) of a track's table, the first of those without a name, get names."""
        held = track.extents
        assert held is not None
        track.named_blocks = end
        copies = self._copies.get(key)
        if copies is None:
            copies = self._copies[key] = []
        last = copies[-1] if copies else None
        if last is not None and last.end == first and last.users == 1 and held and self._ends_with(held[-1], last):
            last.end = end
        else:
            extent = Extent(key, first, end, 1)
            copies.append(extent)
            held.append(extent)
        missed = self._first_missed
        if first <= missed < end and key == self._missed_key:
            self._find_again_from(bisect_left(self._found_from, missed))
            self._first_missed, self._missed_key = -1, None

    @staticmethod
    def _ends_with(extent: Extent, last: Extent) -> bool:
        """Whether `last` is the end of what a track holds from `extent` on."""
        while extent is not last:
            rest = extent.rest
            if rest is None or extent.end >= last.end:
                return False
            extent = rest
        return True

    def _call_by_own_names(self, track: Track, extent: Extent) -> None:
        """An earlier turn's answer is now part of a prompt, and known by that prompt's name from here on."""
        while True:
            key, end = self._names.run(track, extent.start, self.block_size)
            later = self._split(extent, end) if end < extent.end else None
            if key != extent.key:
                self._remove_copy(extent)
                extent.key = key
                self._copies.setdefault(key, []).append(extent)
            if later is None:
                return
            extent = later

    def _remove_copy(self, extent: Extent) -> None:
        copies = self._copies[extent.key]
        if len(copies) == 1:
            del self._copies[extent.key]
        else:
            copies.remove(extent)

    # The queue of free blocks

    def _free_blank(self, blocks: int) -> None:
        """Blocks without a name become free: they are the next to be given out, or the last."""
        if not blocks:
            return
        self.free_blocks += blocks
        ring = self._ring
        before, after = (ring.before, ring) if self._blank_last else (ring, ring.after)
        assert before is not None
        assert after is not None
        beside = before if self._blank_last else after
        if beside.key is None and beside is not ring:
            beside.end += blocks
        else:
            self._put_between(Extent(None, 0, blocks, 0), before, after)

    def _free_named(self, extent: Extent) -> None:
        """To the tail; together again with what was split from it, if that went there just before."""
        ring = self._ring
        tail = ring.before
        assert tail is not None
        if tail.start == extent.end and tail.key == extent.key and tail is not ring:
            copies = self._copies[extent.key]
            at = copies.index(extent)
            if (at + 1 < len(copies) and copies[at + 1] is tail) or (at and copies[at - 1] is tail):
                for one in (extent, tail):
                    if one.place >= 0:
                        self._find_again_from(one.place)
                tail.start = extent.start
                del copies[at]
                return
        self._put_between(extent, tail, ring)

    @staticmethod
    def _put_between(extent: Extent, before: Extent, after: Extent) -> None:
        extent.before, extent.after = before, after
        before.after = after.before = extent

    @staticmethod
    def _take_out(extent: Extent) -> None:
        before, after = extent.before, extent.after
        assert before is not None
        assert after is not None
        before.after, after.before = after, before
        extent.before = extent.after = None

    # Looking up

    def _look(self, track: Track) -> int:
        """How many blocks of a waiting track are there; they are in `_found`."""
        if self._looked is not track or self._looked_known != track.own_known:
            self._look_anew(track, track.own_known)
        size, names = self.block_size, self._names
        limit = (track.own_known - 1) // size
        at = self._found_blocks
        while at < limit:
            end = limit
            copies: list[Extent] | None = None
            extent: Extent | None = None
            if self._first_missed < 0:
                key, end = names.run(track, at, size)
                copies = self._copies.get(key)
                extent = self._first_copy(copies, at)
                if extent is None:
                    self._first_missed, self._missed_key = at, key
                    end = limit
            if extent is None:
                earlier = names.history_key(track, size, self._first_missed)
                copies = self._copies.get(earlier) if earlier is not None else None
                extent = self._first_copy(copies, at)
                if extent is None:
                    break
            end = min(end, limit, extent.end)
            assert copies is not None
            if copies[0] is not extent:
                for other in copies:
                    if other is extent:
                        break
                    if at < other.start < end:
                        end = other.start
            if extent.place >= 0:
                if extent.place == len(self._found) - 1:
                    # It has grown since it was found.
                    if extent.users:
                        self._found_in_use += end - at
                    self._found_blocks = at = end
                    continue
                # Between its blocks some of an earlier copy were found.
                place = extent.place
                extent.place = -1
                later = self._split(extent, at)
                extent.place, extent = place, later
            extent.place = len(self._found)
            self._found.append(extent)
            self._found_from.append(at)
            if extent.users:
                self._found_in_use += end - at
            self._found_blocks = at = end
        return self._found_blocks

    @staticmethod
    def _first_copy(copies: list[Extent] | None, at: int) -> Extent | None:
        if copies is not None:
            for extent in copies:
                if extent.start <= at < extent.end:
                    return extent
        return None

    def _found_to(self, place: int) -> int:
        begins = self._found_from
        return begins[place + 1] if place + 1 < len(begins) else self._found_blocks

    def _look_anew(self, track: Track | None, known: int) -> None:
        for extent in self._found:
            extent.place = -1
        self._looked, self._looked_known = track, known
        self._found, self._found_from = [], []
        self._found_blocks = self._found_in_use = 0
        self._first_missed, self._missed_key = -1, None

    def _find_again_from(self, place: int) -> None:
        """What was found from here on may be found no more, or by another name."""
        found = self._found
        if place >= len(found):
            return
        begins = self._found_from
        first = begins[place]
        for at in range(place, len(found)):
            if found[at].users:
                self._found_in_use -= self._found_to(at) - begins[at]
        for extent in found[place:]:
            extent.place = -1
        del found[place:]
        del begins[place:]
        self._found_blocks = first
        if first <= self._first_missed:
            self._first_missed, self._missed_key = -1, None
