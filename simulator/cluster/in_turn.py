"""Replicas that cannot feel each other, simulated one after another instead of side by side.

Behind a router that looks at no replica (`Router.oblivious`) it is known before anything runs who gets which request.
Where nothing else joins the replicas either, each plays its own arrivals from the first to the last, alone with them:
its state stays in the processor's caches, the event queue holds one replica's events, and only its own arrivals cut its
leaps. So a thousand replicas cost what one costs, per request. The rows of a run are those of replicas simulated side
by side; iterations, stages and tokens come replica by replica.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from simulator.clock.virtual_time import VirtualTime, collecting_rarely
from simulator.cluster.eligible import fits_everywhere
from simulator.errors import SimulationError
from simulator.routers import Router, choose

if TYPE_CHECKING:
    from simulator.clock.arrivals import Arrivals
    from simulator.cluster.cluster import Cluster
    from simulator.replica.running_ahead import Replica
    from workloads import Trace

__all__ = ["StillReplica", "are_independent", "only_arrivals_join", "run_in_turn"]


def are_independent(cluster: Cluster, trace: Trace) -> bool:
    """Whether what happens on one replica of a cluster, not yet begun, can matter to no other.

    It can where a router looks, or replicas die, besides all that `only_arrivals_join` names.
    """
    return cluster.router.oblivious and not cluster.plan.config.failures and only_arrivals_join(cluster, trace)


def only_arrivals_join(cluster: Cluster, trace: Trace) -> bool:
    """Whether what happens on one replica can matter to another only when somebody arrives, gives up or dies.

    It can at any time where an answer makes the next request arrive, ranks step together, KV is moved or stored between
    replicas, they share a link, come or go by load. Replicas of which only some could run a request are simulated side
    by side, too. Whoever asked for the plain path (`leaps`) gets that.
    """
    config = cluster.plan.config
    return (
        config.leaps
        and len(cluster.replicas) > 1
        and not trace.closed_loop
        and not any(pool.engine.together for pool in cluster.plan.pools)
        and not any(pool.role == "decode" for pool in cluster.plan.pools)
        and cluster.store is None
        and not cluster.shares_links
        and cluster.autoscaler is None
        and (cluster.alike or fits_everywhere(cluster.replicas, trace))
    )


def run_in_turn(cluster: Cluster, arrivals: Arrivals) -> None:
    """Deal all requests, then run replica after replica until everything has ended, each from the same beginning."""
    env = cluster.env
    assert isinstance(env, VirtualTime)
    # Each is alone with its arrivals while it has its turn.
    sharers, env.sharers = env.sharers, 1
    try:
        # Here, too: between two turns the collector would walk all replicas.
        with collecting_rarely():
            for replica, rows in zip(cluster.replicas, _deal(cluster, arrivals)):
                if rows:
                    env.rewind()
                    arrivals.play(partial(cluster.submit_to, replica), rows)
                    env.run()
    finally:
        env.sharers = sharers


def _deal(cluster: Cluster, arrivals: Arrivals) -> list[list[int]]:
    """The rows that each replica gets, in the order in which they arrive."""
    router, rng = cluster.router, cluster.router_rng
    views = [StillReplica(router, replica) for replica in cluster.replicas]
    times = arrivals.trace.arrival_ns.tolist()
    numbers = (choose(router, arrivals.request(row, now), views, rng).number for row, now in enumerate(times))
    chosen = np.fromiter(numbers, np.int64, len(times))
    order = np.argsort(chosen, kind="stable")
    ends = np.cumsum(np.bincount(chosen, minlength=len(views)))
    return [dealt.tolist() for dealt in np.split(order, ends[:-1])]


class StillReplica:
    """A replica as a router sees it that looks at none: what never changes."""

    def __init__(self, router: Router, replica: Replica) -> None:
        self._router = router
        self.number = replica.number
        self.total_blocks = replica.total_blocks
        self.block_size = replica.block_size

    def _looked_at(self) -> NoReturn:
        name = type(self._router).__name__
        raise SimulationError(
            f"router {name} says that it is oblivious, but looked at what a replica is doing: set oblivious = False"
        )

    num_requests = num_running = num_waiting = property(_looked_at)
    prefill_tokens = decode_tokens_promised = free_blocks = property(_looked_at)
