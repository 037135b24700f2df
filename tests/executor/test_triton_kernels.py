"""The fused small kernels against plain PyTorch, whole models on the device kernel sets, and the choosers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from executor.attention import make_attention
from executor.attention.paged import PagedAttention
from executor.attention.reference import ReferenceAttention
from executor.checks.self_test import check_attention, check_kernels, report_lines, self_test, why_attention_fails
from executor.errors import ExecutorError
from executor.kernels import make_kernels
from executor.kernels.device import FUSIONS, TritonKernels
from executor.machine.ceilings import Ceilings, bound_of, measure_ceilings
from executor.model.loading import load_model
from executor.triton_kernels.runtime import triton_reason
from policies import BatchShape
from profiler import load_model_spec
from profiler.specs.model_spec import ModelSpec
from tests.executor.batches import blocks_needed, make_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(bool(triton_reason(DEVICE)), reason=triton_reason(DEVICE))
SETS = [pytest.param("triton", marks=needs_triton), "plain_device"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETS)
def test_small_steps_equal_plain_pytorch_in_float64(name: str, dtype: torch.dtype) -> None:
    checks = check_kernels(name, DEVICE, dtype)
    assert [check.case for check in checks] == ["norm", "residual", "silu", "rotary", "experts"]
    assert all(check.passed for check in checks), "\n".join(report_lines(checks))


SPECS = {
    "plain": {},
    "q/k norm, biases": {"qk_norm": True, "qkv_bias": True},
    "experts": {"experts": 7, "top_k": 3, "expert_intermediate": 24, "dense_layers": [0]},
    "shared experts": {
        "experts": 4,
        "top_k": 1,
        "expert_intermediate": 20,
        "shared_intermediate": 36,
        "shared_gate": True,
        "norm_topk": False,
    },
    "odd sizes": {"hidden": 40, "intermediate": 41, "heads": 5, "kv_heads": 1, "head_dim": 24, "rotary_fraction": 0.5},
}


def logits_of(kernels: str, attention: str, dtype: str, changes: dict[str, object]) -> torch.Tensor:
    shape = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 48, "vocab": 64, **changes}
    spec = ModelSpec(name="small", layers=2, max_position=512, **shape)  # type: ignore[arg-type]
    loaded = load_model(spec, device=DEVICE.type, dtype=dtype, kernels=kernels, attention=attention, seed=2)
    step = make_step([(20, 0), (5, 31)], [3, 40], vocab=64, dummies=3)
    step.device = DEVICE
    cache = loaded.new_cache(blocks_needed(step), 16)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(0)))
    return loaded.model.forward(step.tensor(step.token_ids), step, cache).double().cpu()


@pytest.mark.parametrize("shape", SPECS)
@pytest.mark.parametrize(
    ("kernels", "attention"), [pytest.param("triton", "triton", marks=needs_triton), ("plain_device", "paged")]
)
def test_a_model_on_device_kernels_equals_the_reference(kernels: str, attention: str, shape: str) -> None:
    exact = logits_of("torch", "reference", "float64", SPECS[shape])
    ours = logits_of(kernels, attention, "float32", SPECS[shape])
    assert float((exact - ours).abs().max()) < 2e-6 * max(1.0, float(exact.abs().max()) * 10)


@needs_triton
def test_each_fusion_can_be_switched_off_and_changes_nothing_but_rounding() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 16), torch.ones(16)
    matrix = torch.randn(16, 8)
    results = []
    for fused in (FUSIONS, frozenset(), frozenset({"norm"})):
        kernels = TritonKernels(DEVICE, torch.float32, fused=fused)
        linear = kernels.linear(matrix.to(DEVICE), None)
        total = residual.to(DEVICE).clone()
        normed = kernels.add_and_norm(linear, x.to(DEVICE), total, weight.to(DEVICE), 1e-5, "normed")
        results.append(torch.cat((normed, total)).cpu())
    assert torch.allclose(results[0], results[1], atol=1e-5)
    assert torch.allclose(results[0], results[2], atol=1e-5)
    with pytest.raises(ExecutorError, match="found fusion 'softmax'"):
        TritonKernels(DEVICE, torch.float32, fused=frozenset({"softmax"}))


@pytest.mark.slow
def test_compiled_steps_can_be_traced_whole_and_equal_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo traces each step as one graph; the back end that only runs the graph keeps the C++ compiler out of it."""
    from executor.kernels import compiled

    class Traced(compiled.CompiledKernels):
        def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
            super().__init__(device, dtype, backend="eager")

    monkeypatch.setattr(compiled, "CompiledKernels", Traced)
    exact = logits_of("torch", "reference", "float64", {})
    ours = logits_of("compiled", "paged", "float32", {})
    assert float((exact - ours).abs().max()) < 2e-6 * max(1.0, float(exact.abs().max()) * 10)


