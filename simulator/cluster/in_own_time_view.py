"""What an on-demand router is given: the replicas that are up, each brought up to this moment when it is looked at.

Ordinary Python even where the fleet is compiled, so that everything that takes a sequence takes this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.cluster.in_own_time import Fleet
    from simulator.routers.router import Load

__all__ = ["SeenReplicas"]


class SeenReplicas(Sequence[Any]):
    """The sequence of a fleet's replicas by number."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._up = fleet, fleet.up

    def __len__(self) -> int:
        return len(self._up)

    def __getitem__(self, at: Any) -> Any:
        found = self._up[at]
        if isinstance(at, slice):
            self._fleet.catch_up_all()
        else:
            self._fleet.catch_up(found)
        return found

    def __iter__(self) -> Iterator[Any]:
        self._fleet.catch_up_all()
        return iter(self._up)

    def least(self, load: Load[Any], among: Sequence[int] | None) -> Any:
        """`simulator.routers.least` without looking at all of them."""
        return self._fleet.least(load, among)
