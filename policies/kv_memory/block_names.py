"""What a full KV block contains, as a name: blocks of one name hold the same keys and values and may be shared.

A simulation knows texts only by what its trace says of them (`TraceNames`); an executor has the texts themselves and
names blocks by their tokens (policies of names are interchangeable: `BlockLedger(names=...)`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Protocol

from policies.work.request import Request
from policies.work.track import Track

NO_END: Final = 1 << 60
"""Where a run of names ends that goes on as long as its request."""


class BlockNames(Protocol):
    """Names of full blocks; block `index` of a track holds its tokens [index * size, (index + 1) * size)."""

    def name(self, track: Track, index: int, size: int) -> Hashable:
        """The name of a block that this track computes or looks for."""
        ...

    def history(self, track: Track, index: int, size: int, first_missed: int) -> Hashable | None:
        """Another name under which an earlier turn of the same conversation may have left that block, if there may be
        one. first_missed: the first block that was not found by its own name."""
        ...


class TraceNames:
    """Names from a trace's prefix hashes, and from its sessions where a hash says nothing: the answers.

    A hash of the trace names the whole prefix up to its end. What no hash covers (the rest of the prompt, the answer)
    is known to this request alone, unless it belongs to a session: a turn whose hashes agree with an earlier turn's to
    their end is taken to go on with that turn's text, as conversations do, so the earlier answer is found as well.
    """

    def name(self, track: Track, index: int, size: int) -> Hashable:
        return (self.run(track, index, size)[0], index)

    def history(self, track: Track, index: int, size: int, first_missed: int) -> Hashable | None:
        key = self.history_key(track, size, first_missed)
        return None if key is None else (key, index)

    def run(self, track: Track, index: int, size: int) -> tuple[Hashable, int]:
        """The key of a block's name, which is (key, index), and the first block after it that has another."""
        request = track.request
        hashes = request.prefix_hashes
        if hashes:
            end = (index + 1) * size
            if end <= request.prompt_tokens:
                position = (end - 1) // request.hash_tokens
                if position < len(hashes):
                    last = (position + 1) * request.hash_tokens
                    return hashes[position], min(last, request.prompt_tokens) // size
            if request.session is not None:
                return (request.session, self._prefix(request, self._named(request, size), size)), NO_END
        return (None, request.id), NO_END

    def history_key(self, track: Track, size: int, first_missed: int) -> Hashable | None:
        """The key of all names that `history` gives."""
        request = track.request
        if request.session is None or not request.prefix_hashes:
            return None
        # Beyond its own hashes a turn finds what it left itself, before it was preempted.
        return (request.session, self._prefix(request, min(first_missed, self._named(request, size)), size))

    @staticmethod
    def _named(request: Request, size: int) -> int:
        """Full blocks that hashes name."""
        return min(len(request.prefix_hashes) * request.hash_tokens, request.prompt_tokens) // size

    @staticmethod
    def _prefix(request: Request, blocks: int, size: int) -> int | None:
        """The hash that names the first `blocks` blocks; None for none."""
        return request.prefix_hashes[(blocks * size - 1) // request.hash_tokens] if blocks else None
