"""Graphs: buckets, padding and equal results, with recorded operations on the CPU and real graphs where there is CUDA."""

from __future__ import annotations

from dataclasses import replace
from functools import cache as once

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.batches.batch_arrays import Step
from executor.batches.device_arrays import Sizes, sizes_of
from executor.errors import ExecutorError
from executor.kv_memory.pool import KVCache
from executor.model.cuda_graphs import Buckets, GraphedModel, graphs_for
from executor.model.loading import Loaded, load_model
from profiler.specs.model_spec import ModelSpec
from tests.executor.batches import blocks_needed, make_step
from tests.executor.recorded_graph import RecordedGraph

SPEC = ModelSpec(
    name="small",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=40,
    vocab=61,
    max_position=512,
    qk_norm=True,
)
BUCKETS = Buckets(blocks=10, decodes=(1, 2, 4, 8), chunk_rows=96, tile=16, chunks=3)


@once
def loaded() -> Loaded:
    return load_model(SPEC, device="cpu", dtype="float64", kernels="plain_device", attention="paged", seed=5)


def graphed(pool: KVCache, **options: int) -> GraphedModel:
    return GraphedModel(loaded().model, pool, BUCKETS, new_capture=RecordedGraph, **options)


def pool_for(*steps: Step) -> KVCache:
    pool = loaded().new_cache(max(blocks_needed(step) for step in steps), 16)
    pool.pool.copy_(torch.randn(pool.pool.shape, generator=torch.Generator().manual_seed(0)))
    return pool


def both_ways(model: GraphedModel, pool: KVCache, step: Step) -> None:
    """Logits and pool are those of the plain pass, and no slot is touched but the batch's own, block 0 included."""
    start = pool.pool.clone()
    ids = torch.from_numpy(step.token_ids)
    expected = loaded().model.forward(ids, step, pool).clone()
    after = pool.pool.clone()
    pool.pool.copy_(start)
    step.arrays = None
    got = model.forward(ids, step, pool)
    assert torch.allclose(got, expected, atol=1e-12, rtol=0)
    assert torch.allclose(pool.pool, after, atol=1e-12, rtol=0)
    others = torch.ones(pool.blocks * 16, dtype=torch.bool)
    others[torch.from_numpy(step.slots[step.slots >= 0])] = False
    others = others.view(1, 1, pool.blocks, 1, 16, 1).expand_as(start)
    assert torch.equal(pool.pool[others], start[others])


def test_batches_fall_into_tile_aligned_buckets() -> None:
    def fit(chunks: list[tuple[int, int]], decodes: list[int], dummies: int = 0) -> Sizes | None:
        return BUCKETS.fit(sizes_of(make_step(chunks, decodes, dummies=dummies), 16, 16))

    five = fit([], [3, 9, 1, 0, 70])
    assert five is not None
    assert (five.rows, five.chunk_rows, five.decodes, five.sampled, five.tiles) == (8, 0, 8, 8, 0)
    mixed = fit([(20, 0), (5, 9)], [3, 9, 1])
    assert mixed is not None
    assert (mixed.rows, mixed.chunk_rows, mixed.decodes, mixed.sampled, mixed.tiles) == (36, 32, 4, 7, 5)
    padded = fit([(20, 0)], [3], dummies=11)  # 20 + 11 dummies need two tiles, as 20 alone would
    assert padded is not None
    assert (padded.chunk_rows, padded.rows) == (32, 33)
    assert fit([(97, 0)], []) is None
    assert fit([(1, 0)] * 4, []) is None
    assert fit([], [1] * 9) is None


def test_a_replay_equals_the_plain_pass_and_padding_writes_nowhere() -> None:
    steps = [
        make_step([], [3, 9, 40], vocab=61, seed=1),
        make_step([], [30, 2, 77, 5], vocab=61, seed=2),
        make_step([(20, 0), (5, 31)], [3, 99], vocab=61, seed=3),
        make_step([(32, 16)], [7, 8, 9], vocab=61, seed=4),
        make_step([(1, 120)], [], vocab=61, seed=5),
        make_step([(17, 3)], [1], dummies=5, vocab=61, seed=6),
    ]
    pool = pool_for(*steps)
    model = graphed(pool)
    for step in [*steps, *reversed(steps)]:
        both_ways(model, pool, step)
    assert model.counts.captured == 5  # chunk rows + decodes: 0 + 4 (twice), 32 + 2, 32 + 4, 16 + 0, 32 + 1
    assert model.counts.replayed == 12
    assert model.counts.without == 0


