"""The roofline against hand calculations, physics that must hold, and its own plain twin."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.work.batch import BatchShape
from profiler.cost_model import CostModel
from profiler.errors import ProfileError
from profiler.load import load_cost_model
from profiler.roofline.constants import RooflineConstants
from profiler.roofline.roofline import Roofline
from profiler.specs.hardware import load_hardware
from profiler.specs.model_config import load_model_spec
from profiler.specs.shape_columns import ShapeColumns

# RooflineConstants of one make the hand calculations below short: nothing but FLOPs, bytes, tiles and waves.
BARE = RooflineConstants(
    matmul_efficiency=1.0,
    memory_efficiency=1.0,
    attention_efficiency=1.0,
    kv_efficiency=1.0,
    link_efficiency=1.0,
    kernel_ns=0.0,
    all_reduce_ns=0.0,
    host_before_ns=0.0,
    host_before_per_sequence_ns=0.0,
    host_after_ns=0.0,
    host_after_per_sample_ns=0.0,
)
MODELS = ("llama-3.1-8b", "mistral-7b-v0.1", "falcon-180b", "qwen3-0.6b", "tiny")


def roofline(model: str = "llama-3.1-8b", gpu: str = "h100", **options: object) -> Roofline:
    return Roofline(load_model_spec(model), load_hardware(gpu), **options)  # type: ignore[arg-type]


def prefill(*chunks: tuple[int, int]) -> BatchShape:
    return BatchShape(chunks=chunks, sampled=len(chunks))


def decode(size: int, context: int) -> BatchShape:
    return BatchShape(decodes=size, decode_context_total=size * context, decode_context_max=context, sampled=size)


def test_one_gemm_by_hand() -> None:
    """Llama-3.1-8B's FFN down projection on an H100: [rows, 14336] x [14336, 4096]."""
    cost = roofline(constants=BARE)
    # One row: bytes over 3.35 TB/s. Weights 2 * 14336 * 4096, activations 2 * (14336 + 4096) a row; K in two halves,
    # since 32 tiles leave 100 processors idle (62.7 us), 64 half tiles do not (31.3 us): two partial sums, out and in.
    one_row = 32 * (2 * 14336 * 4096 + 2 * (14336 + 4096) + 2 * 8 * 4096) / 3.35e12
    assert cost.breakdown(decode(1, 8))["ffn_down"] == pytest.approx(one_row * 1e9, abs=1)
    # 4096 rows: 32 x 32 tiles of 128 x 128 on 132 processors fill 7.76 of 8 waves, 2 * 128 * 128 * 14336 FLOPs a tile.
    # Splitting K by 4 gives 4096 tiles a quarter as long: 32 waves, 31.03 filled, so no gain; by 8: 63 of 1/8 = 7.875.
    tile_s = 2 * 128 * 128 * 14336 / (989.5e12 / 132)
    assert ceil(32 * 32 * 8 / 132) == 63
    by_hand = 32 * tile_s * 63 / 8
    partial_bytes = 2 * (14336 * 4096 + 4096 * (14336 + 4096)) + 4096 * 8 * 8 * 4096
    assert partial_bytes / 3.35e12 < tile_s * 63 / 8  # the partial sums are not what takes longest
    assert cost.breakdown(prefill((4096, 0)))["ffn_down"] == pytest.approx(by_hand * 1e9, abs=1)


