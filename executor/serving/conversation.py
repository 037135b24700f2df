"""Prompts of conversations: a later turn begins with what was really said before, prompts and answers alike."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from executor.serving.prompts import Prompts
from workloads.trace import Trace


class Conversations:
    """Prompts of a trace whose sessions carry their history, answers as the model gave them.

    prompts: what a turn says by itself, used where there is no history or it is too long for the turn's prompt.
    """

    def __init__(self, trace: Trace, prompts: Prompts) -> None:
        self._trace = trace
        self._prompts = prompts
        self._said: dict[str, NDArray[np.int64]] = {}

    def __call__(self, row: int) -> NDArray[np.int64]:
        ids = np.array(self._prompts(row), np.int64)
        session = self._session(row)
        said = self._said.get(session) if session is not None else None
        if said is not None and len(said) < len(ids):
            ids[: len(said)] = said
        return ids

    def ended(self, row: int, ids: NDArray[np.int64]) -> None:
        """A turn has ended; ids: its prompt and its answer."""
        session = self._session(row)
        if session is not None:
            self._said[session] = ids.copy()

    def _session(self, row: int) -> str | None:
        return self._trace.session[row] if self._trace.session is not None else None


def keeps_history(trace: Trace) -> bool:
    """Whether the trace says that later turns begin with the earlier ones' texts (and not with ids of its own)."""
    return trace.session is not None and trace.prefix_hashes is not None and trace.prompt_ids is None
