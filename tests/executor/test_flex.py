"""PyTorch's flex_attention over the pool in place against the reference: written out on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from executor.attention import make_attention
from executor.attention.flex import FlexAttention
from executor.attention.reference import ReferenceAttention
from executor.checks.self_test import check_attention, random_step
from executor.errors import ExecutorError
from executor.model.loading import load_model
from tests.executor.batches import make_step
from tests.executor.test_triton_attention import NAN, attended, filled_cache, spec

CUDA = torch.cuda.is_available()
SMALL = 16 if CUDA else 5


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "block_size"),
    [(4, 2, None, 16), (4, 1, 20, SMALL), (2, 2, None, 32), (8, 2, 9, 16)],
)
def test_flex_equals_the_reference(heads: int, kv_heads: int, window: int | None, block_size: int) -> None:
    model = spec(heads, kv_heads, 16, window)
    step = make_step([(20, 31), (5, 0), (130, 7)], [3, 99, 0, 64], block_size=block_size, dummies=3)
    dtype = torch.float32 if CUDA else torch.float64
    cache = filled_cache(model, step, block_size, dtype, 0.0 if CUDA else NAN)
    q = torch.randn(step.rows, model.q_size, generator=torch.Generator().manual_seed(1)).to(cache.device, dtype)
    ours = attended(FlexAttention(model), step, cache, q)
    exact = attended(ReferenceAttention(model), step, cache, q)
    assert torch.allclose(ours, exact, atol=1e-3 if CUDA else 1e-12, rtol=0)
    assert bool((ours[-3:] == 7.0).all()), "dummy rows are left alone"


def test_a_whole_model_on_flex_equals_the_reference() -> None:
    """Layers share what is prepared of a step, and the last one sees sampled rows alone."""
    logits = []
    for attention in ("flex", "reference"):
        loaded = load_model("nano", device="cpu", dtype="float64", kernels="torch", attention=attention, max_tokens=128)
        step = random_step([(20, 31), (5, 0)], [3, 99], 16, loaded.device)
        cache = loaded.new_cache(int(step.tables.max()), 16)
        cache.pool.normal_(generator=torch.Generator().manual_seed(1))
        logits.append([loaded.model.forward(step.tensor(step.token_ids), step, cache).clone() for _ in range(2)])
    assert all(torch.allclose(ours, exact, atol=1e-10) for ours, exact in zip(*logits))


def test_flex_is_taken_by_its_name_alone_and_takes_the_self_test() -> None:
    model, device = spec(), torch.device("cpu")
    assert make_attention("flex", model, device, torch.float32, torch.float32).name == "flex"
    assert make_attention("auto", model, device, torch.float64, torch.float64).name == "sdpa"
    assert all(check.passed for check in check_attention(FlexAttention, model, device, torch.float32, 16))
    with pytest.raises(ExecutorError, match=r"expected one of auto, .*flex"):
        make_attention("flexible", model, device, torch.float32, torch.float32)


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("block_size", [16, 128])
def test_compiled_flex_passes_on_this_gpu(block_size: int) -> None:
    model = spec(32, 8, 128)
    checks = check_attention(FlexAttention, model, torch.device("cuda"), torch.bfloat16, block_size)
    assert all(check.passed for check in checks), checks