def test_a_chunk_in_the_middle_of_a_prompt_samples_nothing_and_has_its_graph_all_the_same() -> None:
    step = make_step([(20, 31)], [], vocab=61, seed=2)
    step = replace(step, sampled_rows=step.sampled_rows[:0], sampled_table=step.sampled_table[:0])
    pool = pool_for(step)
    model = graphed(pool)
    both_ways(model, pool, step)
    both_ways(model, pool, make_step([(30, 5)], [], vocab=61, seed=3))
    both_ways(model, pool, step)
    assert (model.counts.captured, model.counts.replayed, model.counts.without) == (1, 3, 0)


@once
def shared() -> tuple[GraphedModel, KVCache]:
    """One model for all examples, as in a run: graphs captured for one batch serve the next."""
    pool = loaded().new_cache(112, 16)
    pool.pool.copy_(torch.randn(pool.pool.shape, generator=torch.Generator().manual_seed(0)))
    return graphed(pool), pool


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 100)), max_size=3),
    st.lists(st.integers(0, 150), max_size=8),
    st.integers(0, 1000),
)
def test_any_batch_is_unchanged_by_graphs(chunks: list[tuple[int, int]], decodes: list[int], seed: int) -> None:
    if chunks or decodes:
        step = make_step(chunks, decodes, vocab=61, seed=seed)
        both_ways(*shared(), step)


def test_what_fits_no_bucket_runs_without_a_graph() -> None:
    step = make_step([(100, 0)], [3], vocab=61)
    pool = pool_for(step)
    model = graphed(pool)
    both_ways(model, pool, step)
    assert (model.counts.captured, model.counts.without, model.executed_rows) == (0, 1, 101)


def test_the_cache_of_graphs_is_bounded_by_memory() -> None:
    steps = [make_step([], [3] * n, vocab=61) for n in (1, 2, 4, 8)]
    pool = pool_for(*steps)
    model = graphed(pool, most_bytes=1)
    for step in [*steps, steps[0]]:
        both_ways(model, pool, step)
    assert (model.counts.captured, model.counts.evicted) == (5, 4)
    assert model.executed_rows == 1


def test_warming_captures_the_decode_buckets_and_serving_captures_no_more() -> None:
    step = make_step([], [3, 4, 5], vocab=61)
    pool = pool_for(step)
    before = pool.pool.clone()
    model = graphed(pool)
    model.warm()
    assert model.counts.captured == 4
    assert torch.equal(pool.pool, before)
    both_ways(model, pool, step)
    assert (model.counts.captured, model.executed_rows) == (4, 4)


def test_a_run_captures_what_it_may_meet_and_no_more() -> None:
    buckets = Buckets(blocks=10, decodes=(1, 2, 4, 8), chunk_rows=32, tile=16, chunks=3, mixed_decodes=(4, 8))
    found = [(sizes.chunk_rows, sizes.decodes) for sizes in buckets.all_sizes(3)]
    assert found == [(0, 4), (0, 2), (0, 1), (32, 4), (32, 0), (16, 4), (16, 0)]
    assert [(sizes.chunk_rows, sizes.decodes) for sizes in buckets.all_sizes(100)][:5] == [
        (0, 8),
        (0, 4),
        (0, 2),
        (0, 1),
        (32, 8),
    ]
    # A chunk beside one decode has the bucket of four.
    fitted = buckets.fit(sizes_of(make_step([(20, 0)], [3]), 16, 16))
    assert fitted is not None
    assert (fitted.chunk_rows, fitted.decodes, fitted.rows) == (32, 4, 36)


def test_kernels_that_wait_are_refused_and_the_stand_in_would_catch_them() -> None:
    step = make_step([], [3])
    waiting = load_model(SPEC, device="cpu", dtype="float64", kernels="torch", attention="paged", seed=5)
    with pytest.raises(ExecutorError, match="torch cannot be captured"):
        GraphedModel(waiting.model, pool_for(step), BUCKETS, new_capture=RecordedGraph)
    with pytest.raises(RuntimeError, match="not permitted"):
        RecordedGraph().capture(lambda: waiting.model.forward(torch.from_numpy(step.token_ids), step, pool_for(step)))
    with pytest.raises(ExecutorError, match="power of two"):
        Buckets(blocks=1, tile=24)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_real_graphs_equal_the_plain_pass() -> None:
    ours = load_model("nano", device="cuda", dtype="bfloat16", kernels="triton", attention="triton", seed=5)
    steps = [make_step([], [3, 9, 40], seed=1), make_step([(200, 0), (5, 31)], [3, 99], seed=3)]
    pool = ours.new_cache(max(blocks_needed(step) for step in steps), 16)
    pool.pool.normal_()
    model = GraphedModel(ours.model, pool, Buckets(blocks=16))
    for step in [*steps, *steps]:
        step.device = torch.device("cuda")
        step.arrays = None
        ids = step.tensor(step.token_ids)
        expected = ours.model.forward(ids, step, pool).clone()
        # Padding changes the matrix products' tiles, and with them the order of their sums: 8 bits of mantissa.
        difference = (model.forward(ids, step, pool) - expected).abs().max()
        assert float(difference) <= 0.03 * float(expected.abs().max())
    assert model.counts.captured == 2
    assert np.isfinite(expected.float().cpu().numpy()).all()


