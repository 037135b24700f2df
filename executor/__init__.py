"""Real time: a PyTorch model with a paged KV cache, driven by the scheduler and policies that the simulator uses.

Names below load on first use, so that importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "ExecutorError": "errors",
    "GREEDY": "model.sampler",
    "KVCache": "kv_memory.pool",
    "Loaded": "model.loading",
    "Model": "model.model",
    "Sampling": "model.sampler",
    "Step": "batches.batch_arrays",
    "load_model": "model.loading",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"executor.{_HOME[name]}"), name)