def test_one_chunk_with_a_prefix_by_hand() -> None:
    """512 tokens on top of 1024: 512 * 1024 + 512 * 513 / 2 pairs, 4 * 128 FLOPs for each of 32 heads, 32 layers."""
    flops = 4 * 32 * 32 * 128 * (512 * 1024 + 512 * 513 // 2)
    parts = roofline(constants=BARE).breakdown(prefill((512, 1024)))
    assert parts["prefill_attention"] == pytest.approx(flops / 989.5e12 * 1e9, abs=1)
    # A single token over a long prefix is bound by reading KV instead: prefix + itself, and itself written.
    parts = roofline(constants=BARE).breakdown(prefill((1, 100_000)))
    assert parts["prefill_attention"] == pytest.approx((100_000 + 2) * 131072 / 3.35e12 * 1e9, abs=1)


def test_one_decode_batch_by_hand() -> None:
    parts = roofline(constants=BARE).breakdown(decode(64, 1000))
    assert parts["decode_attention"] == pytest.approx((64 * 1000 + 2 * 64) * 131072 / 3.35e12 * 1e9, abs=1)
    halved = roofline(constants=BARE, kv_dtype="fp8").breakdown(decode(64, 1000))
    assert halved["decode_attention"] == pytest.approx(parts["decode_attention"] / 2, abs=1)


def test_an_all_reduce_by_hand() -> None:
    """Two a layer and one after the embedding, each 2 * (4 - 1) / 4 of the hidden states over 450 GB/s."""
    cost = roofline(tp=4, constants=BARE)
    moved = 1.5 * 1000 * 4096 * 2
    parts = cost.breakdown(prefill((1000, 0)))
    assert parts["all_reduce"] == pytest.approx(32 * 2 * moved / 450e9 * 1e9, abs=1)
    assert parts["qkv"] < roofline(constants=BARE).breakdown(prefill((1000, 0)))["qkv"] / 2.9


def test_an_h100_decodes_llama_8b_at_the_speed_of_its_memory() -> None:
    """7.5 billion weights outside the embedding in 16 bits take 4.5 ms at 3.35 TB/s; nothing is faster than that."""
    ms = roofline().stage_ns(decode(1, 100)) / 1e6
    assert 4.5 < ms < 4.5 / 0.8 + 1.5


def test_the_129th_row_costs_a_tile() -> None:
    cost = roofline("llama-13b", "a6000")
    step = cost.stage_ns(prefill((129, 0))) - cost.stage_ns(prefill((128, 0)))
    smooth = cost.stage_ns(prefill((128, 0))) - cost.stage_ns(prefill((127, 0)))
    assert step > 20 * max(smooth, 1)
    assert cost.stage_ns(prefill((257, 0))) > 1.25 * cost.stage_ns(prefill((256, 0)))


def test_a_decode_that_rides_on_a_chunk_is_far_cheaper_than_alone() -> None:
    """SARATHI's point: the chunk has paid for the weights already."""
    cost = roofline("llama-13b", "a6000")
    alone = cost.stage_ns(decode(4, 1024)) / 4
    chunk = cost.stage_ns(prefill((1021, 0)))
    hybrid = BatchShape(((1021, 0),), 3, 3 * 1024, 1024, 0, 4)
    marginal = (cost.stage_ns(hybrid) - chunk) / 3
    assert alone > 5 * marginal


def test_dummy_rows_cost_linear_layers_only() -> None:
    cost = roofline()
    plain = decode(100, 500)
    padded = plain._replace(dummy_tokens=156)
    a, b = cost.breakdown(plain), cost.breakdown(padded)
    for part in ("decode_attention", "head", "sampling"):
        assert a[part] == b[part]
    assert b["ffn_up"] > a["ffn_up"]
    assert cost.stage_ns(padded) == cost.stage_ns(plain._replace(executed_rows=256))
    assert cost.stage_ns(plain._replace(executed_rows=50)) == cost.stage_ns(plain)  # never below the rows there are


def test_context_never_makes_a_batch_cheaper() -> None:
    for model in MODELS:
        cost = roofline(model, "a100")
        contexts = [cost.stage_ns(decode(8, context)) for context in range(0, 20_000, 500)]
        prefixes = [cost.stage_ns(prefill((300, prefix))) for prefix in range(0, 20_000, 500)]
        assert contexts == sorted(contexts)
        assert prefixes == sorted(prefixes)
    windowed = roofline("mistral-7b-v0.1", "a100")
    assert windowed.stage_ns(decode(8, 4096)) == windowed.stage_ns(decode(8, 9000))


chunk = st.tuples(st.integers(1, 4000), st.integers(0, 30_000))
shapes = st.builds(
    lambda chunks, decodes, mean, dummy, executed: BatchShape(
        tuple(chunks), decodes, decodes * mean, mean if decodes else 0, dummy, decodes + len(chunks), executed
    ),
    st.lists(chunk, max_size=4),
    st.integers(0, 300),
    st.integers(0, 5000),
    st.integers(0, 127),
    st.sampled_from([0, 0, 512]),
)
ENGINES = [
    roofline(),
    roofline("mistral-7b-v0.1", "a6000", tp=2),
    roofline("falcon-180b", "h200", tp=4, pp=3),
    roofline("tiny", "rtx4090", dtype="float32", pp=2, layer_split=(3, 5)),
    roofline("llama-3.1-8b", "h100", dtype="fp8", kv_dtype="fp8"),
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ENGINES), st.lists(shapes, min_size=1, max_size=6), st.integers(1, 40))
def test_scalar_vector_and_repeated_forms_are_equal_and_sums_are_exact(
    cost: Roofline, batches: list[BatchShape], steps: int
) -> None:
    for stage in range(cost.stages):
        scalar = [cost.stage_ns(shape, stage) for shape in batches]
        assert cost.predict_ns(batches, stage).tolist() == scalar
        assert cost.predict_ns(ShapeColumns.of(batches), stage).tolist() == scalar
        first = batches[0]
        longer = [
            first._replace(decode_context_total=first.decode_context_total + i * first.decodes) for i in range(steps)
        ]
        assert cost.repeat_ns(first, steps, stage).tolist() == [cost.stage_ns(shape, stage) for shape in longer]
    for shape in batches:
        total = sum(cost.host_ns(shape))
        total += sum(cost.stage_ns(shape, stage) + cost.send_ns(shape, stage) for stage in range(cost.stages))
        assert sum(cost.breakdown(shape).values()) == total
        assert all(isinstance(ns, int) and ns > 0 for ns in cost.breakdown(shape).values())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ENGINES), shapes, st.integers(1, 40))
