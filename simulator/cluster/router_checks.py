"""Whether a router keeps its promise to look at replicas through what it is given (`Router.on_demand`).

For routers that are not the project's own: the first hundred choices, and one in a hundred after those, are made once
more by a copy of the router that sees all replicas played up to now. Another choice ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from random import Random
from typing import Any

from policies import Request
from simulator.errors import SimulationError
from simulator.routers import Router

FIRST, SHARE_AFTER = 100, 0.01


class RouterChecks:
    """The checks of one run."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._rng = Random("router checks")
        self._choices = 0

    @classmethod
    def of(cls, router: Router) -> RouterChecks | None:
        """Checks for a router that promises something and is not the project's own."""
        own = type(router).__module__.partition(".")[0] == "simulator"
        return None if own or not router.on_demand else cls(router)

    def due(self) -> bool:
        self._choices += 1
        return self._choices <= FIRST or self._rng.random() < SHARE_AFTER

    def copy(self, replicas: Sequence[Any], rng: Random) -> tuple[Router, Random]:
        """The router as it is before a choice, and its source of chance; replicas that it kept stay the same ones."""
        again = Random()
        again.setstate(rng.getstate())
        return deepcopy(self.router, {id(replica): replica for replica in replicas}), again

    def compare(self, chosen: int, plain: int, request: Request, now_ns: int) -> None:
        """Refuse a choice that is another one when all replicas are played up to now. chosen, plain: their numbers."""
        if chosen != plain:
            raise SimulationError(
                f"router {type(self.router).__name__} does not keep its promise 'on_demand': for request {request.id} "
                f"at {now_ns / 1e9:.6f} s it chose replica {chosen}, and replica {plain} when all were simulated up to "
                "then. Without the promise, which is always right, they always are"
            )
