"""Which methods of a cost model speak for it: an inherited or delegated one does not know what was overridden since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policies.work.batch import BatchShape
from policies.work.request import Ns
from profiler.cost_model import CostModel

OURS = ("profiler", "simulator", "experiments")
"""Packages whose cost models are held to the protocol by their own tests."""


def own_form(cost: Any, name: str, *stands_for: str) -> Callable[..., Any] | None:
    """The method `name` of a cost model, if it still speaks for the methods that it stands for; None otherwise.

    It does not where one of these was overridden in a class below its own or on the object itself, nor where a wrapper
    that delegates what it lacks would hand out that of the model inside: the wrapper's own methods would be bypassed.
    """
    on_object = getattr(cost, "__dict__", {})
    depth = -1 if name in on_object else _depth(cost, name)
    if depth is None:
        # What wrappers of ours hand on they chose one by one.
        return getattr(cost, name, None) if type(cost).__module__.partition(".")[0] in OURS else None
    for method in stands_for:
        other = -1 if method in on_object else _depth(cost, method)
        if other is not None and other < depth:
            return None
    found: Callable[..., Any] = getattr(cost, name)
    return found


def whole_ns(cost: CostModel, shape: BatchShape) -> Ns:
    """Host, stages and sends of one iteration by itself."""
    before, after = cost.host_ns(shape)
    return before + after + sum([cost.stage_ns(shape, s) + cost.send_ns(shape, s) for s in range(cost.stages)])


def _depth(cost: Any, name: str) -> int | None:
    """How far up the classes of an object a method is defined; None where they do not define it."""
    return next((depth for depth, kind in enumerate(type(cost).__mro__) if name in vars(kind)), None)
