"""Which part of a file a window and a limit ask for, decided as the rows come, so that the rest takes no memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads.column_names import Field
from workloads.reading.assembly import DECIDING_ROWS, Options, assemble, out_of_order
from workloads.reading.chunk import Chunk

_MARGIN_S = 1e-3
"""What lies so near to an edge of the window is kept: the trace is cut once more, to the nanosecond."""


class Part:
    """The rows that a window (seconds from the trace's start) and a limit (of those within) need.

    Rows must come in order of time. The first thousand are kept in any case: they decide in which unit times are.
    More may be kept than is asked for; who reads cuts the trace once more.
    """

    def __init__(self, window_s: tuple[float, float] | None = None, limit: int | None = None) -> None:
        self._window_s, self._limit = window_s, limit
        self.wants_more = True
        self.num_left_out = 0
        self._num_within = 0
        self._last: Any = None
        self._seen: list[tuple[Mapping[str, Any], NDArray[np.int64]]] = []
        self._ns: tuple[float, float] | None = None

    def begin(self, found: dict[str, Field], options: Options) -> None:
        """Before the first row. Where a file has no times or is sorted afterwards, only the limit counts, if at all."""
        self._found, self._options = found, options
        if "arrival" not in found:
            self._window_s = None
        elif options.sort or "parent" in found:
            self._window_s = self._limit = None

    def rows_at_once(self, available: int) -> int:
        """How many of the next rows to look at: no more than may be needed."""
        if self._limit is None or self._window_s is not None:
            return max(1, available)
        return max(1, min(available, self._limit - self._num_within))

    def keep(self, understood: Mapping[str, Any], chunk: Chunk) -> NDArray[np.bool_] | None:
        """Which of a chunk's good rows are needed; None for all of them."""
        kept = self._within(understood, chunk) if self._window_s is not None else None
        if self._limit is not None:
            answered = understood["output_tokens"] > 0
            self._num_within += int((answered if kept is None else answered & self._surely).sum())
            if self._window_s is None or kept is not None:
                self.wants_more &= self._num_within < self._limit
            else:
                self._num_within = 0  # rows that decide the unit may lie outside the window
        if kept is not None:
            self.num_left_out += int((~kept).sum())
        return kept

    def _within(self, understood: Mapping[str, Any], chunk: Chunk) -> NDArray[np.bool_] | None:
        assert self._window_s is not None
        times = understood["arrival"]
        if not len(times):
            return None
        back = np.diff(times, prepend=times[0] if self._last is None else self._last) < 0
        if back.any():
            at = int(np.argmax(back))
            before = times[at - 1] if at else self._last
            where = (int(chunk.rows[at]), int(chunk.lines[at]))
            raise out_of_order(self._options, self._found["arrival"], where, times[at], before)
        self._last = times[-1]
        if self._ns is None:
            self._seen.append((understood, np.stack([chunk.rows, chunk.lines], axis=1)))
            if sum(len(places) for _, places in self._seen) >= DECIDING_ROWS:
                self._decide()
            return None
        start, ns_per_time = self._ns
        at_s = (times - start) * ns_per_time / 1e9
        start_s, end_s = self._window_s
        self.wants_more = bool(at_s[-1] < end_s + _MARGIN_S)
        self._surely = (at_s >= start_s + _MARGIN_S) & (at_s < end_s - _MARGIN_S)
        kept: NDArray[np.bool_] = (at_s >= start_s - _MARGIN_S) & (at_s < end_s + _MARGIN_S)
        return kept

    def _decide(self) -> None:
        """Start and unit of the file's times, as the assembly of these rows alone finds them."""
        needed = ("arrival", "prompt_tokens", "output_tokens")
        cells = {name: np.concatenate([seen[name] for seen, _ in self._seen]) for name in needed}
        places = np.concatenate([places for _, places in self._seen])
        self._seen = []
        found = {name: self._found[name] for name in needed}
        arrival_ns = assemble(cells, places, found, self._options, [])["arrival_ns"]
        times = cells["arrival"][cells["output_tokens"] > 0]
        span, span_ns = float(times[-1] - times[0]), float(arrival_ns[-1] - arrival_ns[0])
        if span:
            ns_per_time = span_ns / span
            self._ns = float(times[0]) - float(arrival_ns[0]) / ns_per_time, ns_per_time
