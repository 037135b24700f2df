"""The tokens of one request, from its prompt to its last answer, in memory that is taken once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor.model.sampler import Sampling


@dataclass
class Text:
    """The text of one request. ids: prompt, then delivered tokens; `length` of them are known."""

    ids: NDArray[np.int64]
    length: int
    sampling: Sampling
    stop_ids: frozenset[int]
    prompt_tokens: int
    _cells: array[int]  # the memory of `ids`: a store into an array costs a third of one into numpy's

    @classmethod
    def of(cls, prompt: NDArray[np.int64], most_output: int, sampling: Sampling, stop_ids: Iterable[int]) -> Text:
        count = len(prompt)
        cells = array("q", bytes(8 * (count + most_output)))
        ids = np.frombuffer(cells, np.int64)
        ids[:count] = prompt
        return cls(ids, count, sampling, frozenset(stop_ids), count, cells)

    def append(self, token: int) -> None:
        self._cells[self.length] = token
        self.length += 1

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_tokens : self.length].tolist()