def test_a_live_run_through_graphs_answers_as_without_and_records_the_rows_that_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from executor.serving import runner
    from executor.serving.replay import replay_live
    from workloads.trace import Trace

    prompt, output = np.array([40, 9, 23, 70]), np.array([6, 9, 3, 8])
    trace = Trace("small", np.zeros(4), prompt, output, output)
    options = {"policy": "chunked", "chunk_size": 32, "as_fast_as_possible": True}
    plain = replay_live(trace, loaded=loaded(), **options)
    monkeypatch.setattr(
        runner,
        "graphs_for",
        lambda model, cache, longest: GraphedModel(model.model, cache, BUCKETS, new_capture=RecordedGraph),
    )
    ours = replay_live(trace, loaded=loaded(), **options)
    assert ours.answers == plain.answers
    rows = (
        ours.tables.iterations.to_pandas() if hasattr(ours.tables.iterations, "to_pandas") else ours.tables.iterations
    )
    executed = rows["executed_rows"].to_numpy()
    useful = (rows["chunk_tokens"] + rows["decodes"]).to_numpy()
    assert (executed[executed > 0] > useful[executed > 0]).all()
    assert (executed > 0).any()


def test_graphs_are_asked_for_in_words() -> None:
    with pytest.raises(ExecutorError, match="graphs: found 'maybe', expected one of auto, on, off"):
        load_model(SPEC, device="cpu", graphs="maybe")
    step = make_step([], [3])
    wanted = load_model(SPEC, device="cpu", dtype="float64", kernels="plain_device", attention="paged", graphs="on")
    with pytest.raises(ExecutorError, match="CUDA graphs need a CUDA device"):
        graphs_for(wanted, pool_for(step), 100)
    assert graphs_for(loaded(), pool_for(step), 100) is None


def test_measured_batches_run_through_graphs_that_were_captured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from executor.measuring.batch_rig import BatchRig
    from executor.measuring.profile_rows import iteration_rows
    from executor.serving import runner
    from policies import BatchShape
    from profiler.measurements.plan import Point

    buckets = Buckets(blocks=40, decodes=(1, 2, 4, 8), chunk_rows=96, tile=16, chunks=3)
    monkeypatch.setattr(
        runner,
        "graphs_for",
        lambda model, cache, longest: GraphedModel(model.model, cache, buckets, new_capture=RecordedGraph),
    )
    rig = BatchRig(loaded(), most_tokens=2000, longest=300)
    points = [
        Point(BatchShape(((20, 60),), 3, 300, 120, 0, 4), "visited"),
        Point(BatchShape((), 3, 90, 40, 0, 3), "visited"),
        Point(BatchShape(((200, 0),), 0, 0, 0, 0, 1), "visited"),
    ]
    rig.warm(points)
    graphs = rig.runner.graphs
    assert graphs is not None
    assert graphs.counts.captured == 2, "200 rows are beyond any bucket"
    timings = [rig.measure(point) for point in points]
    assert [timing.executed_rows for timing in timings] == [36, 4, 0]
    assert [timing.shape for timing in timings] == [point.shape for point in points]
    assert graphs.counts.captured == 3, (
        "the step in which the decodes join has a bucket too, outside of what is measured"
    )
    entries = [
        {
            "key": (0, number, 0),
            "shape": timing.shape,
            "before_ns": 1,
            "device_ns": 1,
            "after_ns": 1,
            "cpu_ns": 1,
            "wall_ns": 1,
            "at_s": 0.0,
            "executed_rows": timing.executed_rows,
        }
        for number, timing in enumerate(timings)
    ]
    assert [row["rows"] for row in iteration_rows(entries, loaded())] == [36, 4, 200]
