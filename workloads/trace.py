"""A trace in columns: what arrives, when, how long its prompt is and how long its answer will be.

Columns instead of objects: a million requests are a few arrays, a sweep shares them between its points, and scaling
the rate is one multiplication. `Request` objects are made one at a time as they arrive.

Closed loops (sessions with thinking users, a fixed number of clients) are plain data too: a request with
`after_row[i] = j >= 0` arrives `think_ns[i]` after the answer of row j has ended, however it ended; with `joins[i]` it
waits for the answers of these rows too, so that programs may fork (many rows after one) and join. j < i always, so
whoever drives a trace can walk it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.edges.errors import InputError
from policies.work.request import NS_PER_S, Request
from workloads.ragged import RaggedColumn, RangeColumn

Column = NDArray[np.int64]

_COLUMNS = (
    "arrival_ns",
    "prompt_tokens",
    "output_tokens",
    "max_output_tokens",
    "prefix_hashes",
    "session",
    "turn",
    "priority",
    "slo",
    "acceptance",
    "tenant",
    "program",
    "predicted_tokens",
    "abort_ns",
    "prompt_ids",
    "after_row",
    "think_ns",
    "joins",
)
_INTEGER_COLUMNS = (
    "arrival_ns",
    "prompt_tokens",
    "output_tokens",
    "max_output_tokens",
    "turn",
    "priority",
    "predicted_tokens",
    "abort_ns",
    "after_row",
    "think_ns",
)


class TraceError(InputError):
    """A trace that cannot be read or makes no sense; the message names file, row, column, found and expected."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in arrival order (ties keep file order). All columns have one entry per request.

    arrival_ns: nanoseconds since the trace's start, never decreasing. For a request that waits for another one's
        answer (`after_row`) it is the moment it would arrive at if answers took no time: a lower bound.
    prompt_tokens, output_tokens: at least 1.
    output_tokens: the true output length, which policies never see. max_output_tokens: the declared limit
        (the true length where a trace declares none).
    prefix_hashes: per request a tuple of hashes, each standing for `hash_tokens` prompt tokens.
    session, slo, tenant, program: per request a name or None. turn: 0 for the first request of its session.
    predicted_tokens: how long somebody predicts each answer to be; 0 where nobody does.
    priority: lower is more urgent, 0 by default.
    acceptance: with speculation, the chance that a draft of the request is accepted where those before it were.
    abort_ns: moment at which the client gives up, -1 for never. Counted from arrival_ns: a driver that moves an
        arrival (closed loop) moves the abort with it; `timeout_ns` gives the difference.
    prompt_ids: per request the prompt's token ids where the trace carries them.
    after_row, think_ns: closed loop. -1 in after_row: arrives at arrival_ns. Otherwise an earlier row: arrives
        think_ns after that row's answer has ended. joins: further rows that it waits for, per request a tuple of
        earlier ones; none where after_row is -1.
    history: "in_prompt" where a turn's prompt may hold its session so far (see workloads.generating.shared_prefixes),
        "none" where no turn's prompt does.
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
    turn: Column | None = None
    after_row: Column | None = None
    think_ns: Column | None = None
    history: str = "in_prompt"
    acceptance: NDArray[np.float64] | None = None
    tenant: Sequence[str | None] | None = None
    program: Sequence[str | None] | None = None
    predicted_tokens: Column | None = None
    joins: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for name in _INTEGER_COLUMNS:
            if (column := getattr(self, name)) is not None:
                object.__setattr__(self, name, np.asarray(column, np.int64))
        for name in _COLUMNS:
            column = getattr(self, name)
            if column is not None and len(column) != len(self.arrival_ns):
                raise TraceError(f"{self.name}: column {name}: found {len(column)} entries, expected {len(self)}")
        self._expect("arrival_ns", np.diff(self.arrival_ns, prepend=0) < 0, "a time of 0 or more, never decreasing")
        for name in ("prompt_tokens", "output_tokens", "max_output_tokens"):
            self._expect(name, getattr(self, name) < 1, "at least 1 token")
        if self.acceptance is not None:
            object.__setattr__(self, "acceptance", np.asarray(self.acceptance, np.float64))
            self._expect("acceptance", ~((self.acceptance >= 0) & (self.acceptance <= 1)), "0 to 1")
        if (self.after_row is None) != (self.think_ns is None):
            raise TraceError(f"{self.name}: after_row and think_ns go together; found only one of them")
        if self.after_row is not None and self.think_ns is not None:
            wrong = (self.after_row >= np.arange(len(self))) | (self.after_row < -1)
            self._expect("after_row", wrong, "an earlier row, or -1 for none")
            self._expect("think_ns", (self.think_ns < 0) & (self.after_row >= 0), "0 ns or more")
        for row, others in enumerate(self.joins or ()):
            after = -1 if self.after_row is None else int(self.after_row[row])
            if len(others) and (after < 0 or any(not 0 <= other < row or other == after for other in others)):
                raise TraceError(
                    f"{self.name}, row {row}, column joins: found {list(others)[:9]} beside after_row {after}, "
                    "expected an after_row and earlier rows other than it"
                )

    def _expect(self, name: str, wrong: NDArray[np.bool_], expected: str) -> None:
        if wrong.any():
            row = int(np.argmax(wrong))
            found = getattr(self, name)[row]
            raise TraceError(f"{self.name}, row {row}, column {name}: found {found}, expected {expected}")

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def longest(self) -> int:
        """Most tokens of any request, prompt and declared output; 1 where there is none."""
        return int((self.prompt_tokens + self.max_output_tokens).max()) if len(self) else 1

    @property
    def closed_loop(self) -> bool:
        """Whether some request waits for another one's answer."""
        return self.after_row is not None and bool((self.after_row >= 0).any())

    def request(self, row: int) -> Request:
        """The request of one row, as the scheduler takes it; its id is the row."""
        session = self.session[row] if self.session is not None else None
        program = self.program[row] if self.program is not None else None
        return Request(
            row,
            int(self.arrival_ns[row]),
            int(self.prompt_tokens[row]),
            int(self.max_output_tokens[row]),
            self.prefix_hashes[row] if self.prefix_hashes is not None else (),
            self.hash_tokens,
            session,
            int(self.priority[row]) if self.priority is not None else 0,
            self.slo[row] if self.slo is not None else None,
            self.tenant[row] if self.tenant is not None else None,
            session if program is None else program,
            int(self.predicted_tokens[row]) if self.predicted_tokens is not None else 0,
        )

    def plain_lengths(self) -> tuple[memoryview, memoryview] | None:
        """Prompt lengths and declared limits, each entry an `int`, where a request of this trace has nothing else
        beside its arrival: for whoever makes every one of them. None otherwise."""
        others = (self.prefix_hashes, self.session, self.priority, self.slo, self.tenant, self.program)
        if any(column is not None for column in (*others, self.predicted_tokens)) or self.hash_tokens:
            return None
        return self.prompt_tokens.data, self.max_output_tokens.data

    def timeout_ns(self, row: int) -> int:
        """How long after its arrival the client of this row gives up; -1 for never."""
        if self.abort_ns is None or self.abort_ns[row] < 0:
            return -1
        return int(self.abort_ns[row] - self.arrival_ns[row])

    def followers(self) -> dict[int, list[int]]:
        """Row -> the rows that wait for its answer, in row order; empty for an open-loop trace."""
        waiting: dict[int, list[int]] = {}
        if self.after_row is not None:
            for row in np.flatnonzero(self.after_row >= 0).tolist():
                waiting.setdefault(int(self.after_row[row]), []).append(row)
                for other in set(self.joins[row]) if self.joins is not None else ():
                    waiting.setdefault(other, []).append(row)
        return waiting

    def head(self, limit: int) -> Trace:
        """The first `limit` requests."""
        return self.take(slice(0, limit))

    def scaled(self, rate_scale: float) -> Trace:
        """The same requests arriving `rate_scale` times as fast: arrival and think times divided, time-outs kept."""
        if not 0 < rate_scale < float("inf"):
            raise TraceError(f"rate scale: found {rate_scale}, expected a number above 0")
        arrival_ns = np.rint(self.arrival_ns / rate_scale).astype(np.int64)
        abort_ns = self.abort_ns
        if abort_ns is not None:
            abort_ns = np.where(abort_ns >= 0, arrival_ns + (abort_ns - self.arrival_ns), -1)
        think_ns = None if self.think_ns is None else np.rint(self.think_ns / rate_scale).astype(np.int64)
        return replace(self, arrival_ns=arrival_ns, abort_ns=abort_ns, think_ns=think_ns)

    def with_timeout(self, timeout_s: float) -> Trace:
        """The same requests, each given up by its client `timeout_s` after it arrived if it has not ended by then."""
        if not 0 < timeout_s < 1e9:
            raise TraceError(f"timeout: found {timeout_s}, expected a number of seconds above 0")
        abort_ns = self.arrival_ns + round(timeout_s * NS_PER_S)
        if self.abort_ns is not None:
            abort_ns = np.where(self.abort_ns >= 0, np.minimum(abort_ns, self.abort_ns), abort_ns)
        return replace(self, abort_ns=abort_ns)

    def take(self, rows: slice | Column) -> Trace:
        """The given rows (a slice or ascending numbers). A request whose predecessor is left out becomes open-loop."""
        numbers = np.arange(len(self))[rows] if isinstance(rows, slice) else np.asarray(rows, np.int64)
        columns = {name: _cut(getattr(self, name), numbers) for name in _COLUMNS}
        if columns["after_row"] is not None:
            new_row = np.full(len(self) + 1, -1, np.int64)  # the extra last entry answers for -1
            new_row[numbers] = np.arange(len(numbers))
            columns["after_row"] = new_row[columns["after_row"]]
            if columns["joins"] is not None:
                columns["joins"] = _kept_joins(columns["after_row"], columns["joins"], new_row)
        return replace(self, **columns)

    def between(self, start_s: float, end_s: float) -> Trace:
        """The requests that arrive in [start_s, end_s), with start_s as the new trace's time 0."""
        if not 0 <= start_s < end_s:
            raise TraceError(f"window: found {start_s} to {end_s} s, expected 0 or more and an end after the start")
        start_ns = round(start_s * NS_PER_S)
        last = int(np.searchsorted(self.arrival_ns, min(round(min(end_s, 1e9) * NS_PER_S), np.iinfo(np.int64).max)))
        rows = np.arange(int(np.searchsorted(self.arrival_ns, start_ns)), last)
        if not len(rows):
            raise TraceError(f"{self.name}: found no request between {start_s} and {end_s} s, expected a wider window")
        return self.take(rows).rearranged(np.arange(len(rows)), self.arrival_ns[rows] - start_ns)

    def rearranged(self, order: Column, arrival_ns: Column) -> Trace:
        """The rows in another order (a permutation or part), at other arrival times; time-outs stay relative.

        after_row is not followed: whoever moves rows of a closed loop sets it.
        """
        columns = {name: _cut(getattr(self, name), order) for name in _COLUMNS}
        if columns["abort_ns"] is not None:
            patience_ns = columns["abort_ns"] - columns["arrival_ns"]
            columns["abort_ns"] = np.where(columns["abort_ns"] >= 0, arrival_ns + patience_ns, -1)
        columns["arrival_ns"] = arrival_ns
        return replace(self, **columns)

    def facts(self) -> dict[str, Any]:
        """Name, form and size, and what its reader had to say, as plain data for config.json."""
        return {
            "name": self.name,
            "format": self.source_format,
            "requests": len(self),
            "span_s": float(self.arrival_ns[-1] - self.arrival_ns[0]) / 1e9 if len(self) else 0.0,
            "notes": list(self.notes),
            "provenance": dict(self.provenance),
        }

    def same_requests(self, other: Trace) -> bool:
        """Whether both hold equal requests: every column, not the name, notes and provenance."""
        return self.hash_tokens == other.hash_tokens and all(
            _equal(getattr(self, name), getattr(other, name)) for name in _COLUMNS
        )


def _kept_joins(after_row: Column, joins: Sequence[Sequence[int]], new_row: Column) -> list[tuple[int, ...]]:
    """Joins in new numbers, without rows that were left out; a row whose after_row was takes another of them for it."""
    kept = []
    for row, others in enumerate(joins):
        left = [int(new_row[other]) for other in others if new_row[other] >= 0]
        if after_row[row] < 0 and left:
            after_row[row] = left.pop(0)
        kept.append(tuple(left))
    return kept


def _cut(column: Any, rows: Column) -> Any:
    if column is None:
        return None
    if isinstance(column, np.ndarray):
        return column[rows]
    if isinstance(column, RaggedColumn | RangeColumn):
        return column.take(rows)
    return [column[row] for row in rows.tolist()]


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is None and other is None
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return len(one) == len(other) and all(a == b for a, b in zip(one, other))
