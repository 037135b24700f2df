"""Who arrives when: a trace played into the cluster, open or closed loop, with clients that may give up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from simpy import Event

from policies import Ns, Request
from simulator.clock.virtual_time import ARRIVAL, Moment, Nanoseconds
from workloads import Trace
from workloads.follow_ups import FollowUps

if TYPE_CHECKING:
    from simulator.replica.front_end import FrontEnd

# A named tuple made without its own constructor, which costs more than all the rest of an arrival.
_new: Final = tuple.__new__
_Request: Final = Request


class Arrivals:
    """Plays a trace, or some rows of it after others (`play`). give_up(row) is called when a client's patience ends.

    front: the engine's front end, which a closed loop passes while it is played.

    Only the next arrival stands in the event queue, so a million requests cost no more than a hundred.
    """

    def __init__(
        self, env: Nanoseconds, trace: Trace, give_up: Callable[[int], None], front: FrontEnd | None = None
    ) -> None:
        self.env = env
        self.trace = trace
        self.submit: Callable[[Request, int], None]
        self.give_up = give_up
        self.front = front
        self.arrived = 0
        self._followers = FollowUps(trace)
        self._open: Sequence[int] = self._open_rows(trace) if self._followers else range(len(trace))
        # Views of the trace's own memory whose entries are integers: lists of these would take 36 bytes an entry.
        self._times, self._outputs = trace.arrival_ns.data, trace.output_tokens.data
        # Prompts and declared limits, where a request is nothing but these.
        self._plain = trace.plain_lengths()
        self._impatient = trace.abort_ns is not None
        self._next = 0
        # One event for all arrivals, put back into the queue each time.
        self._event: Moment | None = None

    def play(self, submit: Callable[[Request, int], None], rows: Sequence[int] | None = None) -> None:
        """Call submit(request, output_tokens) for every arrival from now on, in trace order at equal times.

        rows: those that arrive, in trace order; all of them unless given.
        """
        self.submit = submit
        if rows is not None:
            self._open = rows
        self._next = 0
        self._schedule_next()

    @staticmethod
    def _open_rows(trace: Trace) -> list[int]:
        assert trace.after_row is not None
        return [row for row, after in enumerate(trace.after_row.tolist()) if after < 0]

    def ended(self, row: int) -> None:
        """The answer of a row has ended, however: those who waited for it arrive after their think time."""
        for follower in self._followers.free(row) if self._followers else ():
            assert self.trace.think_ns is not None
            delay = int(self.trace.think_ns[follower])
            if self.front is not None:
                delay += self.front.after_ns
            Moment(self.env, delay, lambda event, row=follower: self._arrive(row, self.env.now), ARRIVAL)  # type: ignore[misc]

    def request(self, row: int, now: Ns) -> Request:
        """The request of a row that arrives now."""
        if self._plain is not None:
            prompts, limits = self._plain
            return _new(_Request, (row, now, prompts[row], limits[row], (), 0, None, 0, None, None, None, 0))
        request = self.trace.request(row)
        return request if request.arrival_ns == now else request._replace(arrival_ns=now)

    def _schedule_next(self) -> None:
        if self._next < len(self._open):
            at = self._times[self._open[self._next]]
            delay = at - self.env.now
            if self._event is None:
                self._event = Moment(self.env, delay, self._on_arrival, ARRIVAL)
            else:
                self._event.again(delay, self._on_arrival, ARRIVAL)

    def _on_arrival(self, event: Event) -> None:
        now = self.env.now
        times, rows = self._times, self._open
        while self._next < len(rows) and times[rows[self._next]] <= now:
            row = rows[self._next]
            self._next += 1
            self._arrive(row, now)
        self._schedule_next()

    def _arrive(self, row: int, now: Ns) -> None:
        if self.front is None:
            self._reach(row, now, now)
            return
        reached = self.front.enter(row, now, int(self.trace.prompt_tokens[row]))
        Moment(self.env, reached - now, lambda event: self._reach(row, reached, now), ARRIVAL)

    def _reach(self, row: int, now: Ns, sent: Ns) -> None:
        """A request that was sent at some moment reaches the engine now."""
        request = self.request(row, now)
        self.arrived += 1
        if self._impatient:
            patience = self.trace.timeout_ns(row)
            if patience >= 0:
                left = max(0, patience - (now - sent))
                Moment(self.env, left, lambda event: self.give_up(row), ARRIVAL)
        self.submit(request, self._outputs[row])
