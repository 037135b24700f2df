"""What only a device can tell: whole models, copies and graphs on it against the plain path on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.attention.flash_attn import find_generations
from executor.attention.triton import TritonAttention
from executor.config import LiveConfig
from executor.model.cuda_graphs import Buckets, GraphedModel
from executor.model.loading import Loaded, load_model
from executor.serving.replay import LiveRun, load_for, replay_live
from executor.triton_kernels.runtime import interpreted
from policies import policy_names
from tests.executor.batches import blocks_needed, make_step
from workloads.trace import Trace

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

BF16 = 0.03
"""Share of the largest logit by which bfloat16 may differ: 8 bits of mantissa, over the sums of a few layers."""
LENGTHS = [(37, 7), (5, 11), (64, 3), (1, 9), (90, 2), (20, 6)]


def loaded(**options: object) -> Loaded:
    # On a device that is not there (tests/fake_gpu) kernels are interpreted: minutes a model, so their twins stand in.
    kernels, attention = ("plain_device", "paged") if interpreted() else ("triton", "triton")
    chosen = {"dtype": "float32", "kernels": kernels, "attention": attention, "seed": 5, "max_tokens": 600, **options}
    return load_model("nano", device="cuda", **chosen)  # type: ignore[arg-type]


def logits(model: Loaded, step: object, block_size: int, forward: object = None) -> torch.Tensor:
    """Of one batch over a pool of the same random numbers."""
    step.device, step.arrays = model.device, None  # type: ignore[attr-defined]
    for name in ("only_sampled", "row_positions", "row_slots", "sampled_index", "block_tables"):
        step.__dict__.pop(name, None)
    pool = model.new_cache(blocks_needed(step), block_size)  # type: ignore[arg-type]
    pool.pool.copy_(torch.randn(pool.pool.shape, generator=torch.Generator().manual_seed(3)))
    ids = step.tensor(step.token_ids)  # type: ignore[attr-defined]
    if forward is None:
        return model.model.forward(ids, step, pool).float().clone()  # type: ignore[arg-type]
    return forward(pool)(ids, step, pool).float().clone()  # type: ignore[operator, no-any-return]


def near(got: torch.Tensor, expected: torch.Tensor, share: float = BF16) -> None:
    assert bool(got.isfinite().all())
    assert float((got - expected).abs().max()) <= share * float(expected.abs().max())


def served(model: Loaded, **options: object) -> LiveRun:
    prompt, output = (np.array([each[at] for each in LENGTHS]) for at in (0, 1))
    trace = Trace("small", np.zeros(len(LENGTHS)), prompt, output, output)
    fields = {"policy": "chunked", "as_fast_as_possible": True, "seed": 5, **options}
    return replay_live(trace, loaded=model, **fields)  # type: ignore[arg-type]


def same_tokens(one: LiveRun, other: LiveRun) -> float:
    pairs = [(a, b) for row in one.answers for a, b in zip(one.answers[row], other.answers[row])]
    return sum(a == b for a, b in pairs) / len(pairs)


def test_flash_attention_in_a_whole_model() -> None:
    major, minor = torch.cuda.get_device_capability()
    if not find_generations(10 * major + minor)[0]:
        pytest.skip("no FlashAttention here")
    step = make_step([(200, 0), (5, 31)], [3, 99, 300], block_size=256)
    expected = logits(loaded(dtype="bfloat16", attention="sdpa"), step, 256)
    flash = loaded(dtype="bfloat16", attention="flash_attn", block_size=256)
    near(logits(flash, step, 256), expected)
    near(logits(flash, step, 256, lambda pool: GraphedModel(flash.model, pool, Buckets(blocks=2)).forward), expected)


@pytest.mark.parametrize("two_streams", [False, True])
@pytest.mark.parametrize(
    ("chunks", "decodes"), [([], [3]), ([], [9] * 7), ([(130, 20)], [40] * 3), ([(5, 300), (250, 0)], [7, 90])]
)
def test_graphs_of_several_sizes_equal_the_plain_pass(
    chunks: list[tuple[int, int]], decodes: list[int], two_streams: bool
) -> None:
    model = loaded(dtype="bfloat16")
    step = make_step(chunks, decodes)
    expected = logits(model, step, 16)
    attention = model.model.attention
    if two_streams:
        if not isinstance(attention, TritonAttention):
            pytest.skip("two streams are the Triton backend's")
        attention.two_streams = True
    near(logits(model, step, 16, lambda pool: GraphedModel(model.model, pool, Buckets(blocks=24)).forward), expected)


def test_blocks_swapped_through_pinned_memory_come_back_as_they_were() -> None:
    model = loaded()
    stayed = served(model, num_blocks=60)
    swapped = served(model, num_blocks=9, preemption="swap", max_model_len=120)
    assert swapped.config["memory"]["preemptions_by_swap"] > 0
    assert same_tokens(stayed, swapped) > 0.9


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_answers_as_one_request_at_a_time(policy: str) -> None:
    model = loaded()
    serial = served(model, policy="request_level", max_num_seqs=1)
    assert same_tokens(serial, served(model, policy=policy, block_size=16)) > 0.9


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device, NCCL takes one each")
def test_two_ranks_over_nccl_answer_as_one() -> None:
    alone = served(loaded())
    fields = {"model": "nano", "device": "cuda", "dtype": "float32", "seed": 5, "tp": 2}
    with load_for(LiveConfig(**fields), 600) as model:  # type: ignore[arg-type]
        assert same_tokens(alone, served(model, tp=2)) > 0.9
