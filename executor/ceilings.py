"""What this device can do at best, measured in a second or two: copy bandwidth, matrix rate, free memory.

Bounds of a batch follow from these by its FLOPs and bytes; datasheets promise more than any program sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from executor.live import free_memory_bytes
from executor.profile_rows import device_name


@dataclass(frozen=True)
class Ceilings:
    """copy_bytes_per_s: reads and writes of a large copy, both counted. matrix_flops: of a square matrix product."""

    device: str
    dtype: str
    threads: int
    copy_bytes_per_s: float
    matrix_flops: float
    memory_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def toml(self) -> str:
        """The same as a hardware table that `--gpu FILE.toml` reads."""
        return (
            f'title = "{self.device}"\n'
            f"peak_flops = {{ {self.dtype} = {self.matrix_flops:.4g} }}\n"
            f"memory_bytes = {self.memory_bytes}\n"
            f"memory_bandwidth = {self.copy_bytes_per_s:.4g}\n"
            f"sms = {max(1, self.threads)}\n"
            'link = "none"\n'
            f"link_bandwidth = {self.copy_bytes_per_s:.4g}\n"
            'source = "measured here by executor.ceilings: a copy and a matrix product"\n'
        )


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.5) -> Ceilings:
    """The best of many copies and of many matrix products, each kind repeated for about `seconds`."""
    cuda = device.type == "cuda"
    size = 8192 if cuda else 1024
    elements = (1 << 30 if cuda else 1 << 26) // dtype.itemsize
    source = torch.ones(elements, dtype=dtype, device=device)
    target = torch.empty_like(source)
    copy_s = _best(lambda: target.copy_(source), device, seconds)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty(size, size, dtype=dtype, device=device)
    matrix_s = _best(lambda: torch.mm(left, right, out=product), device, seconds)
    sms = torch.cuda.get_device_properties(device).multi_processor_count if cuda else torch.get_num_threads()
    return Ceilings(
        device=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        threads=int(sms),
        copy_bytes_per_s=2 * elements * dtype.itemsize / copy_s,
        matrix_flops=2 * size**3 / matrix_s,
        memory_bytes=free_memory_bytes(device),
    )


@torch.inference_mode()
def _best(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the quickest of many runs."""
    best = float("inf")
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize(device)
            best = min(best, start.elapsed_time(end) / 1e3)
        else:
            since = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - since)
    return best
