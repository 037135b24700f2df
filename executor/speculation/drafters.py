"""Who drafts tokens: n-grams of the request's own text, or a small model with keys and values of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from executor.batches.batch_arrays import Ints, Step
from executor.kv_memory.pool import KVCache
from executor.model.loading import Loaded
from executor.model.sampler import INVALID
from executor.serving.request_text import Text

_NONE: Ints = np.empty(0, np.int32)

LEAST_GRAM, MOST_GRAM = 2, 4
"""Tokens of the n-grams that are looked up, longest first (prompt lookup, Saxena 2023; vLLM's ngram method)."""


class NGrams:
    """Where each n-gram of one text stands first, kept up to date as the text grows: O(1) a token."""

    def __init__(self) -> None:
        self._follows: dict[tuple[int, ...], int] = {}
        self._known = 0

    def draft(self, text: Text, most: int) -> list[int]:
        """At most `most` tokens that followed the earliest occurrence of the text's longest last n-gram."""
        cells, length, follows = text.ids, text.length, self._follows
        tokens = cells[max(0, self._known - MOST_GRAM) : length].tolist()
        offset = max(0, self._known - MOST_GRAM)
        # An n-gram that ends with the text has no follower yet: it is noted once the next token is there.
        for end in range(max(self._known, 1), length):
            for size in range(LEAST_GRAM, MOST_GRAM + 1):
                if end >= size:
                    follows.setdefault(tuple(tokens[end - size - offset : end - offset]), end)
        self._known = length
        for size in range(min(MOST_GRAM, length - 1), LEAST_GRAM - 1, -1):
            at = follows.get(tuple(cells[length - size : length].tolist()))
            if at is not None:
                found: list[int] = cells[at : min(at + most, length)].tolist()
                return found
        return []


class NGramDrafter:
    """N-grams of every running text, on the host."""

    def __init__(self) -> None:
        self._texts: dict[int, NGrams] = {}

    def draft(self, request: int, text: Text, most: int) -> list[int]:
        grams = self._texts.get(request)
        if grams is None:
            grams = self._texts[request] = NGrams()
        return grams.draft(text, most)

    def forget(self, request: int) -> None:
        self._texts.pop(request, None)


class Next(NamedTuple):
    """Whose drafts are wanted: request, its row of the block tables, position of its last token, and that token."""

    request: int
    row: int
    position: int
    token: int


class ModelDrafter:
    """A small model that drafts its most likely tokens. Its keys and values lie in a pool of its own, in the blocks of
    the same numbers as the model's, so that prefix hits, preemption and rejected rows need no books here."""

    def __init__(self, loaded: Loaded, cache: KVCache, longest: int) -> None:
        self.loaded, self.cache, self.longest = loaded, cache, longest

    def draft(self, step: Step, token_ids: torch.Tensor, wanted: Sequence[Next], most: int) -> dict[int, list[int]]:
        """Follow a batch that has just run, then draft up to `most` tokens for each request; by request.

        step, token_ids: of the batch, every row of which the drafting model has to see.
        """
        model = self.loaded.model
        model.forward(token_ids, step, self.cache)
        drafts: dict[int, list[int]] = {each.request: [] for each in wanted}
        if not wanted or not most:
            return drafts
        rows = np.array([each.row for each in wanted], np.int32)
        positions = np.array([each.position for each in wanted], np.int32)
        tokens = torch.tensor([each.token for each in wanted], dtype=torch.int64, device=step.device)
        for _ in range(most):
            logits = model.forward(
                tokens, self._decodes(step, rows, np.minimum(positions, self.longest - 1)), self.cache
            )
            tokens = model.kernels.argmax(logits)
            for each, token in zip(wanted, tokens.tolist()):
                found = drafts[each.request]
                # What is drafted beyond the longest sequence, or after a NaN, is none.
                if token != INVALID and each.position + len(found) + 1 < self.longest:
                    found.append(token)
            tokens = tokens.clamp(min=0)
            positions = positions + np.int32(1)
        return drafts

    def _decodes(self, step: Step, rows: Ints, contexts: Ints) -> Step:
        size = self.cache.block_size
        count = np.arange(len(rows), dtype=np.int32)
        slots: NDArray[np.int64] = step.tables[rows, contexts // size].astype(np.int64) * size + contexts % size
        return Step(
            rows=len(rows),
            token_ids=np.empty(len(rows), np.int64),
            positions=contexts,
            slots=slots,
            tables=step.tables,
            chunk_row=_NONE,
            chunk_tokens=_NONE,
            chunk_prefix=_NONE,
            chunk_table=_NONE,
            decode_row=count,
            decode_context=contexts,
            decode_table=rows,
            sampled_rows=count,
            sampled_table=rows,
            device=step.device,
        )
