"""The live engine with clients in place of a trace: they come, they leave, and hear of their tokens step by step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from executor.model.sampler import Sampling
from executor.serving.arrivals import NEVER
from executor.serving.live_engine import Flight, LiveEngine
from executor.serving.request_text import Text
from executor.serving.runner import Result
from policies import Chunk, Ns, Request, Track
from workloads.door.contract import Ask, Clock, Ended, Load, Step


class ClientArrivals:
    """What the engine asks of arrivals, where nobody knows who comes next. outstanding: whether more may come."""

    next_ns = NEVER

    def __init__(self) -> None:
        self.outstanding = 1

    def ended(self, row: int, now_ns: Ns) -> None:
        """Nobody waits for an answer but its client."""

    def rest(self) -> list[tuple[Ns, int]]:
        return []


class ServedEngine(LiveEngine):
    """A `workloads.door.contract.Engine`. stop_ids: token ids that end an answer unless its request ignores them.

    names: told of every text that has ended (a prefix cache's).
    """

    def __init__(self, *arguments: Any, model: str, forget: Callable[[int], None], **options: Any) -> None:
        super().__init__(*arguments, pinned=False, on_token=self._on_token, on_ended=self._on_ended, **options)
        self.model = model
        self.max_model_len: int = self.scheduler.max_model_len
        self.vocab: int = self.runner.loaded.spec.vocab
        self.clock = Clock()
        self.arrivals: Any = ClientArrivals()
        self._forget = forget
        self._threads = torch.get_num_threads()
        self._asks: dict[int, Ask] = {}
        self._inbox: deque[tuple[str, Any]] = deque()
        self._wake = threading.Event()
        self._stopping: str | None = None
        self._say: Callable[[Step], None] = _nobody
        self._tokens: dict[int, list[int]] = {}
        self._told: list[Ended] = []
        self._accepted: list[tuple[int, Ns, int]] = []
        self._batches: list[tuple[int, int]] = []
        self._completed_ns: Ns = 0
        self._queries = self._hits = 0

    # Called from any thread

    def submit(self, ask: Ask) -> None:
        self._inbox.append(("submit", ask))
        self._wake.set()

    def cancel(self, number: int, reason: str, status: str = "aborted") -> None:
        self._inbox.append(("cancel", (number, reason, status)))
        self._wake.set()

    def stop(self, reason: str) -> None:
        self._stopping = reason
        self._wake.set()

    def loads(self) -> Sequence[Load]:
        scheduler = self.scheduler
        queues, ledger = scheduler.queues, scheduler.ledger
        waiting = len(scheduler.tracks) - queues.num_running - len(scheduler.withheld)
        usage = 1 - ledger.free_blocks / ledger.total_blocks
        counts = (scheduler.preemptions, self._queries, self._hits, ledger.total_blocks, ledger.block_size)
        return [Load(queues.num_running, waiting, usage, *counts)]

    def facts(self) -> dict[str, Any]:
        loaded = self.runner.loaded
        return {"world": "live", "policy": type(self.scheduler.policy).__name__, "device": str(loaded.device)}

    # In the engine's thread

    def serve(self, tell: Callable[[Step], None]) -> None:
        """Serve until `stop`."""
        torch.set_num_threads(self._threads)  # each thread that calls PyTorch has a number of its own
        self._say = tell
        self.run(self.clock.origin_ns)

    def _admit(self) -> Ns:
        self._wake.clear()
        inbox = self._inbox
        while inbox:
            what, about = inbox.popleft()
            if what == "submit":
                self._take(about)
            else:
                number, reason, status = about
                self._withdraw([number], reason, status)
        if self._stopping is not None and self.arrivals.outstanding:
            self._withdraw(list(self.scheduler.tracks), self._stopping, "aborted")
            self.arrivals.outstanding = 0
        now = self.now_ns()
        self._tell(now)
        return now

    def _take(self, ask: Ask) -> None:
        # It came while a batch was running: it has waited since.
        now, row = ask.received_ns, ask.number
        request = Request(
            row,
            now,
            len(ask.prompt_ids),
            ask.max_tokens,
            session=ask.session,
            priority=ask.priority,
            tenant=ask.tenant,
            program=ask.session,
        )
        self._asks[row] = ask
        track = self.scheduler.add(request, now)
        if track.status == "rejected":
            self._end(track)
            return
        sampling = Sampling(ask.temperature, ask.top_k, ask.top_p, ask.seed)
        stop_ids = () if ask.ignore_eos else self.stop_ids
        self.runner.texts[row] = Text.of(np.array(ask.prompt_ids, np.int64), ask.max_tokens, sampling, stop_ids)
        self._accepted.append((row, now, 0))

    def _sleep(self, seconds: float) -> None:
        self._tell(self.now_ns())
        if not self._inbox and self._stopping is None:
            self._wake.wait(seconds)

    def _complete(self, flight: Flight) -> None:
        super()._complete(flight)
        self._tell(self._completed_ns)

    def _record(self, flight: Flight, result: Result, now: Ns) -> None:
        super()._record(flight, result, now)
        self._completed_ns = now
        batch = flight.prepared.batch
        computed = batch.shape.decodes + sum(part.tokens for part in batch.parts if isinstance(part, Chunk))
        self._batches.append((0, computed))

    def _end(self, track: Track) -> None:
        super()._end(track)
        self.outcome.answers.pop(track.request.id, None)
        self._ended.discard(track.request.id)
        self._forget(track.request.id)

    def _on_token(self, row: int, token: int) -> None:
        self._tokens.setdefault(row, []).append(token)

    def _on_ended(self, track: Track) -> None:
        row = track.request.id
        ask = self._asks.pop(row)
        if track.admitted_ns >= 0 and self.scheduler.ledger.prefix_caching:
            self._queries += track.request.prompt_tokens
            self._hits += track.cached_total
        self._told.append(
            Ended(
                row,
                track.status,
                track.reason,
                track.status == "finished" and track.delivered < ask.max_tokens,
                track.request.arrival_ns,
                track.admitted_ns,
                track.first_token_ns,
                track.finished_ns,
                track.delivered,
                track.cached_total,
                track.preemptions,
                0,
            )
        )

    def _tell(self, now: Ns) -> None:
        if self._tokens or self._told or self._accepted or self._batches:
            step = Step(now, tuple(self._tokens.items()), self._told, self._accepted, self._batches)
            self._tokens, self._told, self._accepted, self._batches = {}, [], [], []
            self._say(step)


def _nobody(step: Step) -> None:
    """Before anybody listens nothing happens."""