class Broken(PagedAttention):
    """Forgets the scale of the scores: a kernel that runs and is wrong."""

    def __init__(self, spec: ModelSpec, **options: object) -> None:
        super().__init__(spec)
        self.scale = 1.0


def test_a_kernel_that_is_wrong_does_not_pass_its_self_test() -> None:
    spec = load_model_spec("nano")
    failure = why_attention_fails(Broken, spec, torch.device("cpu"), torch.float32, 16)
    assert failure.startswith("paged chunks: off by")
    assert why_attention_fails(PagedAttention, spec, torch.device("cpu"), torch.float32, 16) == ""
    (first, *_) = check_attention(ReferenceAttention, spec, torch.device("cpu"), torch.float32, 16)
    assert first.passed


def test_the_self_test_of_a_cpu_reports_all_that_can_be_chosen() -> None:
    checks = self_test(torch.device("cpu"), torch.bfloat16)
    assert [check for check in checks if check.case and not check.passed] == []
    assert {"sdpa", "paged", "reference", "plain_device"} <= {check.kernel for check in checks if check.passed}
    (flash,) = [check for check in checks if check.kernel == "flash_attn"]
    assert (flash.case, flash.passed) == ("", False)
    assert "runs on CUDA" in flash.reason


def test_auto_takes_no_device_backend_on_a_cpu_and_a_named_one_says_why_not() -> None:
    spec, cpu = load_model_spec("nano"), torch.device("cpu")
    assert make_attention("auto", spec, cpu, torch.float32, torch.float32).name in ("native", "sdpa")
    with pytest.raises(ExecutorError, match="attention flash_attn: FlashAttention runs on CUDA"):
        make_attention("flash_attn", spec, cpu, torch.float32, torch.float32)
    with pytest.raises(ExecutorError, match="kernels: found 'quick'"):
        make_kernels("quick", cpu, torch.float32)


def test_the_bound_of_a_decode_batch_is_its_bytes_and_of_a_chunk_its_flops() -> None:
    """Llama-3.1-8B: 8.03e9 parameters less the embedding's 0.525e9, 128 KiB of keys and values a token, bfloat16."""
    spec = load_model_spec("llama-3.1-8b")
    h200 = Ceilings("H200", "bfloat16", 4.3e12, 790e12, 0, 0, 0.0)
    decode = bound_of(spec, BatchShape((), 64, 64 * 1024, 1024, 0, 64), h200)
    assert decode.by == "memory"
    assert decode.seconds == pytest.approx((7.505e9 * 2 + 64 * 1025 * 131072) / 4.3e12, rel=0.01)
    chunk = bound_of(spec, BatchShape(((2048, 0),), 0, 0, 0, 0, 1), h200)
    assert chunk.by == "matrix"
    assert chunk.seconds == pytest.approx((2 * 6.98e9 * 2048 + 4 * 32 * 4096 * 2048 * 2049 / 2) / 790e12, rel=0.01)
    assert decode.share(2 * decode.seconds) == 0.5


def test_ceilings_are_measured_on_any_device() -> None:
    found = measure_ceilings(DEVICE, torch.float32, repeats=3, copied_bytes=1 << 20, matrix_size=64)
    assert found.copy_bytes_per_s > 0
    assert found.matrix_flops > 0
    assert found.as_dict()["dtype"] == "float32"


EXPERTS = ("bf16, 8 of 128", "128 experts", "bf16, 16 rows an expert", "bf16, 128 rows an expert")
HARDEST = {
    80: ["bf16, d 128, 128 rows"],
    86: ["bf16, d 256, 64 rows", "fp32, d 128, 64 rows", "bf16, 128 rows an expert", "fp32, 128 rows an expert"],
    90: ["bf16, d 128, 128 rows", "bf16, d 128, 8 splits", "residual", "q/k norm", "bf16, 4 bits", *EXPERTS],
    100: ["bf16, d 256, 128 rows"],
    120: ["bf16, d 256, 64 rows"],
}
"""Capability -> kernels whose tiles come nearest to its shared memory."""


@pytest.mark.slow
def test_kernels_compile_within_the_shared_memory_of_gpus_that_are_not_here() -> None:
    pytest.importorskip("triton")
    import os

    code = (
        "from executor.checks.kernel_build import build_all\n"
        f"for capability, labels in {HARDEST}.items():\n"
        "    built = build_all(capability, lambda variant: variant.label in labels)\n"
        "    print(len({each.variant for each in built}) == len(labels), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * len(HARDEST)
