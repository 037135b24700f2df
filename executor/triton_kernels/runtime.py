"""Whether Triton can be used here, and how: compiled on a GPU, or interpreted on CPU tensors (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

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


SHARED_BYTES = {
    80: 166_912,
    86: 101_376,
    87: 166_912,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    110: 232_448,
    120: 101_376,
    121: 101_376,
}
"""Shared memory that one thread block may have, by compute capability (CUDA C programming guide, table of limits)."""


class Processor(NamedTuple):
    """What a launch has to know of a streaming multiprocessor. capability: 90 for 9.0. shared_bytes: most of a
    block.
    """

    capability: int
    shared_bytes: int

    @classmethod
    def of_capability(cls, capability: int) -> Processor:
        """By the table; a capability that is not in it has the least of all."""
        return cls(capability, SHARED_BYTES.get(capability, min(SHARED_BYTES.values())))


@cache
def processor_of(device: torch.device) -> Processor:
    """The device's own; where kernels are interpreted there are no limits to keep, and a large one's are taken."""
    if device.type != "cuda":
        return Processor.of_capability(90)
    major, minor = torch.cuda.get_device_capability(device)
    by_table = Processor.of_capability(10 * major + minor)
    found = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return by_table._replace(shared_bytes=int(found)) if found else by_table


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; 4 where there is no GPU to ask."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 4
