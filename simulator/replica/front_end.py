"""The front end of an engine: what a request passes before it reaches the scheduler, and its tokens on their way back.

Two parts on either side of the engine. A delay (HTTP, IPC) that only the client waits for; and the time of one
processor a replica, for which requests queue on the way in (tokenising) and tokens on the way out (detokenising,
streaming). Tables of a run with a front end tell arrivals and tokens as the client sees them, iterations as the engine
does.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from policies import Ns

if TYPE_CHECKING:
    import pyarrow as pa

    from metrics import RunTables
    from profiler.operators.engine_terms import EngineTerms
    from workloads import Trace

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class FrontEndTimes:
    """Nanoseconds; meanings as `EngineTerms` has them for front_before_us and the others."""

    before_ns: float
    after_ns: float
    request_ns: float
    prompt_token_ns: float
    token_ns: float

    @classmethod
    def of(cls, terms: EngineTerms) -> FrontEndTimes | None:
        """None for an engine without a front end."""
        names = ("front_before_us", "front_after_us", "front_request_us", "front_prompt_token_us", "front_token_us")
        times = cls(*(getattr(terms, name) * 1e3 for name in names))
        return times if times != cls(0.0, 0.0, 0.0, 0.0, 0.0) else None

    def scaled(self, factor: float) -> FrontEndTimes:
        """All of it this many times as long."""
        return FrontEndTimes(*(factor * ns for ns in vars(self).values()))


class FrontEnd:
    """The front ends of a run's replicas: as many processors as replicas, one queue in the order of sending."""

    def __init__(self, times: FrontEndTimes, replicas: int) -> None:
        self.times = times
        self.after_ns = round(times.after_ns)
        self.sent_ns: dict[int, Ns] = {}
        self._free_ns = [0] * replicas
        self._last_ns = 0

    def enter(self, row: int, now: Ns, prompt_tokens: int) -> Ns:
        """The client of a row sends its request now: when it reaches the engine, never before one sent earlier."""
        self.sent_ns[row] = now
        times = self.times
        busy = round(times.request_ns + prompt_tokens * times.prompt_token_ns)
        done = max(now, self._free_ns[0]) + busy
        heapq.heapreplace(self._free_ns, done)
        self._last_ns = max(self._last_ns, done + round(times.before_ns))
        return self._last_ns

    def into_engine(self, trace: Trace) -> Trace:
        """An open-loop trace as it reaches the engine; clients give up when they would have."""
        prompts = trace.prompt_tokens.tolist()
        reached = [self.enter(row, now, prompts[row]) for row, now in enumerate(trace.arrival_ns.tolist())]
        arrival_ns = np.array(reached, np.int64)
        abort_ns = trace.abort_ns
        if abort_ns is not None:
            abort_ns = np.where(abort_ns >= 0, np.maximum(abort_ns, arrival_ns), -1)
        return replace(trace, arrival_ns=arrival_ns, abort_ns=abort_ns)

    def seen_by_clients(self, tables: RunTables) -> RunTables:
        """The tables with arrivals, tokens and ends at the moments that clients know of."""
        from metrics import RunTables

        delivered = _Deliveries(tables, self.times)
        requests, tokens = tables.requests, tables.tokens
        rows, replicas = tables.column("requests", "request"), tables.column("requests", "replica")
        sent = np.array([self.sent_ns[row] for row in rows.tolist()], np.float64)
        moments: dict[str, NDArray[np.float64]] = {"arrival_s": sent / 1e9}
        for name in ("first_token_s", "finished_s"):
            moments[name] = delivered.at(replicas, tables.column("requests", name))
        for name, values in moments.items():
            requests = _with_column(requests, name, values)
        times = delivered.at(tables.column("tokens", "replica"), tables.column("tokens", "time_s"))
        changed = {name: tables.table(name) for name in ("iterations", "segments", "stages")}
        changed |= {"requests": requests, "tokens": _with_column(tokens, "time_s", times)}
        return RunTables(changed, tables.config)


class _Deliveries:
    """When tokens that left an engine at some moment reach their clients, by replica."""

    def __init__(self, tables: RunTables, times: FrontEndTimes) -> None:
        self.after_ns = round(times.after_ns)
        self._late: dict[int, tuple[Ints, Ints]] = {}
        if not times.token_ns:
            return
        replica, ends = tables.column("iterations", "replica"), tables.column_ns("iterations", "end_s")
        sampled = tables.column("iterations", "sampled")
        for number in np.unique(replica).tolist():
            own = np.flatnonzero(replica == number)
            own = own[np.argsort(ends[own], kind="stable")]
            busy = np.rint(sampled[own] * times.token_ns).astype(np.int64)
            done = np.cumsum(busy)
            # Lindley: the processor ends a step's tokens at the latest beginning of a busy time plus all work since.
            over = done + np.maximum.accumulate(ends[own] - (done - busy))
            # A step's tokens leave one after the other: in the middle of them, on average.
            self._late[number] = ends[own], over - busy // 2 - ends[own]

    def at(self, replica: NDArray[np.int64], moments_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds in, seconds out; NaN stays."""
        known = ~np.isnan(moments_s)
        ns = np.rint(np.where(known, moments_s, 0.0) * 1e9).astype(np.int64) + self.after_ns
        for number, (ends, late) in self._late.items():
            own = replica == number
            step = np.searchsorted(ends, ns[own] - self.after_ns, side="right") - 1
            ns[own] += np.where(step >= 0, late[np.maximum(step, 0)], 0)
        return np.where(known, ns / 1e9, np.nan)


def _with_column(table: pa.Table, name: str, values: NDArray[np.float64]) -> pa.Table:
    """A pyarrow table with one column of float64 replaced."""
    from pyarrow import array, float64

    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(index), array(values, float64()))
