"""Which cost model the experiments of this process use: the one that ships for a GPU, the roofline, or a file.

Figures are drawn under one choice and can be compared under another; what a figure used stands in its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiler.cost_model import CostModel

_CHOICE: ContextVar[str] = ContextVar("cost_model", default="auto")


@contextmanager
def costs_from(choice: str) -> Iterator[None]:
    """Within: experiments use this cost model (auto, roofline, or the file of a fitted one)."""
    token = _CHOICE.set(choice)
    try:
        yield
    finally:
        _CHOICE.reset(token)


def chosen_costs() -> str:
    """The choice, as a replay's `cost_model` takes it."""
    return _CHOICE.get()


def cost_of(model: str, gpu: str, **engine: Any) -> CostModel:
    """The cost model of an engine under the present choice; engine: as `load_cost_model` takes it."""
    from profiler import load_cost_model

    return load_cost_model(model, gpu, cost_model=chosen_costs(), **engine)
