"""Layers of experts: each set of kernels against the plain one in float64, counts of rows, policies and ranks."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor.distributed.layout import Layout, Shard
from executor.distributed.shard_weights import shard_weights
from executor.errors import ExecutorError
from executor.kernels import make_kernels
from executor.kernels.experts import Experts, ExpertWeights, PlainExperts
from executor.kernels.native import NativeKernels
from executor.kernels.plain import PlainKernels
from executor.model.loading import Loaded, ModelSource, load_model
from executor.model.model import Model
from executor.model.weights import random_weights
from executor.native.library import native_reason
from metrics.run_folder.folder import read_run
from policies import policy_names
from profiler.errors import ProfileError
from profiler.experts.chances import ExpertChances
from profiler.specs.model_spec import ModelSpec
from tests.executor.batches import blocks_needed, make_step
from tests.executor.test_mixed_batches import LENGTHS, check, knobs_for, serve, small_trace

CPU, FLOAT = torch.device("cpu"), torch.float32
needs_native = pytest.mark.skipif(bool(native_reason()), reason=native_reason())

SPEC = ModelSpec(
    name="small experts",
    layers=3,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=40,
    vocab=61,
    max_position=512,
    experts=6,
    top_k=2,
    expert_intermediate=24,
    shared_intermediate=20,
    shared_gate=True,
    dense_layers=(1,),
)


def drawn(experts: int, hidden: int, width: int, top_k: int, shared: int, *, gate: bool, norm: bool) -> ExpertWeights:
    """float64 weights whose experts differ: no row is near a tie between two."""
    random = torch.Generator().manual_seed(experts + 7 * hidden)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64) / 4

    weights = ExpertWeights(
        8 * draw(experts, hidden), draw(experts, 2 * width, hidden), draw(experts, hidden, width), top_k, norm
    )
    if shared:
        weights.shared_gate_up, weights.shared_down = draw(2 * shared, hidden), draw(hidden, shared)
        weights.shared_gate = draw(1, hidden) if gate else None
    return weights


def as_dtype(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    values = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return ExpertWeights(**{key: v.to(dtype) if isinstance(v, Tensor) else v for key, v in values.items()})


def new_counts(experts: int) -> Tensor:
    return torch.full((experts,), -1, dtype=torch.int32)


def native(weights: ExpertWeights, dtype: torch.dtype = torch.float32) -> Experts:
    kernels = NativeKernels(CPU)
    kernels.begin()
    return kernels.experts(as_dtype(weights, dtype), new_counts(weights.experts))


@needs_native
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 90),
    experts=st.integers(1, 20),
    hidden=st.sampled_from([8, 33, 64]),
    width=st.sampled_from([1, 16, 23]),
    top_k=st.integers(1, 4),
    shared=st.sampled_from([0, 12]),
    gate=st.booleans(),
    norm=st.booleans(),
    half=st.booleans(),
)
def test_native_experts_equal_the_plain_ones(
    rows: int, experts: int, hidden: int, width: int, top_k: int, shared: int, gate: bool, norm: bool, half: bool
) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    weights = drawn(experts, hidden, width, min(top_k, experts), shared, gate=gate, norm=norm)
    weights = as_dtype(as_dtype(weights, dtype), torch.float64)  # what both can hold
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    x = x.float().double()
    plain, ours = PlainExperts(weights, new_counts(experts)), native(weights, dtype)
    expected = plain.add(x, torch.ones(rows, hidden, dtype=torch.float64))
    got = ours.add(x.float(), torch.ones(rows, hidden))
    assert torch.equal(plain.counts, ours.counts)
    assert int(ours.counts.sum()) == rows * min(top_k, experts)
    assert torch.allclose(got.double(), expected, rtol=2e-5, atol=2e-5)


@needs_native
def test_a_row_has_the_same_bits_whatever_the_batch_and_the_threads() -> None:
    layer = native(drawn(9, 64, 48, 3, 20, gate=True, norm=True))
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(1))
    together = layer.add(x, torch.zeros(70, 64))
    for row in (0, 13, 69):
        assert torch.equal(layer.add(x[row : row + 1].clone(), torch.zeros(1, 64))[0], together[row])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        NativeKernels(CPU).begin()
        assert torch.equal(layer.add(x, torch.zeros(70, 64)), together)
    finally:
        torch.set_num_threads(threads)
        NativeKernels(CPU).begin()


@needs_native
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_holds_no_number_spoils_no_other(bad: float) -> None:
    layer = native(drawn(5, 32, 16, 2, 0, gate=False, norm=True))
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    clean = layer.add(x, torch.zeros(6, 32))
    x[3, 7] = bad
    spoilt = layer.add(x, torch.zeros(6, 32))
    assert not spoilt[3].isfinite().all()
    assert torch.equal(spoilt[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])
    assert int(layer.counts.sum()) == 12


def test_experts_worked_out_by_hand() -> None:
    """Two experts of width 1: one multiplies by silu(1) = 0.731, the other by 2 silu(2) = 3.523; weights 3/4 and 1/4."""
    router = torch.tensor([[float(np.log(3.0))], [0.0]])
    gate_up = torch.tensor([[[1.0], [1.0]], [[2.0], [2.0]]])
    weights = ExpertWeights(router, gate_up, torch.ones(2, 1, 1), 2, True)
    silu_1, silu_2 = 1 / (1 + np.exp(-1)), 2 / (1 + np.exp(-2))
    expected = 0.75 * silu_1 + 0.25 * 2 * silu_2
    got = PlainKernels(CPU, torch.float32).experts(weights, new_counts(2)).add(torch.ones(1, 1), torch.zeros(1, 1))
    assert got.item() == pytest.approx(expected, rel=1e-6)
    weights = replace(weights, top_k=1, norm_topk=False)
    got = PlainKernels(CPU, torch.float32).experts(weights, new_counts(2)).add(torch.ones(1, 1), torch.zeros(1, 1))
    assert got.item() == pytest.approx(0.75 * silu_1, rel=1e-6)


def logits_and_counts(kernels: str, attention: str, **options: Any) -> tuple[Tensor, np.ndarray]:
    loaded = load_model(SPEC, device="cpu", kernels=kernels, attention=attention, seed=2, **options)
    step = make_step([(20, 0), (5, 31)], [3, 40], vocab=SPEC.vocab, dummies=3)
    cache = loaded.new_cache(blocks_needed(step), 16)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(0)))
    model = loaded.model
    assert isinstance(model, Model)
    return model.forward(step.tensor(step.token_ids), step, cache).double(), model.routing.read()


@pytest.mark.parametrize("kernels", [pytest.param("native", marks=needs_native), "plain_device"])
def test_a_pass_counts_the_rows_of_every_expert(kernels: str) -> None:
    """30 rows with the three dummies go through the first layer, the four sampled ones through the last; the layer
    between has no experts."""
    exact, expected = logits_and_counts("torch", "reference", dtype="float64")
    logits, counts = logits_and_counts(kernels, "paged", dtype="float32")
    assert counts.shape == (2, SPEC.experts)
    assert counts.sum(axis=1).tolist() == [30 * 2, 4 * 2]
    assert np.array_equal(counts, expected)
    assert float((logits - exact).abs().max()) < 2e-5
    _, whole = logits_and_counts(kernels, "paged", dtype="float32", trim_last_layer=False)
    assert whole.sum(axis=1).tolist() == [30 * 2, 30 * 2]


@cache
def model(dtype: str, kernels: str, attention: str) -> Loaded:
    return load_model(SPEC, device="cpu", dtype=dtype, kernels=kernels, attention=attention, seed=5)


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_answers_as_alone(policy: str) -> None:
    trace = small_trace(LENGTHS)
    exact = model("float64", "torch", "reference")
    run = serve(exact, trace, policy=policy, knobs=knobs_for(policy, 7), num_blocks=60, block_size=8)
    check(exact, trace, run, exact=True)
    if not native_reason():
        ours = model("float32", "native", "native")
        run = serve(ours, trace, policy=policy, knobs=knobs_for(policy, 7), num_blocks=60, block_size=8)
        check(ours, trace, run, exact=False)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (2, 3)])
def test_partial_sums_of_all_ranks_are_the_whole_layer(tp: int, pp: int) -> None:
    """Every rank has all experts, each of them in part; the router is whole everywhere."""
    layout = Layout.of(SPEC, tp, pp)
    whole = random_weights(SPEC, 3, torch.float32, CPU)
    source = ModelSource("spec", SPEC, None)
    ranks = [shard_weights(source, Shard(SPEC, layout, rank), 3, torch.float32, CPU) for rank in range(layout.world)]
    x = torch.randn(11, SPEC.hidden, generator=torch.Generator().manual_seed(0))
    for stage in range(pp):
        first, _ = Shard(SPEC, layout, stage * tp).layers
        for index in range(layout.split[stage]):
            layer = whole.layers[first + index]
            parts = [ranks[rank].layers[index] for rank in layout.ranks_of(stage)]
            assert [part.experts is None for part in parts] == [layer.experts is None] * tp
            if layer.experts is None:
                continue
            total = torch.zeros_like(x)
            for part in parts:
                assert part.experts is not None
                PlainExperts(part.experts, new_counts(SPEC.experts)).add(x, total)
            expected = PlainExperts(layer.experts, new_counts(SPEC.experts)).add(x, torch.zeros_like(x))
            assert torch.allclose(total, expected, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 1.2])
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
def test_counted_experts_are_as_many_as_the_law_of_their_routing_expects(kernels: str, alpha: float) -> None:
    """Logits of log popularity and Gumbel noise choose a token's experts one after the other, without putting back."""
    experts, top_k = 32, 4
    popularity = np.arange(1, experts + 1) ** -alpha
    layer = make_kernels(kernels, CPU, torch.float32).experts(
        as_dtype(
            replace(drawn(experts, experts, 2, top_k, 0, gate=False, norm=True), router=torch.eye(experts)), FLOAT
        ),
        new_counts(experts),
    )
    rng, chances = np.random.default_rng(5), ExpertChances.power_law(experts, top_k, alpha)
    for rows in (1, 8, 40):
        touched = []
        for _ in range(150):
            logits = torch.from_numpy(np.log(popularity) + rng.gumbel(size=(rows, experts))).float()
            layer.add(logits, torch.zeros(rows, experts))
            touched.append(int((layer.counts > 0).sum()))
        (expected,) = chances.touched([rows])
        error = max(float(np.std(touched)) / np.sqrt(len(touched)), 1e-9)
        assert abs(np.mean(touched) - expected) < 4 * error + 0.01 * expected


