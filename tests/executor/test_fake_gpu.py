"""The GPU path on a device that is not there (tests/fake_gpu): its rules are real, its numbers and times are not."""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from executor.attention.flash_attn import FlashAttention
from executor.attention.triton import shared_bytes_of, tile_of
from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.machine.ceilings import Ceilings
from executor.measuring.batch_rig import BatchRig, Timing
from executor.measuring.measure_plan import measure_plan
from executor.model.loading import Loaded, load_model
from executor.serving.pool_size import default_blocks
from executor.serving.replay import replay_live
from executor.triton_kernels.runtime import SHARED_BYTES, Processor
from experiments.calibration.device_aims import aims_stage
from policies import BatchShape
from profiler.measurements.plan import MeasurementPlan, Point, clipped, make_plan
from profiler.measurements.region import Region
from profiler.specs.model_spec import ModelSpec
from tests.executor.batches import blocks_needed, make_step
from tests.fake_gpu import FakeGpu
from workloads.trace import Trace

pytest.importorskip("triton")
SPEC = ModelSpec(
    name="small", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=61, max_position=4096
)
GIB = 1 << 30


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with FakeGpu() as device:
        yield device


def small(attention: str = "triton", device: str = "cuda") -> Loaded:
    return load_model(SPEC, device=device, dtype="bfloat16", kernels="triton", attention=attention, max_tokens=2048)


