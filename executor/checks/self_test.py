"""Do the kernels give right answers on this very device? Small batches against the reference in float64.

`self_test` checks everything that can be chosen here and reports; `why_attention_fails` and `why_kernels_fail` are what
the choosers ask before they take an optimised kernel by themselves, once a process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from executor.batches.batch_arrays import Step
from executor.errors import ExecutorError
from executor.kv_memory.pool import KVCache
from profiler.specs.model_spec import ModelSpec

if TYPE_CHECKING:
    from executor.attention.base import AttentionBackend
    from executor.kernels.device import DeviceKernels

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference allowed on values of order 1: a few units of rounding of the dtype, and of TF32's absence."""


@dataclass(frozen=True)
class Check:
    """One kernel on one case; without a case it cannot run here at all, which is no failure.

    error: largest difference to float64, NaN if it raised or gave anything but finite numbers. reason: why not, or what
    was raised.
    """

    kernel: str
    case: str
    dtype: str
    error: float
    tolerance: float
    passed: bool
    reason: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def self_test(
    device: torch.device,
    dtype: torch.dtype,
    spec: ModelSpec | None = None,
    *,
    block_size: int = 16,
    leave_out: tuple[str, ...] = (),
) -> list[Check]:
    """Every attention backend and kernel set, on every case. Those that cannot run here are listed with their reason.

    spec: its head shape is used; by default that of Llama-3.1-8B on CUDA, a small one elsewhere.
    """
    from executor.attention import BACKENDS, backend_class

    spec = spec or _default_spec(device)
    checks = []
    for name in BACKENDS:
        if name in leave_out:
            continue
        for cls in backend_class(name).forms(device):
            # Whoever reads large blocks only is checked with those.
            size = 256 if name == "flash_attn" and cls.why_not_blocks(block_size) else block_size
            reason = cls.why_not(spec, device, dtype)
            if reason:
                checks.append(Check(name, "", _name(dtype), float("nan"), TOLERANCE[dtype], False, reason, 0.0))
                continue
            checks += check_attention(cls, spec, device, dtype, size)
    for name in ("triton", "plain_device"):
        checks += check_kernels(name, device, dtype)
    return checks


def _default_spec(device: torch.device) -> ModelSpec:
    return _spec_of(*((32, 8, 128) if device.type == "cuda" else (4, 2, 16)))


def _spec_of(heads: int, kv_heads: int, head_dim: int) -> ModelSpec:
    """The least model with such heads."""
    return ModelSpec(
        name="self-test",
        layers=1,
        hidden=heads * head_dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=64,
        vocab=64,
        max_position=4096,
    )


CASES: dict[str, tuple[list[tuple[int, int]], list[int]]] = {
    "chunks": ([(40, 0), (33, 70)], []),
    "long chunk": ([(150, 20)], []),
    "decodes": ([], [0, 15, 130, 301]),
    "mixed": ([(20, 31), (5, 0)], [3, 99]),
}
"""Chunks as (tokens, prefix) and contexts of decodes. The long chunk has the largest query tile that there is: a
device may have too little shared memory for that one alone."""


def check_attention(
    cls: type[AttentionBackend], spec: ModelSpec, device: torch.device, dtype: torch.dtype, block_size: int
) -> list[Check]:
    """One backend on every case, over a pool of random numbers."""
    from executor.attention.reference import ReferenceAttention

    exact = ReferenceAttention(spec)
    # The C++ kernels take float32 activations over a pool of either dtype.
    activations = torch.float32 if cls.name == "native" else dtype

    def run(chunks: list[tuple[int, int]], decodes: list[int]) -> float:
        step = random_step(chunks, decodes, block_size, device)
        pool = KVCache(spec, int(step.tables.max()) + 1, block_size, dtype, device)
        pool.pool.normal_(generator=torch.Generator(device).manual_seed(1))
        q = torch.randn(step.rows, spec.q_size, generator=torch.Generator().manual_seed(2)).to(device, activations)
        wide = KVCache(spec, pool.blocks, block_size, torch.float64, device)
        wide.pool.copy_(pool.pool)
        expected, got = q.double(), q.clone()
        exact.attend(0, q.double(), expected, step, wide)
        backend.attend(0, q, got, step, pool)
        return _difference(got, expected)

    try:
        backend = cls(spec)
    except (ExecutorError, ImportError, RuntimeError) as error:
        return [Check(cls.name, "start", _name(dtype), float("nan"), TOLERANCE[dtype], False, str(error), 0.0)]
    name = backend.name  # FlashAttention's tells its generation
    return [_check(name, case, dtype, lambda parts=parts: run(*parts)) for case, parts in CASES.items()]


