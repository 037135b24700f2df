"""Decodes that advance in lockstep: one step counter and one list of token times for all of them.

An iteration then costs what *changed* in it, not what runs in it: a step of 256 decodes is one addition to the
context total, one append to the list of times, and the blocks of those few members that cross a block boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from policies.work.batch import Decodes
from policies.work.request import Ns
from policies.work.track import Track

if TYPE_CHECKING:
    from policies.kv_memory.ledger import KVLedger

_by_order = attrgetter("order")
# A named tuple made without its own constructor, which costs more than all the rest of a step. Final, as whatever a hot
# path uses of other modules, because compiled code then finds it without looking it up by name.
_new: Final = tuple.__new__
_Decodes: Final = Decodes
_heappush: Final = heappush


class Cohort:
    """A set of decoding tracks. Every operation is O(1) or O(log n) per member that joins or leaves, never per step.

    planned: steps planned so far; `times` holds the token time of every *completed* step, so planned - len(times)
        steps are in flight.
    context_total / context_max: contexts before the next step, that is without the token about to be decoded.
    growth: KV blocks that the next step needs. peak: the most members it ever had.
    longest_base: the base of the member with the longest context.
    ends_at: whose last token a step delivers, by the number of steps completed by then.
    by_id: whether its ledger hands out block ids and so wants to know who needs a block, not only how many do.
    speculates: it is the decode of one request that verifies drafts (`policies.work.speculator.Speculator`).

    A member's context is `track.base + planned`. It joins at step `segment_start`: times[segment_start] is the time of
    the token that its last chunk sampled (or, after a merge, of its first token decoded here).
    """

    __slots__ = (
        "_by_base",
        "_end_steps",
        "_growing",
        "_grows_later",
        "_growth",
        "_members",
        "_unsorted",
        "block_size",
        "by_id",
        "closing",
        "context_total",
        "ends_at",
        "longest_base",
        "lost",
        "number",
        "peak",
        "planned",
        "size",
        "speculates",
        "times",
    )

    def __init__(self, number: int, block_size: int, *, by_id: bool = True) -> None:
        self.number = number
        self.speculates = False
        self.block_size = block_size
        self.by_id = by_id
        self.planned = 0
        self.times: list[Ns] = []
        self.size = 0
        self.peak = 0
        self.context_total = 0
        self._members: dict[Track, None] = {}
        self._unsorted = False
        # A member needs a block every block_size steps, always at the same remainder: who (by id), and how many.
        self._growing: dict[int, dict[Track, None]] = {}
        self._growth = [0] * block_size
        # Members who hold blocks for more than block_size further steps, by the step at which they need their first.
        self._grows_later: dict[int, dict[Track, None]] = {}
        self.ends_at: dict[int, dict[Track, None]] = {}
        # These steps as a heap; the first is always one of them.
        self._end_steps: list[int] = []
        self._by_base: list[tuple[int, int, Track]] = []
        self.longest_base = 0
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
        if self._grows_later:
            self._ripen(self.planned)
        return self._growth[self.planned % self.block_size]

    @property
    def context_max(self) -> int:
        return self.planned + self.longest_base if self.size else 0

    def members(self) -> Iterator[Track]:
        """Members in admission order; O(size), for a policy that asks."""
        self._sort()
        return iter(self._members)

    @property
    def last_admitted(self) -> Track:
        self._sort()
        return next(reversed(self._members))

    def _sort(self) -> None:
        if self._unsorted:
            self._members = dict.fromkeys(sorted(self._members, key=_by_order))
            self._unsorted = False

    # Membership

    def join(self, track: Track, segment_start: int, decodes_from: int) -> None:
        """Take in a track whose context is `track.own_context` once the steps planned so far are counted.

        Its tokens here are times[segment_start:]; those before `decodes_from` are sampled by a chunk, not decoded.
        """
        context = track.own_context
        members = self._members
        planned = self.planned
        if members and not self._unsorted and next(reversed(members)).order > track.order:
            self._unsorted = True
        members[track] = None
        track.base = base = context - planned
        track.cohort = self
        track.segment_start = segment_start
        track.decodes_from = decodes_from
        self.size += 1
        if self.size > self.peak:
            self.peak = self.size
        self.context_total += context
        if base > self.longest_base or self.size == 1:
            self.longest_base = base
        by_base = self._by_base
        if len(by_base) > 64 + 4 * self.size:
            # Mostly members that have left.
            by_base[:] = [(-member.base, member.order, member) for member in members]
            heapify(by_base)
        else:
            _heappush(by_base, (-base, track.order, track))
        block_size = self.block_size
        grows = track.blocks * block_size - base
        if self.by_id or grows >= planned + block_size:
            self._grow_from(grows, {track: None})
        else:
            self._growth[grows % block_size] += 1
        end = segment_start + track.ends_after - track.produced
        ending = self.ends_at.get(end)
        if ending is None:
            self.ends_at[end] = {track: None}
            _heappush(self._end_steps, end)
        else:
            ending[track] = None

    def leave(self, track: Track, *, deliver: bool = False) -> None:
        """Let a track go: its context, blocks and delivered tokens become its own again, its segment is closed.

        Tokens of its steps in flight are lost, unless `deliver` says that they will still reach it.
        """
        planned = self.planned
        base = track.base
        context = base + planned
        block_size = self.block_size
        held = -(-context // block_size)
        grows = track.blocks * block_size - base
        if held < track.blocks:
            held = track.blocks
        if self.by_id or self._grows_later:
            self._grow_no_more(track, grows)
        else:
            self._growth[grows % block_size] -= 1
        end = track.segment_start + track.ends_after - track.produced
        ending = self.ends_at.get(end)
        if ending is not None and track in ending:
            del ending[track]
            if not ending:
                del self.ends_at[end]
                ends = self._end_steps
                while ends and ends[0] not in self.ends_at:
                    heappop(ends)
        del self._members[track]
        self.size -= 1
        self.context_total -= context
        if base == self.longest_base and self.size:
            self._find_longest()
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

    def plan_step(self, ledger: KVLedger) -> Decodes | None:
        """Plan one step and take the blocks that it needs; None, and nothing has changed, if these are short."""
        step, size, total = self.planned, self.size, self.context_total
        if self._grows_later:
            self._ripen(step)
        remainder = step % self.block_size
        growth = self._growth[remainder]
        if growth:
            if growth > ledger.free_blocks:
                return None
            if self.by_id:
                ledger.grow(self._growing[remainder])
            else:
                ledger.take(growth)
        self.planned = step + 1
        self.context_total = total + size
        return _new(_Decodes, (self, step, size, total, step + self.longest_base))

    def plan_steps(self, steps: int, ledger: KVLedger) -> list[int]:
        """Plan `steps` steps at once, for which there have to be blocks; returns the blocks that each of them took."""
        first = self.planned
        growth, block_size = self._growth, self.block_size
        later = self._grows_later
        if self.by_id or (later and min(later) < first + steps):
            taken = []
            for step in range(first, first + steps):
                if self._grows_later:
                    self._ripen(step)
                remainder = step % block_size
                taken.append(growth[remainder])
                if growth[remainder]:
                    if self.by_id:
                        ledger.grow(self._growing[remainder])
                    else:
                        ledger.take(growth[remainder])
        else:
            # Numbers alone: the same growth again and again, from this step's remainder on.
            remainder = first % block_size
            taken = growth[remainder : remainder + steps]
            if len(taken) < steps:
                taken += growth * ((steps - len(taken)) // block_size + 1)
                del taken[steps:]
            ledger.take(sum(taken))
        self.planned = first + steps
        self.context_total += steps * self.size
        return taken

    def ending(self) -> list[Track]:
        """Members whose last token the latest completed step delivered, in admission order; they have to leave."""
        ending = self.ends_at.get(len(self.times))
        if not ending:
            return []
        return sorted(ending, key=_by_order) if len(ending) > 1 else list(ending)

    def exhausted(self) -> list[Track]:
        """Members whose declared limit is reached by the steps planned so far, in admission order."""
        ending = self.ends_at.get(self.planned)
        if not ending:
            return []
        return sorted((t for t in ending if t.ends_after == t.limit_after), key=_by_order)

    def steps_to_next_end(self) -> int:
        """Steps that can be planned before one of them delivers somebody's last token (that one included)."""
        steps = self._end_steps
        return steps[0] - self.planned if steps else 0

    def completions_to_next_end(self) -> int:
        """Steps that have to complete, those in flight included, for the next last token of a member."""
        steps = self._end_steps
        return steps[0] - len(self.times) if steps else 0

    def growth_within(self, steps: int) -> int:
        """Blocks that the next `steps` steps need in all."""
        block_size, first, later = self.block_size, self.planned, self._grows_later
        blocks, regular = 0, self.size
        for step, tracks in later.items():
            regular -= len(tracks)
            if step < first + steps:
                blocks += len(tracks) * (1 + (first + steps - 1 - step) // block_size)
        # Each regular member needs one in every block_size steps; the rest of them may go round the end of the list.
        rounds, rest = divmod(steps, block_size)
        if rest:
            growth, at = self._growth, first % block_size
            blocks += sum(growth[at : at + rest])
            if at + rest > block_size:
                blocks += sum(growth[: at + rest - block_size])
        return blocks + rounds * regular

    def steps_within(self, free_blocks: int, most: int) -> int:
        """How many further steps, at most `most`, can be planned with `free_blocks` blocks."""
        block_size, growth = self.block_size, self._growth
        if free_blocks >= self.size * (most // block_size + 1):
            return most
        later = {step: len(tracks) for step, tracks in self._grows_later.items()}
        growth = growth[:]
        for step in range(self.planned, self.planned + most):
            remainder = step % block_size
            if step in later:
                growth[remainder] += later[step]
            if growth[remainder] > free_blocks:
                return step - self.planned
            free_blocks -= growth[remainder]
        return most

    # Who needs blocks when, and whose context is the longest

    def _grow_from(self, step: int, tracks: dict[Track, None]) -> None:
        """Members who need a block at `step` and every block_size steps from then on."""
        if step >= self.planned + self.block_size:
            waiting = self._grows_later.get(step)
            if waiting is None:
                self._grows_later[step] = tracks
            else:
                waiting.update(tracks)
        else:
            self._grow_regularly(step, tracks)

    def _grow_regularly(self, step: int, tracks: dict[Track, None]) -> None:
        remainder = step % self.block_size
        self._growth[remainder] += len(tracks)
        if self.by_id:
            growing = self._growing.get(remainder)
            if growing:
                growing.update(tracks)
            else:
                self._growing[remainder] = tracks

    def _grow_no_more(self, track: Track, step: int) -> None:
        waiting = self._grows_later.get(step)
        if waiting is not None and track in waiting:
            del waiting[track]
            if not waiting:
                del self._grows_later[step]
            return
        remainder = step % self.block_size
        if self.by_id:
            del self._growing[remainder][track]
        self._growth[remainder] -= 1

    def _ripen(self, step: int) -> None:
        """Those who need their first block at `step` need one every block_size steps from now on."""
        tracks = self._grows_later.pop(step, None)
        if tracks:
            self._grow_regularly(step, tracks)

    def _find_longest(self) -> None:
        heap, members = self._by_base, self._members
        while True:
            negative_base, _, track = heap[0]
            # A victim may have rejoined this very cohort with another base: the base has to agree too.
            if track in members and track.base == -negative_base:
                self.longest_base = -negative_base
                return
            heappop(heap)
