"""Hand-worked examples: every iteration lasts one second, and the batches are written out."""

from __future__ import annotations

from policies import NS_PER_S, CountingLedger, Host, Request, Scheduler, make_policy
from tests.policies.driving import Log, drive


def asked(row: int, arrival_s: float, prompt: int, output: int, **more) -> tuple[Request, int]:
    """A request whose declared limit is what it really produces, unless `limit` says otherwise."""
    limit = more.pop("limit", output)
    return Request(row, round(arrival_s * NS_PER_S), prompt, limit, **more), output


def scheduler_for(
    name: str,
    *,
    pool: int = 100,
    block: int = 4,
    longest: int = 0,
    tile: int = 4,
    depth: int = 1,
    token_budget: int | None = None,
    max_num_seqs: int | None = None,
    estimator=None,
    **knobs,
) -> Scheduler:
    return Scheduler(
        make_policy(name, knobs),
        CountingLedger(pool, block, longest),
        Host(micro_batches=depth, tile=tile, estimator=estimator),
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
    )


def work_through(scheduler: Scheduler, requests) -> Log:
    return drive(scheduler, requests, depth=scheduler.host.micro_batches, duration=lambda shape: NS_PER_S)


def batches(log: Log) -> list[tuple[float, list[tuple[int, int, int]], int]]:
    """(planned at second, [(request, tokens, context before)] in batch order, dummy tokens)."""
    return [(planned_ns / NS_PER_S, rows, shape.dummy_tokens) for _, planned_ns, shape, rows in log.batches]


def token_seconds(log: Log) -> dict[int, list[float]]:
    return {row: [time / NS_PER_S for time in times] for row, times in log.token_times.items()}
