"""The KV blocks of one engine: a queue of free ones, and, with a prefix cache, what each of them contains.

Blocks are taken from the head of the queue. One that is freed and contains something that can be found again goes to
the tail, so that the least recently used is overwritten first; one without goes to the head (vLLM 0.32) or to the tail
as well (vLLM 0.19).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.reference.books import Job


class Blocks:
    """users: how many requests hold each block. contents: what full blocks contain; places: the blocks that contain it,
    the oldest first."""

    def __init__(self, total: int, size: int, caching: bool = False, free_order: str = "0.32") -> None:
        self.total, self.size, self.caching, self.free_order = total, size, caching, free_order
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))
        self.users = [0] * total
        self.contents: dict[int, Hashable] = {}
        self.places: dict[Hashable, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self.free)

    def number_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def extend(self, job: Job, tokens: int) -> bool:
        """Let a request hold blocks for so many tokens in all; False, and nothing is taken, if they are short."""
        more = self.number_for(tokens) - len(job.table)
        if more > len(self.free):
            return False
        for _ in range(more):
            block, _ = self.free.popitem(last=False)
            self._empty(block)
            self.users[block] = 1
            job.table.append(block)
        return True

    def enter(self, job: Job, cached: int, tokens: int, room_for: int, keep: int) -> bool:
        """Give a waiting request its prefix hit and blocks for `tokens` tokens in all, where there is room for
        `room_for` tokens and `keep` blocks stay free."""
        hits = self.hits(job)[: cached // self.size]
        needed = self.number_for(max(tokens, room_for)) - sum(self.users[block] > 0 for block in hits)
        if needed > len(self.free) - keep:
            return False
        for at, block in enumerate(hits):
            self.free.pop(block, None)
            self.users[block] += 1
            # An earlier turn's answer is now part of a prompt, and known by that prompt's name from here on.
            if self.contents[block] != name_of(job, at, self.size):
                self._empty(block)
                self._fill(block, name_of(job, at, self.size))
        job.table = list(hits)
        return self.extend(job, tokens)

    def release(self, job: Job, computed: int) -> None:
        """Take everything back from a request that has computed so many tokens."""
        self.computed(job, computed)
        head = []
        for block in reversed(job.table):
            self.users[block] -= 1
            if self.users[block]:
                continue
            if block in self.contents or self.free_order == "0.19":
                self.free[block] = None
            else:
                head.append(block)
        for block in reversed(head):
            self.free[block] = None
            self.free.move_to_end(block, last=False)
        job.table = []

    # The prefix cache

    def computed(self, job: Job, tokens: int) -> None:
        """A planned batch computes a request up to so many tokens: its full blocks can be found from now on."""
        if self.caching:
            for at, block in enumerate(job.table[: tokens // self.size]):
                if block not in self.contents:
                    self._fill(block, name_of(job, at, self.size))

    def not_computed(self, job: Job, first: int, end: int) -> None:
        """The batch that would have computed these tokens is not planned after all."""
        for block in job.table[first // self.size : end // self.size]:
            self._empty(block)

    def hits(self, job: Job) -> list[int]:
        """The blocks of a waiting request's longest prefix that is there already; one token at least is left over."""
        found: list[int] = []
        missed = None
        for at in range((job.known - 1) // self.size if self.caching else 0):
            places = self.places.get(name_of(job, at, self.size)) if missed is None else None
            if not places:
                missed = at if missed is None else missed
                places = self.places.get(earlier_name_of(job, at, self.size, missed))
            if not places:
                break
            found.append(places[0])
        return found

    def _fill(self, block: int, name: Hashable) -> None:
        self.contents[block] = name
        self.places.setdefault(name, []).append(block)

    def _empty(self, block: int) -> None:
        if block in self.contents:
            name = self.contents.pop(block)
            self.places[name].remove(block)
            if not self.places[name]:
                del self.places[name]


def name_of(job: Job, at: int, size: int) -> Hashable:
    """What a request's block contains: a prefix that a hash of the trace names; beyond the hashes the rest of a
    session's turn, known by the prefix that it goes on from; else something that nobody else has."""
    request = job.request
    if request.prefix_hashes and at < _named_blocks(job, size):
        return request.prefix_hashes[((at + 1) * size - 1) // request.hash_tokens], at
    if request.prefix_hashes and request.session is not None:
        return _in_session(job, _named_blocks(job, size), at, size)
    return None, request.id, at


def earlier_name_of(job: Job, at: int, size: int, missed: int) -> Hashable:
    """The name under which an earlier turn of the session has left a block, if the text goes on as that turn did;
    missed: the first block that is not there by its own name."""
    if job.request.session is None or not job.request.prefix_hashes:
        return None
    return _in_session(job, min(missed, _named_blocks(job, size)), at, size)


def _in_session(job: Job, goes_on_from: int, at: int, size: int) -> Hashable:
    request = job.request
    prefix = request.prefix_hashes[(goes_on_from * size - 1) // request.hash_tokens] if goes_on_from else None
    return request.session, prefix, at


def _named_blocks(job: Job, size: int) -> int:
    """Full blocks of a prompt that the trace's hashes name."""
    request = job.request
    return min(len(request.prefix_hashes) * request.hash_tokens, request.prompt_tokens) // size
