"""Where a request goes: one file per router, and the registry that finds them by name."""

from simulator.routers.registry import make_router, router_class, router_knobs, router_names
from simulator.routers.router import (
    Load,
    ReplicaView,
    Router,
    choose,
    least,
    numbered,
    outstanding_requests,
    outstanding_tokens,
)

__all__ = [
    "Load",
    "ReplicaView",
    "Router",
    "choose",
    "least",
    "make_router",
    "numbered",
    "outstanding_requests",
    "outstanding_tokens",
    "router_class",
    "router_knobs",
    "router_names",
]