def check_kernels(
    name: str, device: torch.device, dtype: torch.dtype, cases: Mapping[str, Callable[..., float]] | None = None
) -> list[Check]:
    """One kernel set against plain PyTorch in float64: its small steps and its experts, or the given `cases`."""
    from executor.kernels import make_kernels
    from executor.kernels.plain import PlainKernels

    try:
        ours = make_kernels(name, device, dtype)
    except ExecutorError as error:
        return [Check(name, "", _name(dtype), float("nan"), TOLERANCE[dtype], False, str(error), 0.0)]
    plain = PlainKernels(device, torch.float64)
    cases = {**_SMALL, **_EXPERTS} if cases is None else cases
    return [
        _check(name, case, dtype, lambda test=test: test(ours, plain, device, dtype)) for case, test in cases.items()
    ]


def _check(kernel: str, case: str, dtype: torch.dtype, run: Callable[[], float]) -> Check:
    since = time.perf_counter()
    error, reason = float("nan"), ""
    try:
        error = run()
    except Exception as raised:  # a kernel may fail in any way; the report says in which
        lines = str(raised).strip().splitlines()
        reason = f"{type(raised).__name__}: {lines[0] if lines else ''}"
    tolerance = TOLERANCE[dtype]
    # Not `error > tolerance`: a NaN must not pass.
    passed = not reason and error <= tolerance
    return Check(kernel, case, _name(dtype), error, tolerance, passed, reason, time.perf_counter() - since)


def _norm(ours: DeviceKernels, plain: Any, device: torch.device, dtype: torch.dtype) -> float:
    x, weight = _random((7, 96), device, dtype, 1), _random((96,), device, dtype, 2)
    return _difference(ours.rms_norm(x, weight, 1e-5, "test"), plain.rms_norm(x.double(), weight.double(), 1e-5, ""))


def _residual(ours: DeviceKernels, plain: Any, device: torch.device, dtype: torch.dtype) -> float:
    x, residual = _random((7, 48), device, dtype, 1), _random((7, 96), device, dtype, 2)
    matrix, weight = _random((96, 48), device, dtype, 3) / 8, _random((96,), device, dtype, 4)
    wide = residual.double()
    expected = plain.add_and_norm(plain.linear(matrix.double(), None), x.double(), wide, weight.double(), 1e-5, "")
    got = ours.add_and_norm(ours.linear(matrix, None), x, residual, weight, 1e-5, "test")
    return max(_difference(got, expected), _difference(residual, wide))


def _silu(ours: DeviceKernels, plain: Any, device: torch.device, dtype: torch.dtype) -> float:
    both = _random((7, 2 * 50), device, dtype, 1)
    gate, up = both.double().chunk(2, dim=-1)
    return _difference(ours.silu_mul(both, both.new_empty(7, 50)), torch.nn.functional.silu(gate) * up)


