"""One answer on its way to its client: ids become text, text becomes chunks, and chunks are written step by step.

All tokens of a step are written in one go, without a task or an awaited write for each: `Outlet` drives the server's
`send` by hand as long as it takes bytes at once. A client that reads slowly holds up nobody but itself.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, MutableMapping
from typing import Any

from policies.work.request import Ns
from workloads.door.contract import Ask, Ended
from workloads.door.replies import Reply, error_event

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

WATCHED_S = 1.0
"""How often somebody looks whether a slow reader has gone on."""


class Outlet:
    """Bytes to one client, in order.

    stuck_since: the moment from which the client has taken nothing, None while it takes all.
    """

    def __init__(self, send: Send, loop: asyncio.AbstractEventLoop) -> None:
        self._send, self._loop = send, loop
        self._held: list[bytes] = []
        self._last = False
        self._going_on: asyncio.Task[None] | None = None
        self.stuck_since: float | None = None

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Write now, or behind what the client has not taken yet."""
        if self._going_on is not None:
            self._held.append(data)
            self._last = self._last or last
            return
        sending: Any = self._send({"type": "http.response.body", "body": data, "more_body": not last})
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        self.stuck_since = self._loop.time()
        self._going_on = self._loop.create_task(self._go_on(sending, waits_for))

    async def _go_on(self, sending: Coroutine[Any, Any, None], waits_for: Any) -> None:
        await _resumed(sending, waits_for)
        while self._held:
            data, last = b"".join(self._held), self._last
            self._held.clear()
            self.stuck_since = self._loop.time()
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self.stuck_since, self._going_on = None, None

    async def flushed(self) -> None:
        """Returns once everything has been taken."""
        while (task := self._going_on) is not None:
            await asyncio.wait({task})

    def drop(self) -> None:
        """Write nothing any more."""
        if self._going_on is not None:
            self._going_on.cancel()


@types.coroutine
def _resumed(sending: Coroutine[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, None]:
    """Go on with a coroutine that was begun by hand and now waits for `waits_for`."""
    got: Any = None
    error: BaseException | None = None
    while True:
        try:
            got, error = (yield waits_for), None
        except BaseException as thrown:
            error = thrown
        try:
            waits_for = sending.send(got) if error is None else sending.throw(error)
        except StopIteration:
            return


class Answer:
    """The answer to one request, from its acceptance to its end.

    accepted: set once it is known whether the engine takes it; arrival_ns, replica: when and where. done: set at its
    end, however it ends; ended: then how. error: OpenAI's form of what went wrong, with its HTTP status. text: all of
    it, for who does not stream.
    """

    def __init__(self, ask: Ask, reply: Reply, decode: Callable[[int], str], stop_ids: frozenset[int]) -> None:
        self.ask, self.reply = ask, reply
        self._decode = decode
        self._stop_ids = frozenset() if ask.ignore_eos else stop_ids
        self._stops = reply.wanted.stops
        self._held = ""
        self.text: list[str] = []
        self.tokens = 0
        self.arrival_ns: Ns = ask.received_ns
        self.replica = 0
        self.last_ns: Ns = -1
        self.outlet: Outlet | None = None
        self._early: list[bytes] = []
        self.accepted = asyncio.Event()
        self.done = asyncio.Event()
        self.ended: Ended | None = None
        self.finish = ""
        self.error: tuple[int, Mapping[str, Any]] | None = None
        self.retry_s: int | None = None

    @property
    def streams(self) -> bool:
        return self.reply.wanted.stream

    def take(self, token: int, *, last: bool, by_stop: bool = False) -> bool:
        """One more token; last: nothing comes after it; by_stop: since the model ended there.

        Returns whether a stop text ends the answer with it.
        """
        self.tokens += 1
        at_stop = token in self._stop_ids
        text = "" if at_stop else self._decode(token)
        stopped = False
        if self._stops:
            text, stopped = self._before_stop(text, last or at_stop)
        finish = None
        if last or stopped:
            finish = self.finish = "stop" if stopped or at_stop or by_stop else "length"
        self._say(text, finish)
        return stopped

    def _before_stop(self, text: str, last: bool) -> tuple[str, bool]:
        """The text that may be said now, and whether a stop text came; what may become one is held back."""
        text = self._held + text
        at = min((found for stop in self._stops if (found := text.find(stop)) >= 0), default=-1)
        if at >= 0:
            self._held = ""
            return text[:at], True
        hold = 0
        if not last:
            hold = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :] if hold else ""
        return text[: len(text) - hold] if hold else text, False

    def _say(self, text: str, finish: str | None) -> None:
        if self.streams:
            self._early.append(self.reply.chunk(text, finish, self.tokens))
        else:
            self.text.append(text)

    def close_text(self, finish: str) -> None:
        """The answer ends without another token: a stream gets a chunk that says why, with what was held back."""
        self.finish = finish
        self._say(self._held, finish)
        self._held = ""

    def end_stream(self) -> None:
        """Write what ends the stream: its usage, or what went wrong."""
        if self.outlet is not None:
            end = self.reply.last(self.tokens) if self.error is None else error_event(self.error[1])
            self._early.append(end)
            self.flush(last=True)

    def flush(self, *, last: bool = False) -> None:
        """Write what this step has brought."""
        if self.outlet is not None and self._early:
            data = self._early[0] if len(self._early) == 1 else b"".join(self._early)
            self._early.clear()
            self.outlet.write(data, last=last)


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that may be the beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
