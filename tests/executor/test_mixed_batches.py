"""Mixed batches change nothing: whatever the policy batches, every request answers as if it ran alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.config import LiveConfig
from executor.model.loading import Loaded, load_model
from executor.native.library import native_reason
from executor.serving.prompts import random_prompts
from executor.serving.replay import LiveRun, replay_live
from policies import knobs_of, policy_class, policy_names
from profiler.specs.model_spec import ModelSpec
from tests.executor.batches import blocks_needed, make_step
from workloads.trace import Trace

SPEC = ModelSpec(
    name="small", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=40, vocab=61, max_position=512
)
MARGIN = 2e-4
"""Top-2 logit margin below which float32 may choose otherwise; logits of SPEC are of order 0.1."""

needs_native = pytest.mark.skipif(bool(native_reason()), reason=native_reason())


@cache
def model(dtype: str, kernels: str, attention: str, kv_dtype: str = "auto") -> Loaded:
    return load_model(SPEC, device="cpu", dtype=dtype, kv_dtype=kv_dtype, kernels=kernels, attention=attention, seed=5)


def small_trace(lengths: list[tuple[int, int]]) -> Trace:
    prompt, output = (np.array(column) for column in zip(*lengths))
    return Trace("small", np.zeros(len(lengths)), prompt, output, output)


@cache
def alone(loaded: Loaded, prompt_tokens: int, output_tokens: int, row: int) -> tuple[int, ...]:
    """The request's greedy answer when nobody else is there and its prompt is one chunk."""
    trace = small_trace([(1, 1)] * row + [(prompt_tokens, output_tokens)])
    ids = random_prompts(trace, SPEC.vocab)(row)
    run = replay_live(
        small_trace([(prompt_tokens, output_tokens)]), loaded=loaded, policy="vllm_v1", prompts=lambda _: ids
    )
    return tuple(run.answers[0])


def serve(loaded: Loaded, trace: Trace, **options: Any) -> LiveRun:
    config = LiveConfig(as_fast_as_possible=True, poison=not options.get("knobs", {}).get("prefix_caching", False))
    return replay_live(trace, config, loaded=loaded, prompts=random_prompts(trace, SPEC.vocab), **options)


def margin(loaded: Loaded, ids: np.ndarray) -> float:
    """Top-2 margin of the logits after `ids`, computed in one chunk."""
    step = make_step([(len(ids), 0)], [], vocab=SPEC.vocab)
    step.token_ids[:] = ids
    logits = loaded.model.forward(torch.from_numpy(step.token_ids), step, loaded.new_cache(blocks_needed(step), 16))
    top = logits[0].double().topk(2).values
    return float(top[0] - top[1])


def check(loaded: Loaded, trace: Trace, run: LiveRun, *, exact: bool) -> None:
    assert set(run.tables.column("requests", "status")) == {"finished"}
    prompts = random_prompts(trace, SPEC.vocab)
    for row, answer in run.answers.items():
        expected = alone(loaded, int(trace.prompt_tokens[row]), int(trace.output_tokens[row]), row)
        assert len(answer) == len(expected)
        if tuple(answer) == expected:
            continue
        assert not exact, f"request {row}"
        at = next(i for i, (ours, theirs) in enumerate(zip(answer, expected)) if ours != theirs)
        assert margin(loaded, np.concatenate((prompts(row), expected[:at]))) < MARGIN, f"request {row}, token {at}"


def knobs_for(policy: str, chunk_size: int) -> dict[str, Any]:
    return {"chunk_size": chunk_size} if "chunk_size" in knobs_of(policy_class(policy)) else {}


LENGTHS = [(37, 7), (5, 11), (64, 3), (1, 9), (90, 2)]


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 128, 256, 10_000])
@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_and_chunk_size_answers_as_alone_in_float64(policy: str, chunk_size: int) -> None:
    knobs = knobs_for(policy, chunk_size)
    if not knobs and chunk_size != 64:
        pytest.skip("the policy has no chunk size")
    loaded = model("float64", "torch", "reference")
    trace = small_trace(LENGTHS)
    # Ample but not endless: the decode-maximal family makes as many slots as the pool holds.
    run = serve(loaded, trace, policy=policy, knobs=knobs, num_blocks=60, block_size=8)
    check(loaded, trace, run, exact=True)


