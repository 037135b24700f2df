"""What stands between the door and an engine: what is asked, what a step has given, and what the engine can do.

The engine runs in a thread of its own and tells of a whole step at once (`Step`), so that one look by the door writes
the tokens of all its clients. Times are integer nanoseconds on the engine's clock, which begins at 0 with the session.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

from policies.edges.errors import InputError
from policies.work.request import Ns

OVERLOADED_AFTER_S = 1
"""Seconds after which a client may try again, where nobody can say better."""


class DoorError(InputError):
    """A door that cannot be opened as asked; the message says what was found and what was expected."""


@dataclass(frozen=True)
class Ask:
    """One request as an engine takes it. number: counted by the door from 0, the row of the run folder.

    max_tokens: declared limit, at least 1. ignore_eos: the answer has exactly that length. temperature 0 is greedy,
    top_k 0 and top_p 1 keep all tokens. session: texts of one session go on from each other. received_ns: when the
    request had been read. tenant: OpenAI's `user`, on whose behalf it is served.
    """

    number: int
    prompt_ids: Sequence[int]
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    priority: int = 0
    session: str | None = None
    received_ns: Ns = 0
    tenant: str | None = None


class Ended(NamedTuple):
    """How one request ended. status: finished, rejected, failed or aborted, with a reason for the last three.

    by_stop: a stop token ended it, not its limit. -1 ns: never. arrival_ns: when it reached the scheduler.
    """

    number: int
    status: str
    reason: str
    by_stop: bool
    arrival_ns: Ns
    admitted_ns: Ns
    first_token_ns: Ns
    finished_ns: Ns
    output_tokens: int
    cached_tokens: int
    preemptions: int
    replica: int


class Step(NamedTuple):
    """What has happened at one moment of the engine.

    tokens: (request, token ids) of everybody who has new ones. accepted: (request, arrival, replica) of those that now
    wait or run. batches: (replica, tokens computed) of each batch that completed. failure: why the engine has come to
    an end by itself.
    """

    time_ns: Ns
    tokens: Sequence[tuple[int, Sequence[int]]] = ()
    ended: Sequence[Ended] = ()
    accepted: Sequence[tuple[int, Ns, int]] = ()
    batches: Sequence[tuple[int, int]] = ()
    failure: str = ""


class Load(NamedTuple):
    """The state of one replica. Counters count from the beginning of the session, in tokens where nothing is said.
    blocks, block_size: of the KV pool."""

    running: int
    waiting: int
    kv_usage: float
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    blocks: int = 0
    block_size: int = 0


class Engine(Protocol):
    """What serves. Every method but `serve` may be called from any thread."""

    model: str
    """Name under which the model is served."""
    max_model_len: int
    vocab: int
    clock: Clock

    def serve(self, tell: Callable[[Step], None]) -> None:
        """Serve until `stop`; `tell` is called in this thread with every step."""
        ...

    def submit(self, ask: Ask) -> None: ...

    def cancel(self, number: int, reason: str, status: str = "aborted") -> None:
        """End a request now, if it has not ended; its end is told as any other."""
        ...

    def stop(self, reason: str) -> None:
        """End what still runs with that reason, then `serve`."""
        ...

    def loads(self) -> Sequence[Load]:
        """Each replica's state, by number."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the engine is, in words, for the first line and for `/version`."""
        ...


class Clock:
    """Nanoseconds since the session began, and how late the engine was: `late` is told of every moment it played."""

    def __init__(self) -> None:
        self.origin_ns = perf_counter_ns()
        self.lateness = Lateness()

    def now_ns(self) -> Ns:
        return perf_counter_ns() - self.origin_ns


class Lateness:
    """How much later than due things were done, in logarithmic cells of 5 %: flat memory, quantiles to 5 %."""

    STEP = 1.05
    FIRST_NS = 1_000

    def __init__(self) -> None:
        self._cells = [0] * 512
        self._log = math.log(self.STEP)
        self.count = 0
        self.worst_ns = 0
        self.total_ns = 0

    def late(self, by_ns: Ns, times: int = 1) -> None:
        """Something was done `by_ns` later than due, so many times."""
        cell = 0 if by_ns <= self.FIRST_NS else min(511, int(math.log(by_ns / self.FIRST_NS) / self._log) + 1)
        self._cells[cell] += times
        self.count += times
        self.total_ns += max(0, by_ns) * times
        if by_ns > self.worst_ns:
            self.worst_ns = by_ns

    def quantile_s(self, share: float) -> float:
        """The smallest cell's upper end below which this share of all lies; 0 where nothing was told."""
        wanted, seen = share * self.count, 0
        for cell, count in enumerate(self._cells):
            seen += count
            if seen >= wanted and seen:
                return min(self.FIRST_NS * self.STEP**cell, max(self.worst_ns, self.FIRST_NS)) / 1e9
        return 0.0

    def facts(self) -> dict[str, float]:
        """Count, mean, quantiles and the worst, in seconds."""
        return {
            "count": self.count,
            "mean_s": self.total_ns / self.count / 1e9 if self.count else 0.0,
            "p50_s": self.quantile_s(0.5),
            "p99_s": self.quantile_s(0.99),
            "max_s": self.worst_ns / 1e9,
        }
