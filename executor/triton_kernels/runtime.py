"""Whether Triton can be used here, and how: compiled on a GPU, or interpreted on CPU tensors (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch


def interpreted() -> bool:
    """Triton's interpreter is asked for. The variable has to be set before triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def triton_reason(device: torch.device) -> str:
    """Empty if Triton kernels can run on the device, else why not."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"Triton kernels run on CUDA, the device is {device} (TRITON_INTERPRET=1 interprets them, slowly)"
    return ""


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; 4 where there is no GPU to ask."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 4