@pytest.mark.parametrize("block_size", [1, 5, 128])
@pytest.mark.parametrize("policy", policy_names())
def test_block_size_changes_no_answer(policy: str, block_size: int) -> None:
    loaded = model("float64", "torch", "sdpa")
    trace = small_trace(LENGTHS)
    run = serve(loaded, trace, policy=policy, knobs=knobs_for(policy, 32), block_size=block_size)
    check(loaded, trace, run, exact=True)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=2, max_size=6),
    policy=st.sampled_from(policy_names()),
    chunk_size=st.sampled_from([1, 7, 64, 128]),
    block_size=st.sampled_from([1, 4, 7, 16]),
    spare=st.integers(0, 6),
    ahead=st.booleans(),
)
def test_preemption_recompute_and_asynchronous_planning_change_no_answer(
    lengths: list[tuple[int, int]], policy: str, chunk_size: int, block_size: int, spare: int, ahead: bool
) -> None:
    """A pool that just holds the longest request forces preemption; freed blocks hold NaN until written again."""
    loaded = model("float64", "torch", "reference")
    trace = small_trace(lengths)
    need = max(-(-(prompt + output) // block_size) for prompt, output in lengths)
    run = serve(
        loaded,
        trace,
        policy=policy,
        knobs=knobs_for(policy, chunk_size),
        block_size=block_size,
        num_blocks=need + spare,
        watermark=0.0,
        ahead=ahead,
    )
    check(loaded, trace, run, exact=True)


def test_prefix_hits_change_no_answer() -> None:
    loaded = model("float64", "torch", "reference")
    hashes = [(1, 2, 3), (1, 2, 3), (1, 2, 9), (4,), (1, 2)]
    lengths = [(50, 5), (50, 5), (48, 7), (20, 3), (33, 6)]
    prompt, output = (np.array(column) for column in zip(*lengths))
    trace = Trace("shared", np.zeros(5), prompt, output, output, prefix_hashes=hashes, hash_tokens=16)
    prompts = random_prompts(trace, SPEC.vocab)
    run = serve(loaded, trace, policy="vllm_v1", knobs={"prefix_caching": True}, token_budget=60, block_size=16)
    assert sum(run.tables.column("requests", "cached_tokens")) > 0
    for row in range(5):
        single = replay_live(
            small_trace([lengths[row]]), loaded=loaded, policy="vllm_v1", prompts=lambda _, row=row: prompts(row)
        )
        assert run.answers[row] == single.answers[0]


@needs_native
@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("ahead", [False, True])
def test_float32_kernels_answer_as_alone_up_to_the_margin(policy: str, ahead: bool) -> None:
    loaded = model("float32", "native", "native")
    trace = small_trace(LENGTHS)
    run = serve(
        loaded,
        trace,
        policy=policy,
        knobs=knobs_for(policy, 33),
        block_size=8,
        num_blocks=16,
        watermark=0.0,
        ahead=ahead,
    )
    check(loaded, trace, run, exact=False)


@needs_native
@settings(max_examples=10, deadline=None)
@given(
    cut=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    neighbours=st.lists(st.integers(1, 90), max_size=9),
    block_size=st.sampled_from([4, 16, 30]),
)
def test_the_kernels_give_equal_bits_however_a_prompt_is_cut(
    cut: list[int], neighbours: list[int], block_size: int
) -> None:
    """Stronger than the margin rule: chunking, block size and neighbours do not change one bit of the C++ kernels."""
    loaded = model("float32", "native", "native")
    length = sum(cut)
    ids = np.random.default_rng(1).integers(0, SPEC.vocab, length)

    def last_logits(sizes: list[int], block: int, others: list[int]) -> torch.Tensor:
        done, cache = 0, None
        for size in sizes:
            step = make_step([(size, done), *[(n, 0) for n in others]], [], block_size=block, vocab=SPEC.vocab)
            # One table for the whole request: the first `length` slots of its own blocks, then the others'.
            blocks = -(-length // block)
            tables = np.zeros((len(step.tables), max(blocks, step.tables.shape[1])), np.int32)
            tables[:, : step.tables.shape[1]] = step.tables + blocks
            tables[0] = 0
            tables[0, :blocks] = np.arange(1, blocks + 1)
            step.tables = tables
            step.slots[step.slots >= 0] += blocks * block
            span = np.arange(done, done + size)
            step.slots[:size] = tables[0, span // block] * block + span % block
            step.token_ids[:size] = ids[done : done + size]
            if cache is None:
                cache = loaded.new_cache(400 + 60 * len(others), block)
            out = loaded.model.forward(torch.from_numpy(step.token_ids), step, cache)[0].clone()
            done += size
        return out

    assert torch.equal(last_logits(cut, block_size, neighbours), last_logits([length], 16, []))


@pytest.mark.parametrize(("kernels", "attention"), [("torch", "sdpa"), ("native", "native")])
def test_bfloat16_logits_stay_within_its_rounding(kernels: str, attention: str) -> None:
    """Weights and pool in bfloat16: 8 bits of mantissa, so a few per cent of the largest logit at most."""
    if kernels == "native" and native_reason():
        pytest.skip(native_reason())
    step = make_step([(40, 0), (9, 31), (1, 17)], [3, 60, 15], vocab=SPEC.vocab, dummies=5)
    results = []
    for loaded in (model("float64", "torch", "reference"), model("bfloat16", kernels, attention)):
        cache = loaded.new_cache(blocks_needed(step), 16)
        values = torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(0))
        cache.pool.copy_(values)
        results.append(loaded.model.forward(torch.from_numpy(step.token_ids), step, cache).double().clone())
    exact, rounded = results
    assert float((exact - rounded).abs().max()) < 0.04 * float(exact.abs().max())