def test_what_the_hot_path_asks_for_is_what_the_readable_forms_say(
    cost: Roofline, shape: BatchShape, steps: int
) -> None:
    stages = range(cost.stages)
    assert cost.stages_ns(shape) == [(cost.stage_ns(shape, stage), cost.send_ns(shape, stage)) for stage in stages]
    if cost.stages > 1:
        return
    assert cost.iteration_ns(shape) == (*cost.host_ns(shape), cost.stage_ns(shape), cost.inside(shape))
    terms = cost.repeat_terms(shape)
    if shape.decodes and terms is not None:
        start, step, slope, offset, rest = terms
        line = [int((start + i * step) * slope + offset) + rest for i in range(steps)]
        assert cost.repeat_ns(shape, steps).tolist() == line


def test_large_batches_beyond_the_first_table_agree_too() -> None:
    cost = roofline("tiny", "h100")
    batches = [prefill((100_000, 0)), decode(700, 90), prefill((1, 0))]
    expected = [roofline("tiny", "h100").stage_ns(shape) for shape in batches]
    assert cost.predict_ns(batches).tolist() == expected
    assert [roofline("tiny", "h100").iteration_ns(shape)[2] for shape in batches] == expected
    assert [roofline("tiny", "h100").stages_ns(shape)[0][0] for shape in batches] == expected
    assert cost.predict_ns([]).tolist() == []
    # No batch is too large for a table: a prompt of ten million tokens has its time too.
    longest = prefill((10_000_000, 0))
    assert cost.predict_ns([longest])[0] == cost.stage_ns(longest) > 5000 * expected[0]


def test_stages_carry_embedding_and_head_where_they_live() -> None:
    whole = roofline("llama-3-70b", "h100", tp=4)
    split = roofline("llama-3-70b", "h100", tp=4, pp=3)
    shape = prefill((512, 0))
    assert split.layer_split == (27, 27, 26)
    stages = [split.stage_ns(shape, stage) for stage in range(3)]
    assert sum(stages) == pytest.approx(whole.stage_ns(shape), abs=30)  # rounding of each term on each stage
    assert stages[1] < stages[0]
    assert split.send_ns(shape, 2) == 0
    assert split.send_ns(shape, 0) == pytest.approx(10_000 + 512 * 8192 * 2 / (450 * 0.75), abs=1)
    slower = roofline("llama-3-70b", "h100", tp=4, pp=3, pipeline_link="network")
    assert slower.send_ns(shape, 0) > split.send_ns(shape, 0)


def test_a_faster_gpu_changes_the_prediction_by_its_factor() -> None:
    gpu = load_hardware("h100")
    peaks = {dtype: 2 * rate for dtype, rate in gpu.peak_flops.items()}
    twice = replace(gpu, peak_flops=peaks, memory_bandwidth=2 * gpu.memory_bandwidth)
    model = load_model_spec("llama-3.1-8b")
    shape = BatchShape(((500, 100),), 30, 9000, 500, 0, 31)
    slow, fast = (Roofline(model, g, constants=BARE).stage_ns(shape) for g in (gpu, twice))
    assert slow == pytest.approx(2 * fast, abs=20)


def test_it_is_a_cost_model_that_says_it_measured_nothing() -> None:
    cost = load_cost_model("llama-3.1-8b", "h100", cost_model="roofline")
    assert isinstance(cost, CostModel)
    assert (cost.kind, cost.calibrated, cost.tile, cost.stages) == ("roofline", False, 128, 1)
    assert cost.name == "roofline llama-3.1-8b h100 tp1 bfloat16"
    assert not cost.inside(decode(1, 1))
    assert cost.provenance()["calibrated"] is False
    assert np.all(cost.repeat_ns(prefill((5, 0)), 3) == cost.stage_ns(prefill((5, 0))))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tp": 3}, "divisor"),
        ({"pp": 33}, "pp: found 33"),
        ({"pp": 2, "layer_split": (32, 0)}, "layer_split: found 32,0"),
        ({"dtype": "int3"}, "dtype: found 'int3'"),
        ({"cost_model": "nowhere.json"}, "no such file"),
    ],
)
def test_an_impossible_engine_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        load_cost_model("llama-3.1-8b", "h100", **{"cost_model": "roofline", **options})  # type: ignore[arg-type]
