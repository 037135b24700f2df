"""Decodes that advance in lockstep: one step counter and one list of token times for all of them.

An iteration then costs what *changed* in it, not what runs in it: a step of 256 decodes is one addition to the
context total, one append to the list of times, and the blocks of those few members that cross a block boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from heapq import heappop, heappush

from policies.request import Ns
from policies.track import Track


class Cohort:
    """A set of decoding tracks. Every operation is O(1) or O(log n) per member that joins or leaves, never per step.

    planned: steps planned so far; `times` holds the token time of every *completed* step, so planned - len(times)
        steps are in flight.
    context_total / context_max: contexts before the next step, that is without the token about to be decoded.
    growth: KV blocks that the next step needs. peak: the most members it ever had.

    A member's context is `track.base + planned`. It joins at step `segment_start`: times[segment_start] is the time of
    the token that its last chunk sampled (or, after a merge, of its first token decoded here).
    """

    __slots__ = (
        "_deepest", "_end_steps", "_ends_at", "_grows_at", "_members", "_unsorted", "block_size", "closing",
        "context_total", "lost", "number", "peak", "planned", "size", "times",
    )  # fmt: skip

    def __init__(self, number: int, block_size: int) -> None:
        self.number = number
        self.block_size = block_size
        self.planned = 0
        self.times: list[Ns] = []
        self.size = 0
        self.peak = 0
        self.context_total = 0
        self._members: dict[Track, None] = {}
        self._unsorted = False
        # Keyed by step: who needs a block when that step is planned, and whose last token that step delivers.
        self._grows_at: dict[int, dict[Track, None]] = {}
        self._ends_at: dict[int, dict[Track, None]] = {}
        self._end_steps: list[int] = []
        self._deepest: list[tuple[int, int, Track]] = []
        # Tokens of steps in flight that nobody will receive any more (their owner was preempted or withdrawn).
        self.lost: dict[int, int] = {}
        # Members that left when their declared limit was planned, waiting for that last token to arrive.
        self.closing: dict[int, list[Track]] = {}

    @property
    def in_flight(self) -> int:
        return self.planned - len(self.times)

    @property
    def last_token_ns(self) -> Ns:
        return self.times[-1] if self.times else -1

    @property
    def growth(self) -> int:
        growing = self._grows_at.get(self.planned)
        return len(growing) if growing else 0

    @property
    def context_max(self) -> int:
        heap = self._deepest
        members = self._members
        while heap:
            negative_base, _, track = heap[0]
            # A victim may have rejoined this very cohort with another base: the base has to agree too.
            if track in members and track.base == -negative_base:
                return self.planned - negative_base
            heappop(heap)
        return 0

    def members(self) -> Iterator[Track]:
        """Members in admission order; O(size), for a policy that asks."""
        self._sort()
        return iter(self._members)

    @property
    def last_admitted(self) -> Track:
        self._sort()
        return next(reversed(self._members))

    @property
    def first_order(self) -> int:
        self._sort()
        return next(iter(self._members)).order

    def _sort(self) -> None:
        if self._unsorted:
            self._members = dict.fromkeys(sorted(self._members, key=lambda track: track.order))
            self._unsorted = False

    # Membership

    def join(self, track: Track, segment_start: int, decodes_from: int) -> None:
        """Take in a track whose context is `track.own_context` once the steps planned so far are counted.

        Its tokens here are times[segment_start:]; those before `decodes_from` are sampled by a chunk, not decoded.
        """
        context = track.own_context
        members = self._members
        if members and not self._unsorted and next(reversed(members)).order > track.order:
            self._unsorted = True
        members[track] = None
        track.base = base = context - self.planned
        track.cohort = self
        track.segment_start = segment_start
        track.decodes_from = decodes_from
        self.size += 1
        if self.size > self.peak:
            self.peak = self.size
        self.context_total += context
        heappush(self._deepest, (-base, track.order, track))
        self._grows_at.setdefault(track.blocks * self.block_size - base, {})[track] = None
        end = segment_start + track.ends_after - track.produced
        ending = self._ends_at.get(end)
        if ending is None:
            self._ends_at[end] = {track: None}
            heappush(self._end_steps, end)
        else:
            ending[track] = None

    def leave(self, track: Track, *, deliver: bool = False) -> None:
        """Let a track go: its context, blocks and delivered tokens become its own again, its segment is closed.

        Tokens of its steps in flight are lost, unless `deliver` says that they will still reach it.
        """
        planned = self.planned
        context = track.base + planned
        block_size = self.block_size
        held = max(track.blocks, -(-context // block_size))
        grows = held * block_size - track.base
        growing = self._grows_at[grows]
        del growing[track]
        if not growing:
            del self._grows_at[grows]
        end = track.segment_start + track.ends_after - track.produced
        ending = self._ends_at.get(end)
        if ending is not None and track in ending:
            del ending[track]
            if not ending:
                del self._ends_at[end]
        del self._members[track]
        self.size -= 1
        self.context_total -= context
        track.cohort = None
        track.own_context = context
        track.blocks = held
        done = planned if deliver else len(self.times)
        start = track.segment_start
        if done > start:
            track.segments.append((self.number, start, done))
            track.produced += done - start
            if len(self.times) > start:
                track.last_token_ns = self.times[-1]
        if not deliver:
            for step in range(max(len(self.times), track.decodes_from), planned):
                self.lost[step] = self.lost.get(step, 0) + 1
        track.own_known = track.request.prompt_tokens + track.produced

    # Steps

    def advance(self) -> dict[Track, None] | None:
        """Plan one step; returns the members that need a block for it."""
        step = self.planned
        growing = self._grows_at.pop(step, None)
        if growing:
            later = self._grows_at.get(step + self.block_size)
            if later is None:
                self._grows_at[step + self.block_size] = growing
            else:
                later.update(growing)
        self.planned = step + 1
        self.context_total += self.size
        return growing

    def advance_by(self, steps: int, grow: Callable[[Collection[Track]], None]) -> list[int]:
        """Plan `steps` steps at once; `grow` gets the members that need a block. Returns the blocks each step took."""
        grows_at, block_size = self._grows_at, self.block_size
        taken = []
        for step in range(self.planned, self.planned + steps):
            growing = grows_at.pop(step, None)
            if growing:
                later = grows_at.get(step + block_size)
                if later is None:
                    grows_at[step + block_size] = growing
                else:
                    later.update(growing)
                grow(growing)
                taken.append(len(growing))
            else:
                taken.append(0)
        self.planned += steps
        self.context_total += steps * self.size
        return taken

    def complete(self, now_ns: Ns) -> bool:
        """The oldest step in flight is done; returns whether it delivered somebody's last token."""
        times = self.times
        times.append(now_ns)
        return len(times) in self._ends_at

    def ending(self) -> list[Track]:
        """Members whose last token the latest completed step delivered, in admission order; they have to leave."""
        return sorted(self._ends_at[len(self.times)], key=lambda track: track.order)

    def exhausted(self) -> list[Track]:
        """Members whose declared limit is reached by the steps planned so far, in admission order."""
        ending = self._ends_at.get(self.planned)
        if not ending:
            return []
        return sorted(
            (t for t in ending if t.ends_after == t.limit_after), key=lambda track: track.order
        )

    def steps_to_next_end(self) -> int:
        """Steps that can be planned before one of them delivers somebody's last token (that one included)."""
        steps = self._end_steps
        while steps and steps[0] not in self._ends_at:
            heappop(steps)
        return steps[0] - self.planned if steps else 0

    def steps_within(self, free_blocks: int, most: int) -> int:
        """How many further steps, at most `most`, can be planned with `free_blocks` blocks."""
        size, block_size, grows_at = self.size, self.block_size, self._grows_at
        if free_blocks >= size * (most // block_size + 1):
            return most
        regrown: dict[int, int] = {}
        for step in range(self.planned, self.planned + most):
            growth = len(grows_at.get(step, ())) + regrown.pop(step, 0)
            if growth > free_blocks:
                return step - self.planned
            free_blocks -= growth
            if growth:
                regrown[step + block_size] = growth
        return most
