"""Live runs that mix everything: policies, planning ahead, swapping, ladders, a prefix cache, closed loops, on a small model.

Each answer has to be that of a request that ran alone; the scheduler driven again through the recorded moments, and the
simulator fed the recorded durations, have to plan the same batches. `MORE=20` in the environment tries twenty times as
many cases, `FIRST=1234` begins at another number.
"""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from executor.config import LiveConfig
from executor.serving.replay import LiveRun, replay_live
from experiments.validation.comparing.batch_agreement import agreement, scheduler_of
from experiments.validation.comparing.fed_with_measured_times import feed, why_not_fed
from policies.edges.errors import InputError
from tests.executor.test_mixed_batches import check, model, small_trace
from tests.hardening.crowd import KNOBS, RUNGS
from tests.simulator.constant_cost import ConstantCost
from workloads import Trace

CASES = 3 * int(os.environ.get("MORE", "1"))
FIRST = int(os.environ.get("FIRST", "0"))
MS = 1_000_000
COST = ConstantCost(2 * MS, per_row_ns=1_000)
"""What policies that plan by time are told."""


def case(number: int) -> tuple[Trace, dict[str, Any]]:
    rng = Random(f"live {number}")

    def maybe(share: float) -> bool:
        return rng.random() < share

    count, most = rng.choice([2, 5, 9]), rng.choice([5, 40, 90])
    lengths = [(rng.randint(1, most), rng.choice([1, rng.randint(1, 6), rng.randint(1, 25)])) for _ in range(count)]
    trace = small_trace(lengths)
    limits = trace.output_tokens + np.array([rng.choice([0, 0, 7]) for _ in lengths])
    trace = replace(trace, max_output_tokens=limits, arrival_ns=np.arange(count) * rng.choice([0, 0, MS, 20 * MS]))
    if maybe(0.3):
        after = [rng.randrange(row) if row and maybe(0.6) else -1 for row in range(count)]
        trace = replace(trace, after_row=np.array(after), think_ns=np.array([rng.choice([0, MS]) for _ in lengths]))
    if maybe(0.3):
        trace = replace(trace, priority=np.array([rng.randrange(3) for _ in lengths]))
    policy, block_size = rng.choice(list(KNOBS)), rng.choice([4, 8, 16])
    room = int((trace.prompt_tokens + limits).max()) // block_size + 2
    options: dict[str, Any] = {
        "policy": policy,
        "knobs": dict(rng.choice(KNOBS[policy])),
        "block_size": block_size,
        "watermark": rng.choice([None, 0.0, 0.2]),
        "num_blocks": rng.choice([room, room + room // 2, 3 * room, 20 * room]),
        "ahead": maybe(0.3),
        "prefix_caching": maybe(0.3),
    }
    if maybe(0.3):
        options["token_budget"] = rng.choice([8, 32, 100])
    if maybe(0.3):
        options["max_num_seqs"] = rng.choice([1, 2, 4])
    if maybe(0.35):
        options |= {
            "preemption": rng.choice(["swap", "auto"]),
            "swap_gib": rng.choice([1e-4, 1e-3]),
            "swap_page_mib": rng.choice([8, 16, 32]) / 1024,
        }
    if maybe(0.35):
        options |= {
            "ladder": rng.choice(["all", "none", ",".join(rng.sample(RUNGS, rng.randint(1, 4)))]),
            "swap_gib": 1e-3,
            "swap_page_mib": 16 / 1024,
            "trouble_from": rng.choice([0.3, 0.9]),
            "plain_tokens": rng.choice([5, 32]),
            "risk": rng.choice([0.0, 0.5, 1.0]),
            "max_wait_s": rng.choice([0.01, 60.0]),
        }
    return trace, options


def ends_soundly(trace: Trace, run: LiveRun) -> None:
    rows = run.tables.table("requests").to_pylist()
    assert sorted(row["request"] for row in rows) == list(range(len(trace)))
    for row in rows:
        assert len(run.answers.get(row["request"], [])) == row["output_tokens"]
        if row["status"] == "finished":
            assert row["output_tokens"] == trace.output_tokens[row["request"]]
        else:
            assert row["status"] in ("rejected", "failed")
            assert row["reason"]


@pytest.mark.parametrize("number", range(FIRST, FIRST + CASES))
def test_whatever_an_engine_mixes_answers_are_those_of_requests_that_ran_alone(number: int) -> None:
    trace, options = case(number)
    loaded = model("float64", "torch", "sdpa")
    try:
        run = replay_live(trace, LiveConfig(**options), loaded=loaded, cost=COST)
    except InputError:
        return  # a ladder that offloads without preempting, and the like
    ends_soundly(trace, run)
    statuses = set(run.tables.column("requests", "status").tolist())
    if statuses == {"finished"}:
        check(loaded, trace, run, exact=True)
    if "ladder" in options or "preemption" in options or "failed" in statuses:
        return  # neither of the two below has a host memory or an admission control
    again = agreement(run.tables, trace, scheduler_of(run.tables, COST))
    assert again.exact, again
    if trace.after_row is None and not why_not_fed(run.tables):
        run.tables.config["model"] = "nano"  # the simulator wants a name that it knows; costs are the measured ones
        fed = feed(run.tables, trace, COST)
        assert fed.exact, fed
