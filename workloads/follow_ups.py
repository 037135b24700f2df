"""Who may come next in a closed loop: rows that wait for the answers of others, one or several (a join)."""

from __future__ import annotations

from collections.abc import Iterable

from workloads.trace import Trace


class FollowUps:
    """The waiting rows of a trace, while it is driven. Both worlds ask `free` as answers end."""

    def __init__(self, trace: Trace) -> None:
        self._followers = trace.followers()
        self._awaited: dict[int, int] = {}
        """Of rows that wait for more than one answer: how many of these have not ended."""
        if trace.joins is not None:
            self._awaited = {row: 1 + len(set(others)) for row, others in enumerate(trace.joins) if len(others)}

    def __bool__(self) -> bool:
        return bool(self._followers)

    def free(self, row: int) -> Iterable[int]:
        """The rows that wait for nothing else now that the answer of `row` has ended, in row order."""
        following = self._followers.get(row, ())
        if not self._awaited:
            return following
        return [follower for follower in following if self._was_last(follower)]

    def waiting(self) -> set[int]:
        """All rows that wait for somebody when the trace begins."""
        return set().union(*self._followers.values()) if self._followers else set()

    def _was_last(self, follower: int) -> bool:
        if follower not in self._awaited:
            return True
        self._awaited[follower] -= 1
        return not self._awaited[follower]
