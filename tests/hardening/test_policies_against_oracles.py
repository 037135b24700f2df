"""Every policy against its page in the reference simulator, written from its paper, on small pools that preempt.

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
from simulator.reference.books import Books, Limits
from simulator.reference.pages import PAGES
from tests.policies.driving import drive

MORE = int(os.environ.get("MORE", "0"))
"""MORE=10 in the environment: ten times as many workloads, and others every time."""


BLOCK = 4
TILE = 8


def estimate(shape: BatchShape) -> int:
    """What a cost model says: by rows, by what decodes look back on, and by what chunks do."""
    return 1000 + 10 * shape.rows + shape.decode_context_total // 16 + sum(prefix for _, prefix in shape.chunks) // 2


class Case(NamedTuple):
    policy: str
    knobs: dict[str, object]
    estimator: Callable[[BatchShape], int] | None = None


SIZES: dict[str, object] = {"large": 32, "middle": 24, "small": 16}
PREFIX_AWARE: dict[str, object] = {
    "rule": "prefix_aware", "first": 32, "c_ns": 1000, "g_ns": 5, "b_ns": 100, "a_ns": 2,
}  # fmt: skip

CASES: dict[str, Case] = {
    "prefill_priority": Case("prefill_priority", {}),
    "orca": Case("orca", {}),
    "orca of 3": Case("orca", {"max_batch_size": 3}),
    "request_level": Case("request_level", {"max_batch_size": 3}),
    "chunked": Case("chunked", {"chunk_size": 12}),
    "chunked of 3": Case("chunked", {"chunk_size": 3}),
    "decode_maximal": Case("decode_maximal", {"chunk_size": 24}),
    "decode_maximal, shrunk": Case("decode_maximal", {"chunk_size": 24, "align": "shrink"}),
    "decode_maximal of 5": Case("decode_maximal", {"chunk_size": 5, "align": "none"}),
    "dynamic_chunk": Case("dynamic_chunk", SIZES),
    "dynamic_chunk, merged": Case("dynamic_chunk", {**SIZES, "merge": True}),
    "dynamic_chunk, merged and shrunk": Case("dynamic_chunk", {**SIZES, "merge": True, "align": "shrink"}),
    "dynamic_chunk by TBT": Case(
        "dynamic_chunk", {"rule": "tbt_slo", "tbt_target_s": 1.35e-6, "largest": 64}, estimate
    ),
    "dynamic_chunk by prefix": Case("dynamic_chunk", PREFIX_AWARE),
    "dynamic_chunk by prefix, from estimates": Case("dynamic_chunk", {"rule": "prefix_aware", "first": 32}, estimate),
    "vllm_v1": Case("vllm_v1", {}),
    "vllm_v1 by 7": Case("vllm_v1", {"long_prefill_token_threshold": 7}),
    "shortest_prompt_first": Case("shortest_prompt_first", {"chunk_size": 12, "ageing": 1e7}),
    "slo_aware": Case("slo_aware", {"chunk_size": 12, "ttft_s": 5e-6, "tbt_s": 2e-6}),
    "slo_aware by time": Case(
        "slo_aware",
        {"chunk_size": 44, "ttft_s": 9e-6, "tbt_s": 2e-6, "classes": "chat:ttft=5e-6,tbt=1.3e-6"},
        estimate,
    ),
}


def simulate(books: Books, requests: list[tuple[Request, int]]) -> tuple[list[object], dict[int, list[int]]]:
    """(start, rows by request, dummy rows) of every batch, and every token's time."""
    pending, jobs = list(requests), []
    now = 0
    batches: list[object] = []
    while pending or books.waiting or books.line:
        while pending and pending[0][0].arrival_ns <= now:
            jobs.append(books.add(*pending.pop(0), now))
        batch = books.plan(now)
        if batch is None:
            now = max(now, pending[0][0].arrival_ns)
            continue
        rows = {row.job.request.id: (row.tokens, row.prefix) for row in batch.rows}
        batches.append((now, rows, batch.shape.dummy_tokens))
        now += 1000 + 10 * batch.shape.rows + batch.shape.decode_context_total // 16
        books.complete(batch, now)
    return batches, {job.request.id: job.steps for job in jobs}


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
    return requests, -(-longest // BLOCK) + draw(st.integers(0, 12) | st.integers(0, 150))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60 * max(1, MORE), deadline=None, derandomize=not MORE)
@given(workload=workloads(), by_id=st.booleans())
def test_a_policy_plans_what_its_paper_says(
    name: str, workload: tuple[list[tuple[Request, int]], int], by_id: bool
) -> None:
    requests, total = workload
    case = CASES[name]
    policy = make_policy(case.policy, case.knobs)
    longest = max(request.prompt_tokens + request.max_output_tokens for request, _ in requests)
    scheduler = make_scheduler(
        policy,
        num_blocks=total,
        block_size=BLOCK,
        max_model_len=longest,
        watermark=0.0,
        tile=TILE,
        by_id=by_id,
        estimator=case.estimator,
    )
    limits = Limits(
        total,
        BLOCK,
        longest,
        token_budget=policy.default_token_budget(longest),
        max_num_seqs=policy.default_max_num_seqs(),
        together=case.policy == "request_level",
        answers_together=policy.answers_together,
        tile=TILE,
        estimate=case.estimator,
    )
    log = drive(scheduler, requests)
    expected, times = simulate(Books(PAGES[type(policy)], policy, limits), requests)
    found = [
        (planned, {request: (tokens, context) for request, tokens, context in rows}, shape.dummy_tokens)
        for _, planned, shape, rows in log.batches
    ]
    assert found == expected
    assert log.token_times == times
