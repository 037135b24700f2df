"""What an attention backend is: causal attention of one layer over a batch whose keys and values lie in the pool.

By the time a backend runs, the batch's own keys and values are stored, so chunks and decodes alike read everything
from the cache: a chunk's row at position p sees positions 0..p (or the window's last part of them).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from executor.batches.batch_arrays import Step
from executor.kv_memory.pool import KVCache
from profiler.specs.model_spec import ModelSpec


class AttentionBackend(ABC):
    """One implementation, for one model.

    name: as given to --attention and as recorded. heads may be fewer than the spec's on a tensor-parallel rank.
    capturable: it reads a batch through `device_step` alone and never waits for the device: a CUDA graph may hold it.
    """

    name: str
    capturable: bool = False
    shares_graph_pool: bool = True
    """Whether graphs of one memory pool may hold it."""
    passed_over: str = ""
    """What `auto` tried before it, and why each was not taken."""

    @classmethod
    def forms(cls, device: torch.device) -> list[type[AttentionBackend]]:
        """The classes that stand behind the name on this device, best first."""
        return [cls]

    def __init__(self, spec: ModelSpec, *, heads: int | None = None) -> None:
        self.heads = spec.heads if heads is None else heads
        self.head_dim = spec.head_dim
        self.window = spec.sliding_window or 0
        self.scale = spec.head_dim**-0.5

    @classmethod
    @abstractmethod
    def why_not(cls, spec: ModelSpec, device: torch.device, kv_dtype: torch.dtype) -> str:
        """Empty if the backend can run this here, else the reason."""

    @classmethod
    def why_not_blocks(cls, block_size: int) -> str:
        """Empty if the backend reads blocks of so many tokens, else the reason."""
        return ""

    def warm(self, cache: KVCache, dtype: torch.dtype) -> None:  # noqa: B027 (most have nothing to compile)
        """Compile whatever batches over this pool may launch, for queries of this dtype."""

    def held(self) -> list[Tensor]:
        """Memory of its own that a captured graph goes on writing to."""
        return []

    @abstractmethod
    def attend(self, layer: int, q: Tensor, out: Tensor, step: Step, cache: KVCache) -> None:
        """Write attention of q into out, both [rows, heads * head_dim]; q may be a strided view of qkv.

        Dummy rows of `out` are left as they are.
        """
