"""Time of packed keys and values: worked out by hand, equal in every form of a cost model, read from measured files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.work.batch import BatchShape
from profiler import load_cost_model, load_hardware, load_model_spec
from profiler.compression_cost import PackedCost, PackingPrices, bound_prices, prices_of, read_prices, values_per_token
from profiler.errors import ProfileError
from profiler.specs.kv_compression import Compression

MODEL, GPU = load_model_spec("llama-3.1-8b"), load_hardware("h100")
KIVI = Compression("kivi", 4, 32, 128)
PRICES = PackingPrices(0.001, 0.002, 0.003, "test", measured=True)


def packed(prices: PackingPrices = PRICES, **engine: int) -> PackedCost:
    inner = load_cost_model(MODEL, GPU, cost_model="roofline", **engine)
    layers = (20, 12) if inner.stages > 1 else (32,)
    return PackedCost(inner, KIVI, prices, MODEL, layers, engine.get("tp", 1))


def test_a_chunk_packs_what_it_pushes_out_of_the_window_and_reads_what_is_packed() -> None:
    """Window 128, groups of 32: of 300 tokens 160 are packed, of 500 tokens 352. 65,536 values a token."""
    cost = packed()
    assert values_per_token(MODEL) == 65_536
    shape = BatchShape(((200, 300),), sampled=1)
    parts = cost.breakdown(shape)
    assert parts["kv_pack"] == round((352 - 160) * 65.536)
    assert parts["kv_read_packed"] == round(160 * 131.072)
    assert cost.stage_ns(shape) == cost.inner.stage_ns(shape) + parts["kv_pack"] + parts["kv_read_packed"]


def test_decodes_pack_a_token_each_and_read_up_to_the_middle_of_a_block() -> None:
    cost = packed()
    parts = cost.breakdown(BatchShape((), 4, 4 * 1000, 1000, 0, 4))
    assert parts["kv_pack"] == round(4 * 65.536)
    assert parts["kv_read_packed"] == int(4 * (1000 - 128 - 16) * 65_536 * 0.003)
    young = cost.breakdown(BatchShape((), 4, 4 * 100, 100, 0, 4))
    assert "kv_pack" not in young
    assert "kv_read_packed" not in young


def test_the_bound_moves_whole_and_packed_bytes_once_and_a_fused_kernel_reads_less() -> None:
    """A group of 32 tokens and 128 channels takes 4736 bytes for 8192 values; 2 bytes each in full; 3.35 TB/s."""
    each = 4736 / 8192
    bound = bound_prices(KIVI, MODEL, GPU, "bfloat16")
    assert bound.decode_read_ns == pytest.approx((2 + each) / 3.35e12 * 1e9)
    fused = bound_prices(KIVI, MODEL, GPU, "bfloat16", fused=True)
    assert (fused.chunk_read_ns, fused.decode_read_ns) == (0.0, pytest.approx(-(2 - each) / 3.35e12 * 1e9))
    shape = BatchShape((), 64, 64 * 8000, 8000, 0, 64)
    plain = packed(fused).inner.stage_ns(shape)
    assert packed(fused).stage_ns(shape) < plain < packed(bound).stage_ns(shape)
    # What is left of the attention's own time is more than nothing.
    inner = packed(fused).inner.breakdown(shape)["decode_attention"]
    assert inner + packed(fused).breakdown(shape)["kv_read_packed"] > 0.2 * inner


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 600), st.integers(0, 3000)), max_size=3),
    st.integers(0, 70),
    st.integers(0, 4000),
    st.sampled_from([PRICES, bound_prices(KIVI, MODEL, GPU, "bfloat16", fused=True)]),
)
def test_scalar_vector_and_repeated_times_are_equal(
    chunks: list[tuple[int, int]], decodes: int, context: int, prices: PackingPrices
) -> None:
    if not chunks and not decodes:
        return
    shape = BatchShape(tuple(chunks), decodes, decodes * context, context * (decodes > 0), 0, decodes + len(chunks))
    cost = packed(prices, tp=2, pp=2)
    for stage in (0, 1):
        assert cost.predict_ns([shape, shape], stage).tolist() == [cost.stage_ns(shape, stage)] * 2
    before, after = cost.host_ns(shape)
    whole = before + after + sum(cost.stage_ns(shape, s) + cost.send_ns(shape, s) for s in (0, 1))
    assert sum(cost.breakdown(shape).values()) == whole
    if decodes and not chunks:
        each = [
            cost.stage_ns(shape._replace(decode_context_total=decodes * (context + i), decode_context_max=context + i))
            for i in range(60)
        ]
        assert np.array_equal(cost.repeat_ns(shape, 60), each)


def test_prices_come_by_name_or_from_a_measured_file(tmp_path: Path) -> None:
    assert prices_of("none", KIVI, MODEL, GPU, "bfloat16") is None
    cpu = prices_of("cpu", KIVI, MODEL, GPU, "bfloat16")
    assert cpu is not None
    assert cpu.measured
    assert 0.1 < cpu.decode_read_ns < cpu.pack_ns < 1000
    with pytest.raises(ProfileError, match="expected bound, fused, none, cpu or a file"):
        prices_of("gpu", KIVI, MODEL, GPU, "bfloat16")
    file = tmp_path / "costs.json"
    for content, message in (
        ("[", "cannot be read as JSON"),
        ("{}", "found something else"),
        (
            json.dumps({"format": "charioteer packed kv costs", "prices": {"delta4": {}}}),
            "no prices of kivi4, it has delta4",
        ),
    ):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ProfileError, match=message):
            read_prices(file, KIVI)


def test_a_file_of_costs_that_never_ends_is_refused_unread(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep.json").write_text("[" * 5000 + "]" * 5000)
    for name in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path), str(tmp_path / "deep.json")):
        with pytest.raises(ProfileError, match=r"expected|cannot be read|nested"):
            prices_of(name, KIVI, MODEL, GPU, "bfloat16")
