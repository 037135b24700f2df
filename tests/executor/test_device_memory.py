"""Pool sizing by hand-worked numbers, the allocator's choice, and event timing that never waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.machine.device_timing import ClockEvent, IterationTimer, annotate, nvtx_ranges
from executor.model.loading import load_model
from executor.serving.device_memory import MemoryUse, choose_allocator, dummy_step, measure_use, pool_blocks
from executor.serving.pool_size import default_blocks
from executor.serving.replay import load_for

GIB = 1 << 30


def test_the_pool_takes_what_weights_activations_and_graphs_leave() -> None:
    """141 GiB at 90 % are 126.9; 16 of weights, 2 of activations and 1 of graphs leave 107.9: blocks of 2 MiB."""
    use = MemoryUse(total=141 * GIB, taken=16 * GIB, peak_activations=2 * GIB, graphs=GIB)
    assert pool_blocks(use, 2 << 20, utilisation=0.9) == int((141 * 0.9 - 19) * 512) - 1
    with pytest.raises(
        ExecutorError, match=r"KV pool: 55243 blocks fit, 60000 are needed: of 141.00 GiB, 90% may be used"
    ):
        pool_blocks(use, 2 << 20, utilisation=0.9, least=60000)
    with pytest.raises(ExecutorError, match="utilisation: found"):
        pool_blocks(use, 2 << 20, utilisation=1.2)


def test_memory_is_asked_for_on_any_device_and_dummy_rows_run() -> None:
    loaded = load_model("nano", device="cpu", max_tokens=64)
    assert measure_use(loaded, most_rows=32, most_sampled=4).blocks(1024, 1.0) > 0
    step = dummy_step(7, 3, torch.device("cpu"))
    cache = loaded.new_cache(1, 16)
    cache.pool.fill_(5.0)
    assert loaded.model.forward(torch.from_numpy(step.token_ids), step, cache).shape == (3, loaded.spec.vocab)
    assert bool((cache.pool == 5.0).all())


def test_an_allocator_is_chosen_before_cuda_starts_and_beside_other_settings() -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,backend:native"}
    choose_allocator("async", environment, started=lambda: False)
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128,backend:cudaMallocAsync"
    choose_allocator("default", environment, started=lambda: True)
    with pytest.raises(ExecutorError, match="before CUDA is first used"):
        choose_allocator("expandable", environment, started=lambda: True)
    with pytest.raises(ExecutorError, match="found 'malloc', expected one of default, expandable, async"):
        choose_allocator("malloc", environment)


class LateEvent(ClockEvent):
    """Passed only when the test says so, as a GPU's are."""

    passed = False

    def query(self) -> bool:
        return LateEvent.passed


def test_times_are_read_when_the_stream_has_passed_and_events_are_used_again() -> None:
    made: list[LateEvent] = []

    def new_event() -> LateEvent:
        made.append(LateEvent())
        return made[-1]

    timer = IterationTimer(torch.device("cpu"), new_event)
    for number in (0, 1):
        timer.start(number)
        timer.stop()
    assert list(timer.finished()) == []
    LateEvent.passed = True
    assert [number for number, ns in timer.finished() if ns >= 0] == [0, 1]
    timer.start(2)
    timer.stop()
    assert [number for number, _ in timer.finished()] == [2]
    assert len(made) == 4


def test_ranges_leave_the_model_as_it_was() -> None:
    loaded = load_model("nano", device="cpu", max_tokens=64)
    before = dict(vars(loaded.model))
    with nvtx_ranges({"forward": (loaded.model, "forward")}):
        pass
    assert vars(loaded.model) == before


def test_passes_and_operators_are_named_in_a_timeline() -> None:
    loaded = load_model("nano", device="cpu", max_tokens=64, kernels="torch", attention="sdpa")
    said: list[str] = []
    annotate(loaded.model, push=said.append, pop=lambda: said.append("end"))
    step = dummy_step(7, 3, torch.device("cpu"))
    loaded.model.forward(torch.from_numpy(step.token_ids), step, loaded.new_cache(1, 16))
    assert said[:3] == ["forward, 7 rows", "embedding", "end"]
    assert said.count("attention sdpa") == loaded.spec.layers
    assert said[-1] == "end"
    assert said.count("end") * 2 == len(said)


def test_two_streams_are_refused_where_there_are_none() -> None:
    with pytest.raises(ExecutorError, match="--streams: found attention sdpa on cpu, expected --attention triton"):
        load_for(LiveConfig(model="nano", device="cpu", attention="sdpa", kernels="torch", streams=True), 64)


def test_a_live_pool_on_a_gpu_is_what_the_largest_batch_and_graphs_leave() -> None:
    """nano keeps 2 x 4 layers x 2 x 32 values a token. The device's 2 GiB at 90 %, less 0.5 and 0.25 GiB taken."""
    from workloads.trace import Trace

    loaded = load_model("nano", device="cpu", max_tokens=512, dtype="float32")
    on_gpu = replace(loaded, device=torch.device("cuda"))
    lengths = np.full(2000, 400)
    trace = Trace("long", np.zeros(2000), lengths, lengths // 4, lengths // 4)
    use = MemoryUse(2 * GIB, GIB // 2, GIB // 8, GIB // 8)
    block_bytes = loaded.kv_bytes_per_token * 16
    expected = (int(2 * GIB * 0.9) - 3 * GIB // 4) // block_bytes - 1
    wanted = 2000 * 32 * 2 + 1
    assert default_blocks(LiveConfig(), on_gpu, trace, 500, use) == min(expected, wanted)
    assert default_blocks(LiveConfig(memory_share=0.5), on_gpu, trace, 500, use) < expected
    with pytest.raises(ExecutorError, match=r"graphs 0\.12; lower --max-model-len"):
        default_blocks(LiveConfig(memory_share=0.37), on_gpu, trace, 500, use)
    # On a CPU: half of what is free; packed blocks are smaller, windows lie beside them.
    free = MemoryUse(GIB // 64, 0, 0)
    plain = default_blocks(LiveConfig(), loaded, trace, 500, free)
    assert plain == GIB // 128 // block_bytes
    packed = default_blocks(
        LiveConfig(kv_compression="kivi4", max_num_seqs=4), loaded, trace, 500, free, most_tokens=64
    )
    assert packed > 2 * plain


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_largest_batch_is_measured_on_this_gpu() -> None:
    loaded = load_model("nano", device="cuda", max_tokens=512)
    use = measure_use(loaded, most_rows=2048, most_sampled=256)
    assert 0 < use.peak_activations < use.total
    assert use.taken >= loaded.model.weight_bytes


def test_random_weights_that_cannot_fit_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3.1-8B has 8,030,261,248 parameters: 29.9 GiB in four bytes each, 15.0 in two."""
    monkeypatch.setattr("executor.serving.device_memory.free_memory_bytes", lambda device: 10 * GIB)
    monkeypatch.setattr("executor.model.loading.random_weights", lambda *asked: pytest.fail("they were made"))
    for dtype, size in (("auto", "29.9 GiB of weights in float32"), ("bfloat16", "15.0 GiB of weights in bfloat16")):
        with pytest.raises(ExecutorError, match=rf"llama-3.1-8b: {size}, but 10.0 GiB are free on cpu; take a smaller"):
            load_model("llama-3.1-8b", device="cpu", dtype=dtype, max_tokens=64)
