"""Names of KV blocks from the tokens themselves: whatever texts agree from their beginning share their blocks.

A block's name is a digest of its own tokens and of the name before it, so that it stands for the whole prefix. A later
turn of a conversation finds prompt and answer of the earlier ones, and so does anybody else who sends that text.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

from policies.work.track import Track

if TYPE_CHECKING:
    from executor.serving.request_text import Text


class TextNames:
    """Names for `policies.BlockLedger`. texts: request id -> its tokens so far, filled in by the runner's owner."""

    def __init__(self) -> None:
        self.texts: Mapping[int, Text] = {}
        self._chains: dict[int, list[bytes]] = {}

    def name(self, track: Track, index: int, size: int) -> Hashable:
        request_id = track.request.id
        text = self.texts.get(request_id)
        if text is None or (index + 1) * size > text.length:
            return (None, request_id, index)
        chain = self._chains.setdefault(request_id, [])
        while len(chain) <= index:
            at = len(chain) * size
            digest = blake2b(text.ids[at : at + size].tobytes(), digest_size=16, key=chain[-1] if chain else b"")
            chain.append(digest.digest())
        return chain[index]

    def history(self, track: Track, index: int, size: int, first_missed: int) -> Hashable | None:
        return None

    def forget(self, request_id: int) -> None:
        """A request has ended."""
        self._chains.pop(request_id, None)
