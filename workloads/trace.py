"""A trace in columns: what arrives, when, how long its prompt is and how long its answer will be.

Columns instead of objects: a million requests are a few arrays, a sweep shares them between its points, and scaling
the rate is one multiplication. `Request` objects are made one at a time as they arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from policies.request import Request

Column = NDArray[np.int64]


class TraceError(ValueError):
    """A trace that cannot be read or makes no sense; the message names file, row, column, found and expected."""


@dataclass(frozen=True)
class Trace:
    """Requests in arrival order (ties keep file order). All columns have one entry per request.

    arrival_ns: nanoseconds since the trace's start, never decreasing. prompt_tokens, output_tokens: at least 1.
    output_tokens: the true output length, which policies never see. max_output_tokens: the declared limit
        (the true length where a trace declares none).
    prefix_hashes: per request a tuple of hashes, each standing for `hash_tokens` prompt tokens.
    session, slo: per request a name or None. priority: lower is more urgent, 0 by default.
    abort_ns: moment at which the client gives up, -1 for never.
    prompt_ids: per request the prompt's token ids where the trace carries them.
    notes: what the reader had to say (rows skipped and why), one sentence each.
    """

    name: str
    arrival_ns: Column
    prompt_tokens: Column
    output_tokens: Column
    max_output_tokens: Column
    prefix_hashes: Sequence[tuple[int, ...]] | None = None
    hash_tokens: int = 0
    session: Sequence[str | None] | None = None
    priority: Column | None = None
    slo: Sequence[str | None] | None = None
    abort_ns: Column | None = None
    prompt_ids: Sequence[Sequence[int]] | None = None
    source_format: str = "memory"
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def request(self, row: int) -> Request:
        """The request of one row, as the scheduler takes it; its id is the row."""
        return Request(
            row,
            int(self.arrival_ns[row]),
            int(self.prompt_tokens[row]),
            int(self.max_output_tokens[row]),
            self.prefix_hashes[row] if self.prefix_hashes is not None else (),
            self.hash_tokens,
            self.session[row] if self.session is not None else None,
            int(self.priority[row]) if self.priority is not None else 0,
            self.slo[row] if self.slo is not None else None,
        )

    def head(self, limit: int) -> Trace:
        """The first `limit` requests."""
        return self._rows(slice(0, limit))

    def scaled(self, rate_scale: float) -> Trace:
        """The same requests arriving `rate_scale` times as fast (arrival times divided, client give-ups kept relative)."""
        if not rate_scale > 0:
            raise TraceError(f"rate scale: found {rate_scale}, expected a number above 0")
        arrival_ns = np.rint(self.arrival_ns / rate_scale).astype(np.int64)
        abort_ns = self.abort_ns
        if abort_ns is not None:
            abort_ns = np.where(abort_ns >= 0, arrival_ns + (abort_ns - self.arrival_ns), -1)
        return replace(self, arrival_ns=arrival_ns, abort_ns=abort_ns)

    def _rows(self, rows: slice) -> Trace:
        def cut(column):  # type: ignore[no-untyped-def]
            return None if column is None else column[rows]

        return replace(
            self,
            **{
                name: cut(getattr(self, name))
                for name in (
                    "arrival_ns", "prompt_tokens", "output_tokens", "max_output_tokens", "prefix_hashes",
                    "session", "priority", "slo", "abort_ns", "prompt_ids",
                )
            },
        )
