"""Prompt token ids for every row of a trace: the trace's own, a text file's, or random ones from a seed.

Random prompts honour the trace's prefix hashes: equal hashes give equal tokens, so that a prefix cache hits exactly
where the trace says that prompts agree.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from executor.errors import ExecutorError
from policies.edges.input_file import LOG_BYTES, read_text
from workloads.trace import Trace

if TYPE_CHECKING:
    from executor.model.tokenizer import Tokenizer

Prompt = NDArray[np.int64]
Prompts = Callable[[int], Prompt]
"""Row of the trace -> its prompt's ids."""


def trace_prompts(trace: Trace, vocab: int, seed: int = 0) -> Prompts:
    """The trace's own ids where it carries them, else random ids.

    ExecutorError for an id beyond the vocabulary in any row, so that it shows before the first is served.
    """
    if trace.prompt_ids is None:
        return random_prompts(trace, vocab, seed)
    carried = trace.prompt_ids

    for row in range(len(trace)):
        ids = np.asarray(carried[row], np.int64)
        if len(ids) != int(trace.prompt_tokens[row]):
            raise ExecutorError(
                f"{trace.name}, row {row}: found {len(ids)} prompt ids, expected {trace.prompt_tokens[row]}"
            )
        if (bad := _beyond(ids, vocab)) is not None:
            raise ExecutorError(
                f"{trace.name}, row {row}: prompt id {bad}: expected 0 to {vocab - 1}, the model's vocabulary"
            )
    return lambda row: np.asarray(carried[row], np.int64)


def _beyond(ids: Prompt, vocab: int) -> int | None:
    """The worst of the ids that a model does not know; None if it knows all."""
    if not len(ids) or (ids.min() >= 0 and ids.max() < vocab):
        return None
    return int(ids.max() if ids.max() >= vocab else ids.min())


def random_prompts(trace: Trace, vocab: int, seed: int = 0) -> Prompts:
    """Uniform ids from (seed, row); a block that a prefix hash names comes from (seed, hash) instead."""

    def of_row(row: int) -> Prompt:
        length = int(trace.prompt_tokens[row])
        ids = np.random.default_rng([seed, row]).integers(0, vocab, length)
        hashes = trace.prefix_hashes[row] if trace.prefix_hashes is not None else ()
        size = trace.hash_tokens
        for index, name in enumerate(hashes):
            part = ids[index * size : (index + 1) * size]
            part[:] = np.random.default_rng([seed, 1, name & (1 << 63) - 1]).integers(0, vocab, size)[: len(part)]
        return ids

    return of_row


def file_prompts(path: Path, trace: Trace, tokenizer: Tokenizer, vocab: int) -> Prompts:
    """Row r takes line r of a text file (again from the top when lines run out), repeated or cut to its length.

    vocab: ids that the model knows. Raises ExecutorError, before anything is served, for a line without tokens or with
    an id that the model does not know.
    """
    lines = [line for line in read_text(path, ExecutorError, LOG_BYTES).splitlines() if line.strip()]
    if not lines:
        raise ExecutorError(f"{path}: found no lines, expected one prompt a line")
    encoded: list[Prompt] = []
    for number, line in enumerate(lines[: len(trace)], 1):
        ids = np.asarray(tokenizer.encode(line), np.int64)
        if not len(ids):
            raise ExecutorError(f"{path}: line {number} has no tokens")
        if (bad := _beyond(ids, vocab)) is not None:
            raise ExecutorError(
                f"{path}: line {number}: token id {bad}: expected 0 to {vocab - 1}, the model's vocabulary; the "
                "tokenizer belongs to another model"
            )
        encoded.append(ids)

    def of_row(row: int) -> Prompt:
        return np.resize(encoded[row % len(encoded)], int(trace.prompt_tokens[row]))

    return of_row
