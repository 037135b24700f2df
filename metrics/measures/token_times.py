"""Every token's time, without one row per token.

Decodes in lockstep share one list of token times, their cohort's; a request keeps (cohort, from, to) segments. The gaps
between tokens (TBT) of a whole run are then the cohorts' gaps, each as often as segments cover it, and the few gaps
between one segment of a request and its next, such as a preempted request's wait. Tokens of one request at one moment,
which a speculating engine delivers together, have one gap. Counting the cover takes a
difference array: one addition where a segment starts, one where it ends, one running sum over all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrics.run_folder.columns import MetricsError
from metrics.run_folder.tables import RunTables

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Gaps(NamedTuple):
    """Gaps between tokens in nanoseconds and how many times each was seen."""

    ns: Ints
    count: Ints  # type: ignore[assignment]


class TokenTimes:
    """The token times of one run.

    times_ns: all cohorts' times, one cohort after the other. A segment covers times_ns[first:last].
    request_row: per segment, the row of its request in the table of requests.
    """

    def __init__(self, run: RunTables) -> None:
        self.times_ns = run.column_ns("tokens", "time_s")
        self.gaps_ns = np.diff(self.times_ns, prepend=self.times_ns[:1])
        segments = {name: run.column("segments", name) for name in ("request", "from_step", "to_step")}
        requests = run.column("requests", "request")
        self.num_requests = len(requests)
        order = np.argsort(requests, kind="stable")
        at = np.searchsorted(requests, segments["request"], sorter=order)
        self.request_row = order[np.minimum(at, max(len(order) - 1, 0))] if len(order) else at
        if len(at) and (not len(requests) or not np.array_equal(requests[self.request_row], segments["request"])):
            raise MetricsError("segments: found tokens of a request that the table of requests lacks")
        base, length = cohort_rows(run, run.column("segments", "replica"), run.column("segments", "cohort"))
        if (length == 0).any():
            raise MetricsError("segments: found a cohort that the table of tokens lacks")
        self.first = base + segments["from_step"]
        self.last = base + segments["to_step"]
        wrong = (segments["from_step"] < 0) | (segments["to_step"] <= segments["from_step"])
        wrong |= segments["to_step"] > length
        if wrong.any():
            row = int(np.argmax(wrong))
            raise MetricsError(
                f"segments: row {row}: found steps {segments['from_step'][row]} to {segments['to_step'][row]}, "
                f"expected a part of its cohort's {length[row]} steps"
            )
        self._find_bridges()

    def _find_bridges(self) -> None:
        follows = np.zeros(len(self.request_row), dtype=bool)
        follows[1:] = self.request_row[1:] == self.request_row[:-1]
        self.bridges = np.flatnonzero(follows)
        """Segments that continue an earlier one of the same request."""
        self.bridge_ns = self.times_ns[self.first[self.bridges]] - self.times_ns[self.last[self.bridges - 1] - 1]

    def split(self, parts: Sequence[Ints]) -> Iterator[TokenTimes]:
        """The token times of each part of the requests alone, given by their rows in ascending order: work goes with a
        part's own tokens, not with the run's. Rows and times are numbered within the part."""
        by_request = np.argsort(self.request_row, kind="stable")
        begins = np.searchsorted(self.request_row, np.arange(self.num_requests + 1), sorter=by_request)
        for rows in parts:
            counts = begins[rows + 1] - begins[rows]
            segments = by_request[_ranges(begins[rows], counts)]
            first, length = self.first[segments], self.last[segments] - self.first[segments]
            steps = np.unique(_ranges(first, length))
            part = TokenTimes.__new__(TokenTimes)
            part.times_ns, part.gaps_ns = self.times_ns[steps], self.gaps_ns[steps]
            part.num_requests = len(rows)
            part.request_row = np.repeat(np.arange(len(rows)), counts)
            part.first = np.searchsorted(steps, first)
            part.last = part.first + length
            part._find_bridges()
            yield part

    def tokens_per_request(self) -> Ints:
        return self._per_request(self.request_row, self.last - self.first)

    def cover(self, wanted: Bools | None = None) -> Ints:
        """For each of times_ns, how many requests (or wanted ones) got a token then."""
        if wanted is None:
            return self._cover(self.first, self.last)
        segments = wanted[self.request_row]
        return self._cover(self.first[segments], self.last[segments])

    def delivered(self, from_ns: int, wanted: Bools | None = None) -> int:
        """Tokens delivered at or after a moment, to everybody or to the wanted requests."""
        return int(self.cover(wanted)[self.times_ns >= from_ns].sum())

    def gaps(self, wanted: Bools) -> Gaps:
        """All gaps of the wanted requests (one flag per row of the table of requests)."""
        segments = wanted[self.request_row]
        count = self._cover(self.first[segments] + 1, self.last[segments])
        # Tokens that came together with the one before are no gap of their own.
        seen = (count > 0) & (self.gaps_ns > 0)
        bridges = self.bridge_ns[wanted[self.request_row[self.bridges]]]
        return Gaps(
            np.concatenate([self.gaps_ns[seen], bridges]),
            np.concatenate([count[seen], np.ones(len(bridges), dtype=np.int64)]),
        )

    def gaps_above(self, bound_ns: int) -> Ints:
        """Per request, how many of its gaps are longer than the bound."""
        above = np.concatenate([[0], np.cumsum(self.gaps_ns > bound_ns)])
        within = self._per_request(self.request_row, above[self.last] - above[self.first + 1])
        return within + self._per_request(self.request_row[self.bridges], self.bridge_ns > bound_ns)

    def of_request(self, row: int) -> Ints:
        """The token times of one request, by its row in the table of requests."""
        parts = [self.times_ns[self.first[s] : self.last[s]] for s in np.flatnonzero(self.request_row == row)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _cover(self, first: Ints, last: Ints) -> Ints:
        """How many of the half-open ranges cover each position of times_ns."""
        size = len(self.times_ns) + 1
        change = np.bincount(first, minlength=size) - np.bincount(last, minlength=size)
        return np.cumsum(change)[:-1]

    def _per_request(self, rows: Ints, values: NDArray[np.generic]) -> Ints:
        # Weights make bincount count in doubles: exact below 2^53, and no run has that many tokens.
        return np.bincount(rows, weights=values, minlength=self.num_requests).astype(np.int64)


def _ranges(first: Ints, length: Ints) -> Ints:
    """The numbers first, first + 1, ... of every range, one range after the other."""
    ends = np.cumsum(length)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - ends + length, length)


def cohort_rows(run: RunTables, replica: Ints, cohort: Ints) -> tuple[Ints, Ints]:
    """For each (replica, cohort), the row of the table of tokens where it starts and how many steps it has.

    A cohort that the table lacks has 0 steps.
    """
    keys = _keys(run.column("tokens", "replica"), run.column("tokens", "cohort"))
    step = run.column("tokens", "step")
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.empty(0, np.int64)
    lengths = np.diff(np.append(starts, len(keys)))
    if not np.array_equal(step, np.arange(len(keys)) - np.repeat(starts, lengths)):
        raise MetricsError("tokens: found steps out of order, expected each cohort's rows together, from step 0 up")
    cohorts = keys[starts]
    if len(np.unique(cohorts)) != len(cohorts):
        raise MetricsError("tokens: found a cohort twice, expected each cohort's rows together")
    wanted = _keys(replica, cohort)
    if not len(cohorts):
        return np.zeros(len(wanted), dtype=np.int64), np.zeros(len(wanted), dtype=np.int64)
    order = np.argsort(cohorts, kind="stable")
    found = order[np.minimum(np.searchsorted(cohorts, wanted, sorter=order), len(order) - 1)]
    known = cohorts[found] == wanted
    return np.where(known, starts[found], 0), np.where(known, lengths[found], 0)


def _keys(replica: NDArray[np.integer], cohort: NDArray[np.integer]) -> Ints:
    """Replica and cohort number in one integer."""
    return replica.astype(np.int64) * (1 << 44) + cohort
