"""Asks Linux to back large tensors with huge pages: a pool streamed block by block misses the TLB at every block."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

from torch import Tensor

_LEAST_BYTES = 4 << 20
_PAGE = 2 << 20


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        return ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None


def advise_huge_pages(tensor: Tensor) -> Tensor:
    """Advise for a CPU tensor that nothing has been written to yet; returns it. Only a hint: refusal is harmless."""
    madvise = _madvise()
    start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if madvise is None or tensor.device.type != "cpu" or size < _LEAST_BYTES:
        return tensor
    first = -(-start // _PAGE) * _PAGE
    length = (start + size - first) // _PAGE * _PAGE
    if length > 0:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return tensor
