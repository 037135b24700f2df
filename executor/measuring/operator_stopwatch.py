"""Per-operator times of a live model: a stopwatch around every kernel that its forward pass calls, off by default.

It explains an iteration's time, it does not measure it: the clock itself costs something between two kernels, which is
why whole iterations are measured without it. On CUDA pairs of device events are read once the step is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from executor.kernels.base import Linear
from executor.kernels.experts import Experts
from executor.model.model import Model

Span = tuple[str, Any, Any]

KERNELS = {"embed": "embedding", "rms_norm": "norm", "rotate_and_store": "rotary", "argmax": "sampler"}
LINEARS = {"qkv": "qkv", "attention_out": "attention_out", "gate_up": "ffn_up", "down": "ffn_down"}


class Stopwatch:
    """Times by operator, in call order, of the steps run inside `watching`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[Span] = []

    def take(self) -> dict[str, list[float]]:
        """Seconds of every call since the last `take`, by operator."""
        if self._cuda:
            torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for name, start, end in self._spans:
            seconds = start.elapsed_time(end) / 1e3 if self._cuda else (end - start) / 1e9
            times.setdefault(name, []).append(seconds)
        self._spans = []
        return times

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same callable, its time noted."""

        def run(*args: Any, **options: Any) -> Any:
            start = self._now()
            result = call(*args, **options)
            self._spans.append((name, start, self._now()))
            return result

        return run

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _TimedLinear(Linear):
    def __init__(self, linear: Linear, name: str, watch: Stopwatch) -> None:
        self._call = watch.timed(name, linear)
        self._add = watch.timed(name, linear.add)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._call(x, out)  # type: ignore[no-any-return]

    def add(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._add(x, out)  # type: ignore[no-any-return]


@contextmanager
def watching(model: Model) -> Iterator[Stopwatch]:
    """A stopwatch on every operator of `model`, taken off again at the end."""
    watch = Stopwatch(model.kernels.device)
    kernels, attention = model.kernels, model.attention
    linears = [(layer, name) for layer in model.layers for name in LINEARS if getattr(layer, name) is not None]
    before = [(layer, name, getattr(layer, name)) for layer, name in linears] + [(model, "head", model.head)]
    for owner, name, linear in before:
        operator = "experts" if isinstance(linear, Experts) else LINEARS.get(name, name)
        setattr(owner, name, _TimedLinear(linear, operator, watch))
    for name, operator in KERNELS.items():
        setattr(kernels, name, watch.timed(operator, getattr(kernels, name)))
    attention.attend = watch.timed("attention", attention.attend)  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        for owner, name, linear in before:
            setattr(owner, name, linear)
        for name in KERNELS:
            delattr(kernels, name)
        del attention.attend