def with_flash_attention_2(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """Pages of 256, strides of 1 in a row: what the package refuses, this refuses."""

    def attend(q, k, v, *others, **options):  # type: ignore[no-untyped-def]
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert k.stride(-1) == q.stride(-1) == 1
        assert q.dtype in (torch.float16, torch.bfloat16)
        return torch.empty_like(q)

    two = ModuleType("flash_attn")
    two.__dict__.update(flash_attn_varlen_func=attend, flash_attn_with_kvcache=attend)
    monkeypatch.setitem(sys.modules, "flash_attn", two)
    loaded.model.attention = FlashAttention(SPEC, generation=2)
    return loaded


def trace(prompts: list[int], outputs: list[int]) -> Trace:
    prompt, output = np.array(prompts), np.array(outputs)
    return Trace("small", np.zeros(len(prompt)), prompt, output, output)


def test_a_pool_is_sized_with_the_blocks_that_it_will_have(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = with_flash_attention_2(small(), monkeypatch)
    asked = trace([300, 900], [20, 20])
    assert default_blocks(LiveConfig(block_size=256), loaded, asked, 1000, most_tokens=512) >= 4
    run = replay_live(asked, loaded=loaded, policy="chunked", chunk_size=256, block_size=256, as_fast_as_possible=True)
    assert run.summary["finished"] == 2


def test_batches_are_judged_over_the_blocks_of_the_calibration(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = with_flash_attention_2(small(), monkeypatch)
    ceilings = Ceilings("paper", "bfloat16", 4e12, 8e14, 0, 0, 0.0)
    rows = aims_stage(loaded, ceilings, tmp_path, lambda text: None, block_size=256)
    assert {row["variant"] for row in rows} >= {"plain", "graphs"}


def test_weights_of_eight_billion_are_drawn_where_they_stay() -> None:
    with FakeGpu(memory_bytes=40 * GIB, waits=False) as device:
        loaded = load_model("llama-3.1-8b", device="cuda", kernels="triton", attention="triton", max_tokens=4096)
        assert loaded.model.embedding.is_cuda
        assert 16.0e9 < device.allocated[0] < 16.8e9
        assert device.counts.pageable_copies < 10, "nothing but small tables comes from the host"


WIDE = replace(SPEC, hidden=1024, heads=8, kv_heads=8, head_dim=128)
"""8 KiB of keys and values a token."""


def test_a_rig_with_large_blocks_takes_a_block_or_two_more_for_each_request() -> None:
    """20,000 tokens and 64 requests in blocks of 256 tokens, 2 MiB each: 78 + 128 blocks, 0.4 GiB. A slack of 4,096
    blocks would be 8 GiB."""
    with FakeGpu(memory_bytes=4 * GIB, waits=False) as device:
        loaded = load_model(WIDE, device="cuda", dtype="bfloat16", kernels="triton", attention="triton", graphs="off")
        before = device.allocated[0]
        rig = BatchRig(loaded, most_tokens=20_000, longest=4000, most_requests=64, block_size=256)
        assert rig.blocks == 20_000 // 256 + 64 * 2
        assert device.allocated[0] - before < GIB // 2


def test_a_batch_beyond_the_memory_is_measured_with_shorter_contexts_and_it_is_said(tmp_path: Path) -> None:
    """256 decodes at 2,280 tokens hold 4.5 GiB, 90 % of the device are 1.8."""
    with FakeGpu(memory_bytes=2 * GIB, waits=False):
        loaded = load_model(WIDE, device="cuda", dtype="bfloat16", kernels="triton", attention="triton", graphs="off")
        _clipped(loaded, tmp_path)


def _clipped(loaded: Loaded, tmp_path: Path) -> None:
    large = Point(BatchShape((), 256, 256 * 2280, 2280, 0, 256), "corner")
    fine = Point(BatchShape(((64, 100),), 2, 200, 120, 0, 3), "noise")
    plan = MeasurementPlan((large,), (fine,), Region.of([large.shape]), budget_s=30.0, repeats=1)
    said: list[str] = []
    profile = measure_plan(loaded, plan, tmp_path / "p.parquet", operators=False, note=said.append)
    assert len(said) == 1
    assert "1 of 1 planned batches are measured with shorter contexts" in said[0]
    assert profile.provenance["clipped"] == said[0]
    contexts = profile.table.query("operator == 'iteration' and decodes == 256")["decode_context_total"]
    assert (contexts < 225_000).all(), "1.8 GiB hold 236,000 tokens"
    assert (contexts > 150_000).all()
    with pytest.raises(ExecutorError, match="--num-blocks"):
        loaded.new_cache(20_000, 16)


def test_shapes_shrink_in_proportion_and_stay_possible() -> None:
    shape = BatchShape(((100, 900),), 4, 4000, 3000, 0, 5)
    shorter = clipped(shape, lambda each: each.decode_context_total <= 1000)
    assert shorter is not None
    assert 990 <= shorter.decode_context_total <= 1000
    assert shorter.chunks[0][0] == 100
    assert 220 <= shorter.chunks[0][1] <= 225
    assert sum(Point(shorter, "visited").contexts) == shorter.decode_context_total
    assert clipped(shape, lambda each: False) is None
    assert clipped(shape, lambda each: True) == shape


def test_no_batch_compiles_a_kernel_once_all_variants_are_warm(gpu: FakeGpu) -> None:
    loaded = small()
    random = np.random.default_rng(0)
    steps = [make_step([(130, 10), (3, 5)], [7, 90], vocab=61), make_step([], [5, 6], vocab=61)]
    for _ in range(60):
        chunks = [(int(t), int(p)) for t, p in zip(random.integers(1, 200, 3), random.integers(0, 900, 3))]
        decodes = random.integers(0, 1500, random.integers(0, 40)).tolist()
        steps.append(make_step(chunks[: random.integers(0, 4)] or ([] if decodes else [(5, 0)]), decodes, vocab=61))
    cache = loaded.new_cache(max(blocks_needed(step) for step in steps), 16)
    loaded.model.attention.warm(cache, torch.bfloat16)
    for number, step in enumerate(steps):
        step.device = loaded.device
        loaded.model.forward(step.tensor(step.token_ids), step, cache)
        if number == 1:
            warm = gpu.counts.compiled
    assert gpu.counts.compiled == warm, sorted(gpu.variants.values())
    assert warm < 24


def test_a_run_that_may_have_paid_for_compilation_is_never_fitted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = load_model("nano", device="cpu", max_tokens=300)
    ran: dict[BatchShape, int] = {}
    measure = BatchRig.measure

    def paying(self: BatchRig, point: Point, *others: object, **options: object) -> Timing:
        timing = measure(self, point, *others, **options)  # type: ignore[arg-type]
        ran[point.shape] = ran.get(point.shape, 0) + 1
        # The first run compiles, the second finds a slow algorithm.
        ns = {1: 9_000_000_000, 2: 3_000_000_000}.get(ran[point.shape], 1_000_000)
        return timing._replace(device_ns=ns, cpu_ns=timing.wall_ns)

    monkeypatch.setattr(BatchRig, "measure", paying)
    monkeypatch.setattr("executor.measuring.measure_plan.pays_first", lambda loaded: True)
    plan = make_plan(Region.of_bounds(chunk=32, decodes=4, context=100), points=4, repeats=1, budget_s=60.0)
    profile = measure_plan(loaded, plan, tmp_path / "p.parquet", operators=False)
    rows = profile.table[profile.table["operator"] == "iteration"]
    assert (rows.loc[rows["outlier"] == 0, "median_s"] == 0.001).all()
    assert (rows["outlier"] == 0).sum() == len(plan.points) + len(plan.noise)
    assert (rows["median_s"] == 3.0).any(), "what does not count is kept"


def test_a_step_too_long_to_be_repeated_is_run_again_before_it_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = load_model("nano", device="cpu", max_tokens=300)
    ran: dict[BatchShape, int] = {}
    measure = BatchRig.measure

    def paying(self: BatchRig, point: Point, *others: object, **options: object) -> Timing:
        timing = measure(self, point, *others, **options)  # type: ignore[arg-type]
        ran[point.shape] = ran.get(point.shape, 0) + 1
        ns = 9_000_000_000 if ran[point.shape] == 1 else 2_000_000_000
        return timing._replace(device_ns=ns, wall_ns=ns, cpu_ns=ns)

    monkeypatch.setattr(BatchRig, "measure", paying)
    points = tuple(Point(BatchShape(((tokens, 0),), 0, 0, 0, 0, 1), "visited") for tokens in (8, 16))
    plan = MeasurementPlan(points, (), Region.of([point.shape for point in points]), budget_s=60.0, repeats=3)
    profile = measure_plan(loaded, plan, tmp_path / "p.parquet", operators=False)
    rows = profile.table[profile.table["operator"] == "iteration"]
    assert sorted(rows["median_s"]) == [2.0, 2.0, 2.0, 2.0, 9.0, 9.0], "until two runs agree"
    assert rows.loc[rows["outlier"] == 0, "median_s"].tolist() == [2.0, 2.0]


def test_a_model_on_the_second_device_launches_there_in_every_thread() -> None:
    with FakeGpu(devices=2) as device:
        loaded = small(device="cuda:1")
        assert loaded.device == torch.device("cuda", 1)
        assert device.allocated[0] == 0
        run = replay_live(
            trace([40, 70], [6, 6]), loaded=loaded, policy="vllm_v1", async_scheduling=True, as_fast_as_possible=True
        )
        assert run.summary["finished"] == 2


@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_no_tile_asks_for_more_shared_memory_than_a_block_may_have(capability: int) -> None:
    processor = Processor.of_capability(capability)
    for head_dim in (16, 64, 80, 96, 128, 192, 256):
        for item_bytes in (2, 4):
            for rows in (16, 32, 64, 128):
                tile = tile_of(rows, head_dim, item_bytes, processor)
                d = 1 << (head_dim - 1).bit_length()
                assert shared_bytes_of(tile.rows, tile.keys, d, item_bytes, capability) <= processor.shared_bytes
                assert rows % tile.rows == 0
    # Tiles stay as large as they were where there is room.
    assert tile_of(128, 128, 2, processor) == (128, 64, 3)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_device_time_begins_with_the_first_kernel_not_with_packing(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, graphs: str
) -> None:
    """Packing takes 30 ms here."""
    from executor.batches import device_arrays as device_step
    from executor.model import cuda_graphs

    loaded = small()
    loaded.graphs = graphs
    pack = device_step.pack

    def slowly(*arguments):  # type: ignore[no-untyped-def]
        time.sleep(0.03)
        return pack(*arguments)

    monkeypatch.setattr(device_step, "pack", slowly)
    monkeypatch.setattr(cuda_graphs, "pack", slowly)
    rig = BatchRig(loaded, most_tokens=1000, longest=300, most_requests=4)
    point = Point(BatchShape((), 3, 60, 40, 0, 3), "visited")
    rig.warm([point])
    timings = [rig.measure(point) for _ in range(3)]
    assert min(timing.before_ns for timing in timings) > 25e6, "packing is the host's, before the device begins"
    assert (timings[0].executed_rows > 0) == (graphs == "on")


def test_a_replay_allocates_no_pinned_memory_and_sends_its_tables_once(gpu: FakeGpu) -> None:
    from executor.model.cuda_graphs import Buckets, GraphedModel

    loaded = small()
    steps = [make_step([(20, 0)], [3, 9], vocab=61), make_step([], [3, 9, 70], vocab=61)]
    cache = loaded.new_cache(max(blocks_needed(step) for step in steps), 16)
    model = GraphedModel(loaded.model, cache, Buckets(blocks=8, chunk_rows=128))
    for step in steps:
        step.device = loaded.device
        ids = step.tensor(step.token_ids)
        model.forward(ids, step, cache)
        pinned, copies = gpu.counts.pinned_allocations, gpu.counts.host_copies
        model.forward(ids, step, cache)
        assert gpu.counts.pinned_allocations == pinned
        assert gpu.counts.host_copies == copies + 1


def test_extras_install_beside_any_torch_that_the_executor_takes() -> None:
    """flash-attn's build imports torch, which an isolated build lacks; torch 2.11 comes with Triton 3.6."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [line for extra in project["optional-dependencies"].values() for line in extra]
    assert not [line for line in wanted if line.startswith("flash-attn")]
    assert {line.partition(";")[0] for line in wanted if line.startswith("triton")} == {"triton>=3.6"}


def test_the_fake_enforces_what_a_device_would() -> None:
    with FakeGpu(memory_bytes=2 * GIB, devices=2) as device:
        there = torch.zeros(1000, 1000, device="cuda")
        with pytest.raises(RuntimeError, match="two devices"):
            torch.mm(there, torch.zeros(1000, 2))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(RuntimeError, match="device type for generator"):
            torch.randn(3, device="cuda", generator=torch.Generator())
        with pytest.raises(TypeError, match="convert cuda"):
            there.numpy()
        before = device.allocated[0]
        del there
        assert device.allocated[0] == before - (4_000_256 // 512) * 512
        graph = torch.cuda.CUDAGraph()
        kept = torch.zeros(64, device="cuda")
        with torch.cuda.graph(graph):
            other = kept + 1
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                other.sum().item()
        graph.replay()
        del kept
        with pytest.raises(RuntimeError, match="illegal memory access"):
            graph.replay()
