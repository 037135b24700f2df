"""Every policy against a small oracle written from its paper (`paper_oracles`), on small pools that preempt.

Batches, their times and every token's time must agree, with both ledgers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import BatchShape, Request, make_policy, make_scheduler
from tests.hardening.paper_oracles import (
    BLOCK,
    TILE,
    Job,
    Oracle,
    Plan,
    age,
    blocks,
    by_load,
    by_prefix,
    by_tbt,
    chunked,
    decode_maximal,
    estimate,
    orca,
    prefill_priority,
    request_level,
    slo_aware,
    slo_aware_by_time,
    vllm_v1,
)
from tests.policies.driving import drive

MORE = int(os.environ.get("MORE", "0"))
"""MORE=10 in the environment: ten times as many workloads, and others every time."""


class Case(NamedTuple):
    policy: str
    knobs: dict[str, object]
    oracle: Callable[[], Oracle]
    estimator: Callable[[BatchShape], int] | None = None


SIZES: dict[str, object] = {"large": 32, "middle": 24, "small": 16}
CHUNK_TIME = {"c": 1000, "g": 5, "b": 100, "a": 2}
PREFIX_AWARE: dict[str, object] = {
    "rule": "prefix_aware",
    "first": 32,
    **{f"{name}_ns": value for name, value in CHUNK_TIME.items()},
}
TARGETS: dict[str | None, tuple[int, int]] = {None: (9_000, 2_000), "chat": (5_000, 1_300)}

ORACLES: dict[str, Case] = {
    "prefill_priority": Case("prefill_priority", {}, lambda: prefill_priority),
    "orca": Case("orca", {}, lambda: orca(1 << 30)),
    "orca of 3": Case("orca", {"max_batch_size": 3}, lambda: orca(3)),
    "request_level": Case("request_level", {"max_batch_size": 3, "early_return": True}, lambda: request_level(3)),
    "chunked": Case("chunked", {"chunk_size": 12}, lambda: chunked(12)),
    "chunked of 3": Case("chunked", {"chunk_size": 3}, lambda: chunked(3)),
    "decode_maximal": Case("decode_maximal", {"chunk_size": 24}, lambda: decode_maximal(24, "pad")),
    "decode_maximal, shrunk": Case(
        "decode_maximal", {"chunk_size": 24, "align": "shrink"}, lambda: decode_maximal(24, "shrink")
    ),
    "decode_maximal of 5": Case(
        "decode_maximal", {"chunk_size": 5, "align": "none"}, lambda: decode_maximal(5, "none")
    ),
    "dynamic_chunk": Case("dynamic_chunk", SIZES, lambda: decode_maximal(by_load, "pad")),
    "dynamic_chunk, merged": Case(
        "dynamic_chunk", {**SIZES, "merge": True}, lambda: decode_maximal(by_load, "pad", merge=True)
    ),
    "dynamic_chunk, merged and shrunk": Case(
        "dynamic_chunk",
        {**SIZES, "merge": True, "align": "shrink"},
        lambda: decode_maximal(by_load, "shrink", merge=True),
    ),
    "dynamic_chunk by TBT": Case(
        "dynamic_chunk",
        {"rule": "tbt_slo", "tbt_target_s": 1.35e-6, "largest": 64},
        lambda: decode_maximal(by_tbt(1_350, 64), "pad"),
        estimate,
    ),
    "dynamic_chunk by prefix": Case(
        "dynamic_chunk", PREFIX_AWARE, lambda: decode_maximal(by_prefix(32, **CHUNK_TIME), "pad")
    ),
    "vllm_v1": Case("vllm_v1", {}, lambda: vllm_v1(2048, 0)),
    "vllm_v1 by 7": Case("vllm_v1", {"long_prefill_token_threshold": 7}, lambda: vllm_v1(2048, 7)),
    "shortest_prompt_first": Case("shortest_prompt_first", {"chunk_size": 12, "ageing": 1e7}, lambda: chunked(12, age)),
    "slo_aware": Case(
        "slo_aware", {"chunk_size": 12, "ttft_s": 5e-6, "tbt_s": 2e-6}, lambda: slo_aware(12, 5_000, 2_000)
    ),
    "slo_aware by time": Case(
        "slo_aware",
        {"chunk_size": 44, "ttft_s": 9e-6, "tbt_s": 2e-6, "classes": "chat:ttft=5e-6,tbt=1.3e-6"},
        lambda: slo_aware_by_time(44, TARGETS),
        estimate,
    ),
}


def simulate(
    oracle: Oracle, requests: list[tuple[Request, int]], total: int, longest: int
) -> tuple[list[object], dict[int, list[int]]]:
    """(start, rows by request, dummy rows) of every batch, and every token's time."""
    pending = [Job(request, output) for request, output in requests]
    everybody, waiting, running = list(pending), [], []
    now, free = 0, total
    batches: list[object] = []
    while pending or waiting or running:
        while pending and pending[0].request.arrival_ns <= now:
            waiting.append(pending.pop(0))
        plan = Plan(running, waiting, free, total, now, longest)
        oracle(plan)
        free = plan.free
        if not plan.jobs:
            now = max(now, pending[0].request.arrival_ns)
            continue
        batches.append((now, {job.request.id: (tokens, job.context) for job, tokens in plan.jobs}, plan.dummy))
        contexts = sum(job.context for job, _ in plan.jobs if job.decodes)
        now += 1000 + 10 * (plan.used + plan.dummy) + contexts // 16
        for job, tokens in plan.jobs:
            job.context += tokens
            if job.context == job.known:
                job.produced += 1
                job.prefilled = True
                job.last_ns = now
                job.times.append(now)
                if job.produced == job.output:
                    running.remove(job)
                    free += job.blocks
    return batches, {job.request.id: job.times for job in everybody}


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[tuple[Request, int]], int]:
    """Requests, and a pool of at least what the longest of them needs: often too small for all."""
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 3000),
                st.integers(1, 40),
                st.integers(1, 25),
                st.integers(0, 5),
                st.integers(-1, 1),
                st.sampled_from([None, "chat"]),
            ),
            min_size=1,
            max_size=12,
        )
    )
    requests, now = [], 0
    for row, (gap, prompt, output, slack, priority, slo) in enumerate(rows):
        now += gap
        requests.append((Request(row, now, prompt, output + slack, priority=priority, slo=slo), output))
    longest = max(request.prompt_tokens + request.max_output_tokens for request, _ in requests)
    return requests, blocks(longest) + draw(st.integers(0, 12) | st.integers(0, 150))


@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=60 * max(1, MORE), deadline=None, derandomize=not MORE)
@given(workload=workloads(), by_id=st.booleans())
def test_a_policy_plans_what_its_paper_says(
    name: str, workload: tuple[list[tuple[Request, int]], int], by_id: bool
) -> None:
    requests, total = workload
    policy, knobs, oracle, estimator = ORACLES[name]
    longest = max(request.prompt_tokens + request.max_output_tokens for request, _ in requests)
    scheduler = make_scheduler(
        make_policy(policy, knobs),
        num_blocks=total,
        block_size=BLOCK,
        max_model_len=longest,
        watermark=0.0,
        tile=TILE,
        by_id=by_id,
        estimator=estimator,
    )
    log = drive(scheduler, requests)
    expected, times = simulate(oracle(), requests, total, longest)
    found = [
        (planned, {request: (tokens, context) for request, tokens, context in rows}, shape.dummy_tokens)
        for _, planned, shape, rows in log.batches
    ]
    assert found == expected
    assert log.token_times == times