def test_a_run_records_the_experts_of_every_iteration_and_the_rows_of_every_expert(tmp_path: Path) -> None:
    run = serve(
        model("float64", "torch", "reference"), small_trace(LENGTHS), policy="chunked", knobs={"chunk_size": 16}
    )
    run.write(tmp_path / "run")
    read = read_run(tmp_path / "run")
    activated = read.column("iterations", "activated_experts")
    assert (activated >= SPEC.top_k).all()
    assert activated.max() <= SPEC.experts
    routed = read.config["routing"]
    tokens, samples = sum(prompt + output - 1 for prompt, output in LENGTHS), sum(output for _, output in LENGTHS)
    assert routed["rows"] == [tokens, samples]
    assert [sum(layer) for layer in routed["counts"]] == [2 * tokens, 2 * samples]
    assert read.summary["activated_experts_mean"] == pytest.approx(activated.mean())
    assert read.summary["activated_experts_max"] == activated.max()


def test_a_dense_run_records_no_experts_and_folders_of_earlier_versions_are_read(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    from tests.executor.test_mixed_batches import model as dense_model

    run = serve(dense_model("float64", "torch", "reference"), small_trace(LENGTHS), policy="chunked")
    run.write(tmp_path / "run")
    file = tmp_path / "run/iterations.parquet"
    pq.write_table(pq.read_table(file).drop(["activated_experts"]), file)
    read = read_run(tmp_path / "run")
    assert "routing" not in read.config
    assert np.isnan(read.column("iterations", "activated_experts")).all()
    assert read.summary["activated_experts_mean"] is None


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v3", "minimax-m2.5"])
def test_experts_that_route_or_attend_in_other_ways_are_refused_by_name(name: str) -> None:
    with pytest.raises((ExecutorError, ProfileError), match=name):
        load_model(name, device="cpu", dtype="float32")
