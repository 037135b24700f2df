"""Device time of every iteration, from pairs of events that are read later: the stream is never waited for to take it.

Events are reused from a small pool. NVTX ranges (`--nvtx`, off by default) name passes and operators in a timeline of
Nsight Systems; without CUDA they are nothing. A graph's kernels have no operators: `--graphs off` shows them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self) -> None:
        """Mark this place in the stream."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to `end`."""


class ClockEvent:
    """The same on a CPU, where work is done when the call returns."""

    def __init__(self) -> None:
        self._at_ns = 0

    def record(self) -> None:
        self._at_ns = time.perf_counter_ns()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: ClockEvent) -> float:
        return (end._at_ns - self._at_ns) / 1e6


class IterationTimer:
    """start() and stop() around what is launched for one iteration; finished() gives times when they are known.

    new_event: makes an event; by the device if not given.
    """

    def __init__(self, device: torch.device, new_event: Callable[[], Event] | None = None) -> None:
        if new_event is None:
            new_event = (lambda: torch.cuda.Event(enable_timing=True)) if device.type == "cuda" else ClockEvent
        self._new_event = new_event
        self._spare: list[Event] = []
        self._started: tuple[int, Event] | None = None
        self._waiting: deque[tuple[int, Event, Event]] = deque()

    def start(self, number: int) -> None:
        """Iteration `number` begins here in the stream."""
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()
        self._started = (number, event)

    def stop(self) -> None:
        """Its last kernel has been launched."""
        assert self._started is not None
        number, first = self._started
        last = self._spare.pop() if self._spare else self._new_event()
        last.record()
        self._waiting.append((number, first, last))
        self._started = None

    def finished(self) -> Iterator[tuple[int, int]]:
        """(iteration, device ns) of every iteration whose events the stream has passed, in order, without waiting."""
        while self._waiting and self._waiting[0][2].query():
            number, first, last = self._waiting.popleft()
            yield number, round(first.elapsed_time(last) * 1e6)
            self._spare += (first, last)


@contextmanager
def nvtx_ranges(parts: dict[str, tuple[Any, str]], *, enabled: bool = True) -> Iterator[None]:
    """Name calls in a profiler's timeline: label -> (object, method). Taken off again at the end.

    with nvtx_ranges({"forward": (model, "forward"), "attention": (model.attention, "attend")}): ...
    """
    if not enabled or not torch.cuda.is_available():
        yield
        return
    before = [(owner, method, vars(owner).get(method)) for owner, method in parts.values()]
    for label, (owner, method) in parts.items():
        setattr(owner, method, _ranged(label, getattr(owner, method)))
    try:
        yield
    finally:
        for owner, method, held in before:
            if held is None:
                delattr(owner, method)
            else:
                setattr(owner, method, held)


def _ranged(label: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        with torch.cuda.nvtx.range(label):
            return call(*args, **options)

    return run


OPERATORS = {
    "embed": "embedding",
    "rms_norm": "norm",
    "add_and_norm": "attention out, norm",
    "rotate_and_store": "rotary, store",
    "argmax": "sampler",
}
"""Method of a kernel set -> its name in a timeline."""


def annotate(model: Any, *, push: Callable[[str], Any] | None = None, pop: Callable[[], Any] | None = None) -> None:
    """Name a model's passes, attention and kernels in a timeline from now on; nothing without CUDA.

    push, pop: begin and end a range; NVTX's if not given.
    """
    if push is None or pop is None:
        if not torch.cuda.is_available():
            return
        push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    calls = [("forward", model, "forward"), (f"attention {model.attention.name}", model.attention, "attend")]
    calls += [(label, model.kernels, method) for method, label in OPERATORS.items()]
    for label, owner, method in calls:
        setattr(owner, method, _between(label, getattr(owner, method), push, pop))


def _between(
    label: str, call: Callable[..., Any], push: Callable[[str], Any], pop: Callable[[], Any]
) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        if label == "forward" and args:
            push(f"forward, {len(args[0])} rows")
        else:
            push(label)
        try:
            return call(*args, **options)
        finally:
            pop()

    return run
