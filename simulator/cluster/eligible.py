"""Which replicas a router may choose from.

All that are up, where they are alike. Where pools differ in how long a request they can hold, only those that could run
this one: a production router knows the limits of its engines, and a request that finds one that never could is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.cluster.pools import ClusterPlan
    from simulator.replica.running_ahead import Replica
    from workloads import Trace


def hold_alike(plan: ClusterPlan, replicas: list[Replica], pool_number: Callable[[Replica], int]) -> bool:
    """Whether all replicas that requests arrive at refuse the same ones."""
    limits = set()
    for replica in replicas:
        role, scheduler = plan.pools[pool_number(replica)].role, replica.scheduler
        if role != "decode":
            ledger = scheduler.ledger
            usable = ledger.total_blocks - scheduler.watermark_blocks
            limits.add((role, ledger.block_size, usable, scheduler.max_model_len))
    return len(limits) < 2


def fits_everywhere(replicas: list[Replica], trace: Trace) -> bool:
    """Whether every replica could run every request of a trace from its prompt to its end."""
    longest = Request(0, 0, trace.longest, 0)
    return not any(replica.scheduler.why_not(longest) for replica in replicas)


def who_can_run(
    plan: ClusterPlan, up: list[Replica], request: Request, produced: int, pool_number: Callable[[Replica], int]
) -> list[Replica]:
    """Those of `up` that could run a request; all of them where none could, for one of them says why.

    produced: its tokens delivered elsewhere. A prefill replica runs it to its next token only.
    """
    next_token = request._replace(max_output_tokens=produced + 1)
    able = []
    for replica in up:
        prefills = plan.pools[pool_number(replica)].role == "prefill"
        if not replica.scheduler.why_not(next_token if prefills else request):
            able.append(replica)
    return able or up
