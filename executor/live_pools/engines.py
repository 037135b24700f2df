"""The two live engines of a hand-over: each a `LiveEngine` with the scheduler that the simulator's replica would have.

The decoding side pulls, as in the simulator: a prompt that is done is announced, the decoding scheduler takes blocks
for it as soon as it has room, asks for the KV, and plans the request when it lies in its pool. Until then the
prefilling side keeps its blocks. Both policies are whatever was asked for; the ledgers' `handover` is the simulator's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from executor.live_pools.wire import Moved, Region
from executor.model.sampler import GREEDY
from executor.serving.live_engine import LiveEngine
from executor.serving.request_text import Text
from policies import Ns, Request, Track

NAP_S = 2e-4
"""How long an engine without work sleeps before it looks at its connection again."""


class Done(NamedTuple):
    """A request whose prompt is computed: what the decoding side has to know of it."""

    row: int
    request: tuple[Any, ...]
    ends_after: int
    ids: np.ndarray
    asked_ns: Ns


class Pull(NamedTuple):
    """The decoding side has room for a request's KV."""

    row: int


class Here(NamedTuple):
    """A request's KV lies in the shared region. begun_ns: since when it has been on its way; copied_ns: how long the
    copy took."""

    row: int
    begun_ns: Ns
    copied_ns: Ns


class Taken(NamedTuple):
    """The region may be used again."""

    row: int


class Ended(NamedTuple):
    """A request has ended on the decoding side."""

    row: int
    status: str
    reason: str
    output: list[int]
    finished_ns: Ns
    moved: Moved | None


class Stop(NamedTuple):
    """No further request will come."""


class PrefillEngine(LiveEngine):
    """Takes arrivals, computes prompts with their first tokens, and hands over whatever is longer.

    ended: row -> how the request ended on the decoding side.
    """

    connection: Connection
    region: Region

    def begin(self, connection: Connection, region: Region) -> None:
        """What a hand-over needs, before `run`."""
        self.connection, self.region = connection, region
        self.ended: dict[int, Ended] = {}
        self.first_token_ns: dict[int, Ns] = {}
        self._texts: dict[int, Text] = {}
        self._heard: deque[Taken | Ended] = deque()
        self._sending = threading.Lock()
        self._listener = threading.Thread(target=self._hand_over, name="hand-over", daemon=True)
        self.on_end = lambda row, text: self._texts.__setitem__(row, text)
        self.on_ended = self._prompt_ended

    def _loop(self, worker: Any) -> None:
        self._send(self._origin)  # all processes of a machine share this clock
        self._listener.start()
        super()._loop(worker)

    def _arrive(self, at_ns: Ns, row: int) -> None:
        trace = self.trace
        request = trace.request(row)._replace(arrival_ns=at_ns)
        output = int(trace.output_tokens[row])
        # As the simulator's prefill replicas run it: to its first token, its blocks kept if more is to come.
        first = request._replace(max_output_tokens=1)
        track = self.scheduler.add(first, at_ns, ends_after=1, hands_over=output > 1)
        if track.status == "rejected":
            self._end(track)
            return
        self.runner.texts[row] = Text.of(self.prompts(row), 1, self.sampling(row), ())

    def _prompt_ended(self, track: Track) -> None:
        row = track.request.id
        if track.first_token_ns is not None and track.first_token_ns >= 0:
            self.first_token_ns[row] = track.first_token_ns
        text = self._texts.pop(row, None)
        if row not in self.scheduler.handover.held:
            output = text.output if text is not None else []
            self.ended[row] = Ended(row, track.status, track.reason, output, track.finished_ns, None)
            return
        assert text is not None
        request = self.trace.request(row)._replace(arrival_ns=track.request.arrival_ns)
        ends_after = int(self.trace.output_tokens[row])
        self._send(Done(row, tuple(request), ends_after, text.ids[: text.length].copy(), self.now_ns()))

    def _admit(self) -> Ns:
        self._serve()
        return super()._admit()

    def _wait(self) -> None:
        """As any engine, but never away from the connection for long."""
        if not self.scheduler.handover.held:
            super()._wait()
            return
        self._idle = True
        time.sleep(NAP_S)

    def _send(self, message: Any) -> None:
        with self._sending:
            self.connection.send(message)

    def _hand_over(self) -> None:
        """A thread of its own copies KV while batches run: nobody writes into blocks that are held."""
        pulls: deque[int] = deque()
        on_the_way = False
        try:
            while True:
                message = self.connection.recv()
                if isinstance(message, Pull):
                    pulls.append(message.row)
                else:
                    on_the_way = on_the_way and not isinstance(message, Taken)
                    self._heard.append(message)
                if pulls and not on_the_way:
                    row = pulls.popleft()
                    on_the_way = True
                    begun_ns = self.now_ns()
                    self.region.put(self.runner.cache, self.scheduler.ledger.table(self.scheduler.handover.held[row]))
                    self._send(Here(row, begun_ns, self.now_ns() - begun_ns))
        except (EOFError, OSError):
            return  # the other side has gone: after its last request, or before, which `finish` finds out

    def _serve(self) -> None:
        """Take in what the decoding side has said."""
        while self._heard:
            message = self._heard.popleft()
            if isinstance(message, Taken):
                self.scheduler.handover.release(message.row)
            else:
                self.ended[message.row] = message

    def finish(self) -> None:
        """After `run`: until every request has ended on the decoding side. EOFError if that side has gone before."""
        while len(self.ended) < len(self.trace) and not self.outcome.stopped_by:
            if not self._listener.is_alive() and not self._heard:
                raise EOFError
            self._serve()
            time.sleep(NAP_S)
        self._send(Stop())


