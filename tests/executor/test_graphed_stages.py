"""Stages and tensor-parallel ranks through graphs, on the stand-in that records: equal to their plain passes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from executor.attention import make_attention
from executor.batches.batch_arrays import Step
from executor.distributed.graphed_stage import GraphedStage
from executor.distributed.layout import Layout, Shard
from executor.distributed.shard_weights import shard_weights
from executor.distributed.stage_model import StageModel
from executor.kernels import make_kernels
from executor.kv_memory.pool import KVCache
from executor.model.cuda_graphs import Buckets
from executor.model.loading import ModelSource
from profiler.specs.model_spec import ModelSpec
from tests.executor.batches import blocks_needed, make_step
from tests.executor.recorded_graph import RecordedGraph

CPU = torch.device("cpu")
SPEC = ModelSpec(
    name="small", layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=40, vocab=61, max_position=512
)
BUCKETS = Buckets(blocks=10, decodes=(1, 2, 4, 8), chunk_rows=96, tile=16, chunks=3)
STEPS = [
    make_step([], [3, 9, 40], vocab=61, seed=1), make_step([(20, 0), (5, 31)], [3, 99], vocab=61, seed=3),
    make_step([], [30, 2, 77, 5], vocab=61, seed=2), make_step([(17, 3)], [1], dummies=5, vocab=61, seed=6),
]  # fmt: skip


class Meeting:
    """Sums and gatherings among threads that stand for ranks; as operations, so that a recording sees them."""

    def __init__(self, ranks: int) -> None:
        self.rank = threading.local()
        self._barrier = threading.Barrier(ranks, timeout=30)
        self._brought: list[Tensor] = [torch.empty(0)] * ranks
        self.sums = 0

    def bring(self, ours: Tensor) -> list[Tensor]:
        self._brought[self.rank.number] = ours.clone()
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        return found


MEETING = Meeting(2)


@torch.library.custom_op("stage_test::all_reduce", mutates_args=("x",))
def summed(x: Tensor) -> None:
    MEETING.sums += 1
    x.copy_(torch.stack(MEETING.bring(x)).sum(dim=0))


@torch.library.custom_op("stage_test::all_gather", mutates_args=("everyone",))
def gathered(everyone: list[Tensor], ours: Tensor) -> None:
    for place, part in zip(everyone, MEETING.bring(ours)):
        place.copy_(part)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: summed(x))
    monkeypatch.setattr(dist, "all_gather", lambda everyone, ours, group: gathered(everyone, ours))
    return MEETING


def stage(layout: Layout, rank: int) -> StageModel:
    shard = Shard(SPEC, layout, rank)
    kernels = make_kernels("plain_device", CPU, torch.float64, torch.float64)
    attention = make_attention("paged", shard.spec, CPU, torch.float64, torch.float64)
    weights = shard_weights(ModelSource("spec", SPEC, None), shard, 5, torch.float64, CPU)
    group = object() if layout.tp > 1 else None
    return StageModel(shard, weights, kernels, attention, 512, group)  # type: ignore[arg-type]


def pool_of(model: StageModel) -> KVCache:
    spec = model.shard.spec
    return KVCache(spec, max(blocks_needed(step) for step in STEPS) + 1, 16, torch.float64, CPU)


@torch.inference_mode()
def plain(models: list[StageModel], pools: list[KVCache], step: Step) -> list[int]:
    hidden = torch.empty(step.rows, SPEC.hidden, dtype=torch.float64)
    for model, pool in zip(models, pools):
        if model.shard.is_first:
            model.embed(torch.from_numpy(step.token_ids), hidden)
        out = model.run_layers(hidden, step, pool)
    return models[-1].sample(out, None, ()).tolist()


def graphed(stages: list[GraphedStage], step: Step) -> list[int]:
    hidden = torch.empty(step.rows, SPEC.hidden, dtype=torch.float64)
    given = torch.from_numpy(step.token_ids)
    ids = None
    for each in stages:
        sizes = each.fits(step)
        assert sizes is not None
        ids = each.run(given, step, hidden, sizes)
        given = hidden
    assert ids is not None
    return ids.tolist()


def both(layout: Layout, ranks: list[int]) -> tuple[list[list[int]], list[list[int]], list[GraphedStage]]:
    models = [stage(layout, rank) for rank in ranks]
    pools = [pool_of(model) for model in models]
    expected = [plain(models, pools, replace(step, arrays=None)) for step in [*STEPS, *STEPS]]
    ours = [GraphedStage(model, pool_of(model), BUCKETS, new_capture=RecordedGraph) for model in models]
    got = [graphed(ours, step) for step in [*STEPS, *STEPS]]
    for pool, each in zip(pools, ours):
        assert torch.allclose(pool.pool[:, :, 1:], each.cache.pool[:, :, 1:], atol=1e-12, rtol=0)
    return expected, got, ours


def test_a_pipeline_of_graphs_answers_and_stores_as_its_plain_stages() -> None:
    expected, got, stages = both(Layout.of(SPEC, 1, 2, None), [0, 1])
    assert got == expected
    # 3 and 4 decodes share a graph.
    assert [each.counts.captured for each in stages] == [3, 3]
    assert [each.counts.replayed for each in stages] == [8, 8]


def test_ranks_of_a_stage_capture_their_sums_and_the_choice_of_tokens(meeting: Meeting) -> None:
    layout = Layout.of(SPEC, 2, 1, None)

    def rank(number: int) -> Callable[[], object]:
        meeting.rank.number = number
        return both(layout, [number])  # type: ignore[return-value]

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(rank, [0, 1]))
    for expected, got, stages in results:  # type: ignore[misc]
        assert got == expected
        assert stages[0].counts.captured == 3
    assert results[0][1] == results[1][1], "every rank knows every token"  # type: ignore[index]
    assert meeting.sums > 0


def test_a_stage_drops_no_graph_for_memory_of_its_own() -> None:
    """A rank that captures anew while its partners replay would wait for them in every sum."""
    _, _, stages = both(Layout.of(SPEC, 1, 1, None), [0])
    assert stages[0].most_bytes > 1 << 60
    assert stages[0].counts.evicted == 0