def _experts(ours: DeviceKernels, plain: Any, device: torch.device, dtype: torch.dtype) -> float:
    """Few rows and many, with shared experts behind a gate and without; counts of rows as well.

    The router's columns are far apart, so that rounding makes no row choose otherwise.
    """
    from executor.kernels.experts import ExpertWeights

    experts, hidden, width, shared = 6, 80, 40, 48
    shapes = {"gate_up": (experts, 2 * width, hidden), "down": (experts, hidden, width)}
    shapes |= {"shared_gate_up": (2 * shared, hidden), "shared_down": (hidden, shared), "shared_gate": (1, hidden)}
    drawn = {name: _random(shape, device, dtype, at) / 12 for at, (name, shape) in enumerate(shapes.items())}
    router = torch.zeros(experts, hidden, device=device, dtype=dtype)
    router[:, :experts] = 3 * torch.eye(experts, device=device, dtype=dtype)
    worst = 0.0
    for rows, with_shared in ((2, False), (70, True)):
        x, out = _random((rows, hidden), device, dtype, 7), _random((rows, hidden), device, dtype, 8)
        order = torch.stack(
            [torch.randperm(experts, generator=torch.Generator().manual_seed(row)) for row in range(rows)]
        )
        x[:, :experts] = order.to(device, dtype)
        wide, totals = out.double(), []
        for kernels, given, total in ((ours, dtype, out), (plain, torch.float64, wide)):
            tensors = {
                name: tensor.to(given) for name, tensor in drawn.items() if with_shared or name in ("gate_up", "down")
            }
            weights = ExpertWeights(
                router.to(given), tensors.pop("gate_up"), tensors.pop("down"), 3, with_shared, **tensors
            )
            counts = torch.full((experts,), -1, dtype=torch.int32, device=device)
            kernels.experts(weights, counts).add(x.to(given), total)
            totals.append(counts)
        if not torch.equal(*totals):
            return float("nan")
        worst = max(worst, _difference(out, wide))
    return worst


def _rotary(ours: DeviceKernels, plain: Any, device: torch.device, dtype: torch.dtype) -> float:
    """Queries, keys and pool, with and without q/k norms; a dummy row must leave the pool as it is."""
    spec = ModelSpec(
        name="self-test",
        layers=1,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=64,
        vocab=64,
        max_position=64,
    )
    worst = 0.0
    for normed in (False, True):
        step = random_step([(9, 12)], [3], 16, device)
        step.slots[2] = -1
        angles = torch.arange(64)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])[None, :]
        rope = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
        norms = (_random((16,), device, dtype, 3), _random((16,), device, dtype, 4)) if normed else None
        qkv = _random((step.rows, (4 + 2 * 2) * 16), device, dtype, 5)
        blocks = int(step.tables.max()) + 1
        pools = [KVCache(spec, blocks, 16, kind, device) for kind in (dtype, torch.float64)]
        for pool in pools:
            pool.pool.fill_(0.5)
        wide = qkv.double()
        wide_norms = (norms[0].double(), norms[1].double()) if norms else None
        plain.rotate_and_store(wide, 0, step, pools[1], tuple(part.double() for part in rope), wide_norms, 1e-5)
        ours.rotate_and_store(qkv, 0, step, pools[0], rope, norms, 1e-5)
        worst = max(worst, _difference(qkv, wide), _difference(pools[0].pool, pools[1].pool))
    return worst


_SMALL: dict[str, Callable[..., float]] = {"norm": _norm, "residual": _residual, "silu": _silu, "rotary": _rotary}
_EXPERTS: dict[str, Callable[..., float]] = {"experts": _experts}


@cache
def why_kernels_fail(device: torch.device, dtype: torch.dtype) -> str:
    """Empty if the fused kernels pass on this device, else what failed. Experts aside: most models have none."""
    return _first_failure(check_kernels("triton", device, dtype, _SMALL))


@cache
def why_experts_fail(device: torch.device, dtype: torch.dtype) -> str:
    """Empty if the grouped products of experts pass on this device, else what failed."""
    return _first_failure(check_kernels("triton", device, dtype, _EXPERTS))


def why_attention_fails(
    cls: type[AttentionBackend], spec: ModelSpec, device: torch.device, dtype: torch.dtype, block_size: int
) -> str:
    """Empty if the backend passes on this device with the model's head shape, else what failed."""
    return _attention_failure(cls, (spec.heads, spec.kv_heads, spec.head_dim), device, dtype, block_size)


@cache
def _attention_failure(
    cls: type[AttentionBackend], heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype, block_size: int
) -> str:
    spec = _spec_of(*heads)
    return _first_failure(check_attention(cls, spec, device, dtype, block_size))


def _first_failure(checks: list[Check]) -> str:
    for check in checks:
        if not check.passed:
            return f"{check.kernel} {check.case}: " + (check.reason or f"off by {check.error:.2g}")
    return ""