class DecodeEngine(LiveEngine):
    """Goes on with requests whose first token came from elsewhere."""

    def serve(self, connection: Connection, region: Region, origin_ns: int) -> None:
        """Until told to stop. origin_ns: when the run began, on the clock that all processes of a machine share."""
        self.connection, self.region = connection, region
        self._origin = origin_ns
        self._ids: dict[int, np.ndarray] = {}
        self._asked: dict[int, Ns] = {}
        self._moved: dict[int, Moved] = {}
        self._tracks: dict[int, Track] = {}
        self._roomless: deque[Track] = deque()
        self.on_ended = self._answer_ended
        self.on_end = lambda row, text: self._outputs.__setitem__(row, text.output)
        self._outputs: dict[int, list[int]] = {}
        going = True
        while going or self.scheduler.tracks:
            going = self._listen() and going
            self._ask_for_kv()
            stuck = self._fill(self.now_ns(), None)
            if self._flights:
                self._complete(self._flights.popleft())
            elif stuck:
                if self.scheduler.queues.waiting and not self.scheduler.handover.expected:
                    ended = self.scheduler.reject_stuck(self.now_ns())
                    if ended is not None:
                        self._end(ended)
                self._idle = True
                time.sleep(NAP_S)

    def _listen(self) -> bool:
        """Take in messages; False once no further request will come."""
        while self.connection.poll():
            message = self.connection.recv()
            if isinstance(message, Stop):
                return False
            if isinstance(message, Done):
                self._expect(message)
            elif isinstance(message, Here):
                self._arrived(message)
        return True

    def _expect(self, done: Done) -> None:
        request = Request(*done.request)
        track = self.scheduler.handover.receive(
            request, self.now_ns(), ends_after=done.ends_after, computed=request.prompt_tokens, produced=1
        )
        self._ids[done.row], self._asked[done.row] = done.ids, done.asked_ns
        self._tracks[done.row] = track
        if track.status == "expected":
            self._roomless.append(track)
        else:
            # It can never run here, but its blocks are still held over there.
            self._end(track)

    def _ask_for_kv(self) -> None:
        """First come, first served, as in the simulator."""
        while self._roomless and self.scheduler.handover.reserve(self._roomless[0]):
            self.connection.send(Pull(self._roomless.popleft().request.id))

    def _arrived(self, here: Here) -> None:
        row, runner = here.row, self.runner
        track = self._tracks[row]
        request = track.request
        blocks = self.scheduler.ledger.table(track)[: self.scheduler.ledger.blocks_for(request.prompt_tokens)]
        taken_ns = self.now_ns()
        self.region.take(runner.cache, blocks)
        ended_ns = self.now_ns()
        self.connection.send(Taken(row))
        self._moved[row] = Moved(
            row, request.prompt_tokens, len(blocks) * self.region.block_bytes, self._asked.pop(row), here.begun_ns,
            ended_ns, here.copied_ns + ended_ns - taken_ns,
        )  # fmt: skip
        text = Text.of(self._ids[row][: request.prompt_tokens], request.max_output_tokens, GREEDY, ())
        text.append(int(self._ids.pop(row)[request.prompt_tokens]))
        runner.texts[row] = text
        self.scheduler.handover.arrive(track)

    def _answer_ended(self, track: Track) -> None:
        row = track.request.id
        if row in self._asked:
            self.connection.send(Taken(row))
        output = self._outputs.pop(row, [])
        finished_ns = self.now_ns() if track.finished_ns < 0 else track.finished_ns
        self.connection.send(Ended(row, track.status, track.reason, output, finished_ns, self._moved.pop(row, None)))
