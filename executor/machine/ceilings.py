"""What this device can do at most, measured: copy bandwidth and matrix rate, and the bound that they set for a batch.

A bound is the larger of bytes / bandwidth and FLOPs / matrix rate, with the batch's useful bytes and FLOPs only
(`profiler.specs.useful_work`): no implementation can be faster, so a time is told as a share of it.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from policies import BatchShape
from profiler.specs.model_spec import ModelSpec
from profiler.specs.useful_work import bytes_of, flops_of


@dataclass(frozen=True)
class Ceilings:
    """copy_bytes_per_s counts a copied byte twice, read and written. matrix_flops: of a square product in `dtype`.

    spread: (slowest - quickest) / median over the repeats, of copy and product, whichever is larger.
    """

    device: str
    dtype: str
    copy_bytes_per_s: float
    matrix_flops: float
    copied_bytes: int
    matrix_size: int
    spread: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, *, repeats: int = 7, copied_bytes: int = 0, matrix_size: int = 0
) -> Ceilings:
    """Copy a large tensor and multiply two large matrices; medians. Under a second on a GPU, a few on a CPU.

    copied_bytes, matrix_size: by default 2 GiB and 8192 on CUDA, 128 MiB and 1024 elsewhere (beyond any cache).
    """
    cuda = device.type == "cuda"
    copied = copied_bytes or (2 << 30 if cuda else 128 << 20)
    size = matrix_size or (8192 if cuda else 1024)
    copies = _time_copies(device, copied, repeats)
    products = _time_products(device, dtype, size, repeats)
    return Ceilings(
        torch.cuda.get_device_name(device) if cuda else f"cpu, {torch.get_num_threads()} threads",
        str(dtype).removeprefix("torch."),
        2 * copied / median(copies),
        2 * size**3 / median(products),
        copied,
        size,
        max((max(times) - min(times)) / median(times) for times in (copies, products)),
    )


def _time_copies(device: torch.device, copied_bytes: int, repeats: int) -> list[float]:
    source = torch.ones(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return time_calls(lambda: target.copy_(source), device, repeats)


def _time_products(device: torch.device, dtype: torch.dtype, size: int, repeats: int) -> list[float]:
    # Random numbers: products of zeros draw less power and run faster than any real one.
    draw = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=draw, device=device).mul_(0.02).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)
    return time_calls(lambda: torch.mm(left, right, out=out), device, repeats)


def time_calls(call: Any, device: torch.device, repeats: int, warm: int = 2) -> list[float]:
    """Seconds of each call after `warm` calls; on CUDA between device events, without the launch."""
    for _ in range(warm):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            since = time.perf_counter()
            call()
            times.append(time.perf_counter() - since)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in zip(events, events[1:])]


@dataclass(frozen=True)
class Bound:
    """The least time of one batch: seconds, and which of the two limits sets it ("memory" or "matrix")."""

    seconds: float
    by: str
    bytes: float
    flops: float

    def share(self, seconds: float) -> float:
        """How much of the bound a measured time reaches (1 is perfect)."""
        return self.seconds / seconds


def bound_of(
    spec: ModelSpec, shape: BatchShape, ceilings: Ceilings, *, dtype: str = "bfloat16", kv_dtype: str = "auto"
) -> Bound:
    """The bound of one iteration on one device."""
    moved = float(bytes_of(spec, shape, dtype, kv_dtype)[0])
    work = float(flops_of(spec, shape)[0])
    by_memory, by_matrix = moved / ceilings.copy_bytes_per_s, work / ceilings.matrix_flops
    return Bound(max(by_memory, by_matrix), "memory" if by_memory >= by_matrix else "matrix", moved, work)
