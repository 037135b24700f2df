"""No stage costs less than its FLOPs at peak or the weights, keys and values it streams at full bandwidth."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.work.batch import BatchShape
from profiler.evidence import parts_of
from profiler.load import load_cost_model
from profiler.specs.hardware import load_hardware
from profiler.specs.model_config import load_model_spec
from profiler.specs.shape_columns import ShapeColumns
from profiler.specs.useful_work import flops_of, kv_tokens_of

GPUS = ("a100", "a6000", "h100", "h200", "rtx4090", "rtxpro6000")
MOST = 1_000_000


@cache
def cost(gpu: str, model: str = "llama-3.1-8b", kind: str = "auto", draw: int | None = None) -> Any:
    found: Any = load_cost_model(model, gpu, cost_model=kind)
    return found if draw is None else found.perturbed(draw)


def floor_ns(gpu: str, model: str, shapes: list[BatchShape]) -> np.ndarray:
    """Model FLOPs at peak, or weights and keys and values read at full bandwidth, of 16 bits each."""
    spec, hardware = load_model_spec(model), load_hardware(gpu)
    columns = ShapeColumns.of(shapes)
    flops = flops_of(spec, columns) / hardware.peak("bfloat16")
    gemms = spec.layers * sum(gemm.n * gemm.k for gemm in spec.gemms(1))
    head = spec.head_gemm(1).n * spec.head_gemm(1).k
    weights = gemms * (columns.rows > 0) + head * (columns.sampled > 0)
    read = kv_tokens_of(spec, columns) - columns.tokens
    moved = 2 * weights + read * spec.kv_bytes_per_token("bfloat16")
    return np.asarray(np.maximum(flops, moved / hardware.memory_bandwidth) * 1e9)


sizes = st.integers(0, 20).flatmap(lambda power: st.integers(1, min(MOST, 2 << power)))


@st.composite
def batches(draw: st.DrawFn) -> BatchShape:
    chunks = tuple(draw(st.lists(st.tuples(sizes, st.one_of(st.just(0), sizes)), max_size=3)))
    decodes = draw(st.one_of(st.just(0), st.integers(1, 3000))) if chunks else draw(st.integers(1, 3000))
    context = draw(sizes) if decodes else 0
    return BatchShape(chunks, decodes, decodes * context, context, 0, decodes + draw(st.integers(0, len(chunks))))


@pytest.mark.parametrize("gpu", GPUS)
@settings(max_examples=12, deadline=None)
@given(st.lists(batches(), min_size=1, max_size=4), st.sampled_from([None, 0]))
def test_no_stage_beats_peak_or_bandwidth(gpu: str, shapes: list[BatchShape], draw: int | None) -> None:
    model = cost(gpu, draw=draw)
    least = floor_ns(gpu, "llama-3.1-8b", shapes)
    scalar = [model.stage_ns(shape) for shape in shapes]
    # A nanosecond for every term that is rounded.
    assert (np.array(scalar) >= least - 16).all()
    assert model.predict_ns(shapes).tolist() == scalar
    assert [model.iteration_ns(shape)[2] for shape in shapes] == scalar
    assert [model.stages_ns(shape)[0][0] for shape in shapes] == scalar
    assert [model.repeat_ns(shape, 2)[0] for shape in shapes] == scalar


@settings(max_examples=12, deadline=None)
@given(st.lists(batches(), min_size=1, max_size=4), st.sampled_from(["h100", "rtx4090"]))
def test_neither_does_a_roofline(shapes: list[BatchShape], gpu: str) -> None:
    assert (cost(gpu, kind="roofline").predict_ns(shapes) >= floor_ns(gpu, "llama-3.1-8b", shapes) - 16).all()


@settings(max_examples=8, deadline=None)
@given(st.lists(batches(), min_size=1, max_size=3))
def test_nor_do_layouts_and_windows_that_were_not_measured(shapes: list[BatchShape]) -> None:
    for gpu, model in (("h100", "mistral-7b-v0.1"), ("a6000", "llama-13b"), ("rtx4090", "qwen2.5-7b")):
        assert (cost(gpu, model).predict_ns(shapes) >= floor_ns(gpu, model, shapes) - 16).all()


def test_a_prompt_beyond_the_tables_keeps_the_efficiency_of_the_longest_there() -> None:
    # On an A6000 16,384 tokens take 27.1 ms of attention a layer, which is 0.202 ns a pair of query and key (52 % of
    # peak); 100,000 tokens have 5,000,050,000 pairs: 1.01 s a layer, 32 layers.
    parts = cost("a6000").breakdown(BatchShape(((100_000, 0),), 0, 0, 0, 0, 1))
    assert parts["attention"] == pytest.approx(5_000_050_000 * 0.20201 * 32, rel=1e-3)
    whole = cost("a6000").breakdown(BatchShape(((16_384, 0),), 0, 0, 0, 0, 1))
    assert whole["attention"] == pytest.approx(134_225_920 * 0.20201 * 32, rel=1e-3)


@pytest.mark.parametrize("gpu", GPUS)
def test_chunks_whose_share_no_column_holds_cost_what_scalars_say(gpu: str) -> None:
    # Their share of the machine in 64 bits once wrapped around to less than nothing.
    shape = BatchShape(((100_000, 0), (500, 0)), 1, 500, 500, 0, 3)
    longer = BatchShape(((900_000, 50_000), (800_000, 0)), 0, 0, 0, 0, 0)
    alone = [BatchShape((chunk,), 0, 0, 0, 0, 0) for chunk in shape.chunks]
    model = cost(gpu)
    assert model.stage_ns(shape) > max(model.stage_ns(one) for one in alone)
    assert model.predict_ns([shape, alone[1]]).tolist() == [model.stage_ns(shape), model.stage_ns(alone[1])]
    assert model._lookup.batch_ns(longer.chunks, 0, 0, 0) > model._lookup.chunk_ns(900_000, 50_000)


@st.composite
def growing(draw: st.DrawFn) -> tuple[BatchShape, BatchShape]:
    """A batch of at most one chunk, and one with more of some of tokens, prefix, decodes and contexts."""
    kind = draw(st.sampled_from(["decodes", "chunk", "both"]))
    small = [
        draw(sizes) if kind != "decodes" else 0,
        draw(st.one_of(st.just(0), sizes)) if kind != "decodes" else 0,
        draw(st.integers(1, 3000)) if kind != "chunk" else 0,
        draw(sizes) if kind != "chunk" else 0,
    ]
    grown = [0, 1] * (kind != "decodes") + [2, 3] * (kind != "chunk")
    some = draw(st.sets(st.sampled_from(grown), min_size=1))
    large = [value + draw(sizes) if at in some else value for at, value in enumerate(small)]
    return tuple(
        BatchShape(((tokens, prefix),) * (tokens > 0), decodes, decodes * context, context, 0, 0)
        for tokens, prefix, decodes, context in (small, large)
    )  # type: ignore[return-value]


@pytest.mark.parametrize("gpu", GPUS)
@settings(max_examples=25, deadline=None)
@given(growing(), st.sampled_from([None, 0]))
def test_outside_its_measured_grid_attention_never_falls(
    gpu: str, pair: tuple[BatchShape, BatchShape], draw: int | None
) -> None:
    model = cost(gpu, draw=draw)
    (attention,) = [part for part in parts_of(model, list(pair)) if part.name == "attention"]
    if not np.any(attention.measured):
        # Interpolation is rounded in the last digits.
        assert attention.ns[1] >= attention.ns[0] * (1 - 1e-9) - 1
        lookup = model._lookup
        times = [lookup.batch_ns(one.chunks, *one[1:4]) if one.chunks else lookup.decode_ns(*one[1:4]) for one in pair]
        assert times[1] >= times[0] * (1 - 1e-9)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("draw", [None, 0])
def test_outside_their_measured_rows_operators_never_fall(gpu: str, draw: int | None) -> None:
    rows = np.unique(np.concatenate([np.arange(1, 3000, 7), np.geomspace(3000, MOST, 60).astype(int)]))
    shapes = [BatchShape(dummy_tokens=int(row), sampled=int(row)) for row in rows]
    for part in parts_of(cost(gpu, draw=draw), shapes):
        outside = part.ns[~np.broadcast_to(part.measured, part.ns.shape)]
        assert (np.diff(outside) >= 0).all(), part.name


def test_gemms_that_a_cache_served_are_told_from_those_that_streamed() -> None:
    import pandas as pd

    from profiler.operators.fitting.device_fit import cache_warm

    # 4096 x 4096 weights of 16 bits are 33.6 MB: 10.0 us at an H100's 3.35 TB/s. What has no matrix streams none.
    rows = pd.DataFrame({"n": [4096] * 3, "k": [4096, 4096, 0], "rows": 8, "median_s": [9.9e-6, 10.1e-6, 1e-6]})
    assert cache_warm(rows, load_hardware("h100")).tolist() == [True, False, False]
