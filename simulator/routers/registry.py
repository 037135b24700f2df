"""One registry of routers: built in, from other packages (entry point group `charioteer.routers`), or from a file.

A router is named by its module here (`round_robin`), by its entry point, or as `path/to/file.py:ClassName`. A file is
run only when it is named.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policies.edges.errors import PolicyError
from policies.registry import Knob, class_from_file, class_of_another_package, knob_value, knobs_of, names_of_others
from simulator.errors import SimulationError
from simulator.routers.router import Router

BUILT_IN: Mapping[str, str] = {
    "random": "simulator.routers.random:Random",
    "round_robin": "simulator.routers.round_robin:RoundRobin",
    "least_outstanding_requests": "simulator.routers.least_outstanding_requests:LeastOutstandingRequests",
    "least_outstanding_tokens": "simulator.routers.least_outstanding_tokens:LeastOutstandingTokens",
    "power_of_two": "simulator.routers.power_of_two:PowerOfTwo",
    "least_kv": "simulator.routers.least_kv:LeastKV",
    "session_affinity": "simulator.routers.session_affinity:SessionAffinity",
    "vllm_ranks": "simulator.routers.vllm_ranks:VllmRanks",
    "prefix_affinity": "simulator.routers.prefix_affinity:PrefixAffinity",
    "weighted_scores": "simulator.routers.weighted_scores:WeightedScores",
}

ENTRY_POINT_GROUP = "charioteer.routers"


def router_names() -> list[str]:
    """Built-in routers, then those of other packages."""
    return [*BUILT_IN, *names_of_others(ENTRY_POINT_GROUP, BUILT_IN)]


def router_class(name: str) -> type[Router]:
    """The class behind a name or `file.py:ClassName`; SimulationError says what is near if there is none."""
    if name in BUILT_IN:
        module, _, cls = BUILT_IN[name].partition(":")
        return _checked(getattr(importlib.import_module(module), cls), name)
    path, colon, cls = name.rpartition(":")
    if colon and path.endswith(".py"):
        try:
            return _checked(class_from_file("router", Path(path), cls), name)
        except PolicyError as error:
            raise SimulationError(str(error)) from error
    try:
        found = class_of_another_package("router", ENTRY_POINT_GROUP, name)
    except PolicyError as error:
        raise SimulationError(str(error)) from error
    if found is not None:
        return _checked(found, name)
    near = difflib.get_close_matches(name, router_names(), n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise SimulationError(
        f"router: found {name!r}, expected one of {', '.join(router_names())}, or path/to/file.py:ClassName{hint}"
    )


def router_knobs(name: str) -> dict[str, Knob]:
    """The knobs of a router, by name."""
    cls = router_class(name)
    settable = {field.name for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    return {knob.name: knob for knob in knobs_of(cls).values() if knob.name in settable}  # type: ignore[arg-type]


def make_router(name: str, knobs: Mapping[str, Any] | None = None) -> Router:
    """A fresh router from its name and knobs (values may be text, as a command line gives them).

    SimulationError for a knob that the router does not have, a value of the wrong type or outside its range.
    """
    known = router_knobs(name)
    values = {}
    for key, value in (knobs or {}).items():
        knob = known.get(key.replace("-", "_"))
        if knob is None:
            has = ", ".join(known) or "none"
            raise SimulationError(f"router {name} has no knob {key!r}; its knobs: {has}")
        try:
            values[knob.name] = knob_value(f"router {name}", knob, value)
        except PolicyError as error:
            raise SimulationError(str(error)) from None
    return router_class(name)(**values)


def _checked(cls: Any, name: str) -> type[Router]:
    if not (isinstance(cls, type) and issubclass(cls, Router) and dataclasses.is_dataclass(cls)):
        raise SimulationError(f"router {name}: expected a dataclass that is a subclass of simulator.routers.Router")
    if cls.choose is Router.choose:
        raise SimulationError(f"router {name}: expected a choose() method")
    return cls
