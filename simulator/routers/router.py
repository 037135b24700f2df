"""What a router is: a dataclass of knobs whose `choose` names the replica that a request goes to.

It sees what a production load balancer can see: the request, and of every replica that is up its queue lengths, its
outstanding work and its KV memory. Looking costs nothing that would not have been spent anyway: a replica in the
middle of a leap over equal iterations answers from the leap's own arrays and is not stopped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from random import Random
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from policies import Request
from simulator.errors import SimulationError


class ReplicaView(Protocol):
    """A replica as a router sees it; every answer holds for this very moment.

    number: unique in the run, also the tie-breaker. num_requests: all it has. num_running: those admitted. num_waiting:
    those queued, or with their KV still on its way. prefill_tokens: prompt tokens (and tokens to recompute) not yet
    planned. decode_tokens_promised: declared output tokens not yet planned.
    """

    number: int

    @property
    def num_requests(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def prefill_tokens(self) -> int: ...

    @property
    def decode_tokens_promised(self) -> int: ...

    @property
    def total_blocks(self) -> int: ...

    @property
    def free_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...


class Router:
    """Base of all routers; a subclass is a dataclass whose fields are its knobs.

    Unlike a policy it may remember (a turn, a session's home): in fields with `init=False`, which are no knobs. One
    object serves one run.
    """

    paper: ClassVar[str] = ""
    oblivious: ClassVar[bool] = False
    """Its promise to look at the request, its own memory and of a replica no more than number, total_blocks and
    block_size. What it chooses is then known before anything runs, which makes many replicas fast
    (simulator/cluster/in_turn.py)."""
    routes_by: ClassVar[str] = ""
    """Without which column of the trace (session, prefix_hashes) it has nothing to go by; a run without it says so."""
    on_demand: ClassVar[bool] = False
    """Its promise to look at replicas only through the `replicas` that it is given, each time anew: by index, by going
    through them, by `least` or `numbered`; never at one that it kept from an earlier request. Replicas are then
    simulated no further than it looks (simulator/cluster/in_own_time.py)."""

    def __init_subclass__(cls, **options: Any) -> None:
        """A class that defines `choose`, or another method that it may call, inherits no promise: it states its own."""
        super().__init_subclass__(**options)
        for promise in ("oblivious", "on_demand"):
            for base in cls.__mro__:
                if promise in vars(base):
                    break
                if any(not name.startswith("__") and hasattr(value, "__get__") for name, value in vars(base).items()):
                    setattr(cls, promise, False)
                    break

    def choose(self, request: Request, replicas: Sequence[ReplicaView], rng: Random) -> ReplicaView:
        """One of `replicas` (at least one, ascending numbers, all up). rng: the only source of chance, seeded."""
        raise TypeError(f"{type(self).__name__} has no choose(): a router defines one")


View = TypeVar("View", bound=ReplicaView)
V = TypeVar("V", bound=ReplicaView, contravariant=True)


@dataclass(frozen=True)
class Load(Generic[V]):
    """A load by which many replicas are compared without asking each of them (`least`).

    of: a function of the view alone, which does not fall while KV blocks are taken and nothing else happens. falls: by
    how much it falls at most with each promised output token that is planned. only_ends: it changes only when a request
    comes or ends.
    """

    of: Callable[[V], float]
    falls: float = 0.0
    only_ends: bool = False

    def __call__(self, replica: V) -> float:
        return self.of(replica)


outstanding_requests: Load[ReplicaView] = Load(attrgetter("num_requests"), only_ends=True)
"""Waiting and running requests. An attribute's name instead of a function: a third less to compare a thousand by."""


def outstanding_tokens(replica: ReplicaView) -> int:
    """Tokens still to be computed: prompts not yet prefilled and declared answers not yet decoded."""
    return replica.prefill_tokens + replica.decode_tokens_promised


def least(replicas: Sequence[View], load: Callable[[View], Any], among: Sequence[int] | None = None) -> View:
    """The replica with the smallest load; of equals the first, which has the lowest number where numbers ascend.

    among: the places of those that are compared, ascending; all unless given.
    """
    if isinstance(load, Load):
        quick: Callable[[Load[View], Sequence[int] | None], View] | None = getattr(replicas, "least", None)
        if quick is not None:
            return quick(load, among)
        load = load.of
    return min(replicas if among is None else [replicas[at] for at in among], key=load)


# Replicas are handed to routers in order of their numbers: the cluster sorts them whenever one opens, and takes some
# out without moving the others. Whoever searches by number relies on that.
_number = attrgetter("number")


def numbered(replicas: Sequence[View], number: int | None) -> View | None:
    """The replica with a number, if it is up; only few are looked at."""
    if number is None:
        return None
    at = bisect_left(replicas, number, key=_number)
    return replicas[at] if at < len(replicas) and replicas[at].number == number else None


def choose(router: Router, request: Request, replicas: Sequence[View], rng: Random) -> View:
    """The replica that a router names, checked to be one of those it was given."""
    return chosen_of(router.choose(request, replicas, rng), router, request, replicas)


def chosen_of(chosen: Any, router: Router, request: Request, replicas: Sequence[View]) -> View:
    """What a router named for a request, checked to be one of `replicas`."""
    # By its number: with a thousand replicas, comparing them one by one would cost more than most routers do.
    at = bisect_left(replicas, chosen.number, key=_number) if hasattr(chosen, "number") else len(replicas)
    if at < len(replicas) and replicas[at] is chosen:
        return replicas[at]
    raise SimulationError(
        f"router {type(router).__name__} chose {chosen!r} for request {request.id}, expected one of the "
        f"{len(replicas)} replicas it was given"
    )