def random_step(chunks: list[tuple[int, int]], decodes: list[int], block_size: int, device: torch.device) -> Step:
    """A step of (tokens, prefix) chunks and decodes with these contexts, over shuffled blocks from 1 on."""
    spans = [(prefix, prefix + tokens) for tokens, prefix in chunks] + [(context, context + 1) for context in decodes]
    width = -(-max(end for _, end in spans) // block_size)
    tables = 1 + np.random.default_rng(0).permutation(len(spans) * width).reshape(len(spans), width).astype(np.int32)
    positions = np.concatenate([np.arange(start, end, dtype=np.int32) for start, end in spans])
    owner = np.repeat(np.arange(len(spans)), [end - start for start, end in spans])
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    ends = np.cumsum([end - start for start, end in spans]).astype(np.int32)
    starts = (ends - [end - start for start, end in spans]).astype(np.int32)
    count = len(chunks)
    each = np.arange(len(spans), dtype=np.int32)

    def ints(values: list[int]) -> np.ndarray:
        return np.array(values, np.int32)

    return Step(
        rows=len(positions),
        token_ids=np.zeros(len(positions), np.int64),
        positions=positions,
        slots=slots,
        tables=tables,
        chunk_row=starts[:count],
        chunk_tokens=ints([tokens for tokens, _ in chunks]),
        chunk_prefix=ints([prefix for _, prefix in chunks]),
        chunk_table=each[:count],
        decode_row=starts[count:],
        decode_context=ints(decodes),
        decode_table=each[count:],
        sampled_rows=ends - 1,
        sampled_table=each,
        device=device,
    )


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _difference(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative where the expected value is above 1."""
    off = (got.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)
    return float(off.max()) if bool(off.isfinite().all()) else float("nan")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def report_lines(checks: list[Check]) -> Iterator[str]:
    """One line a check, as a person reads it."""
    for check in checks:
        state = "ok" if check.passed else "not here" if not check.case else "FAILED"
        detail = check.reason or f"off by {check.error:.2g}, at most {check.tolerance:.2g}"
        yield f"{check.kernel:<12} {check.case:<9} {check.dtype:<9} {state:<8} {detail}"


SHAPES = ((32, 8, 128), (9, 3, 64), (16, 16, 256), (28, 4, 128))
"""Heads, KV heads and head size of Llama-3.1-8B, SmolLM2-135M, Gemma-7B and Qwen2-7B."""


def check_shapes(device: torch.device, dtypes: tuple[torch.dtype, ...], block_size: int) -> Iterator[dict[str, Any]]:
    """`self_test` for several shapes of heads and dtypes; each check says for which.

    flex is left out: it is never chosen by itself, and compiling it for every shape takes minutes.
    """
    for dtype in dtypes:
        for heads, kv_heads, d in SHAPES:
            spec = _spec_of(heads, kv_heads, d)
            for check in self_test(device, dtype, spec, block_size=block_size, leave_out=("flex",)):
                yield {"shape": f"{heads}/{kv_heads} heads of {d}", **check.as_dict()}


def print_all(prog_name: str) -> None:
    """Check everything that can be chosen on a device, and say what failed; exit code 1 if anything did."""
    import argparse

    from executor.model.loading import pick_device, torch_dtype, use_device
    from policies.edges.output_file import write_text

    parser = argparse.ArgumentParser(prog_name)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--out", type=Path, help="JSON file for every check")
    given = parser.parse_args()
    dtypes = tuple(torch_dtype(name, "--dtypes") for name in given.dtypes.split(","))
    found: list[dict[str, Any]] = []
    for check in check_shapes(use_device(pick_device(given.device)), dtypes, given.block_size):
        found.append(check)
        if given.out is not None:
            # Whole after every check: a kernel that hangs takes none of the others with it.
            plain = [{key: None if value != value else value for key, value in each.items()} for each in found]
            write_text(given.out, json.dumps(plain, indent=1) + "\n", ExecutorError)
    failed = [check for check in found if check["case"] and not check["passed"]]
    for check in failed:
        why = check["reason"] or f"off by {check['error']:.2g}, at most {check['tolerance']:.2g}"
        print(f"{check['kernel']} {check['case']} {check['dtype']}, {check['shape']}: {why}")
    ran = [check for check in found if check["case"]]
    print(f"{len(ran)} checks of {len({check['kernel'] for check in ran})} kernels, {len(failed)} failed")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    from policies.edges.command_line import run_command

    run_command(lambda: print_all, "executor.checks.self_test")
