"""A stand-in for a CUDA graph on the CPU: it records every tensor operation of a pass, with its memory, and replays them.

As on a GPU, a replay runs the recorded operations on the recorded memory and nothing of the Python around them; reading
a value back, or a shape that depends on values, is an error while it records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal.")


class _Recorder(TorchDispatchMode):
    def __init__(self, operations: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self.operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(word in str(func) for word in FORBIDDEN):
            raise RuntimeError(f"not permitted while a stream is capturing: {func}")
        if "index" in str(func):
            masks = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.dtype == torch.bool]
            assert not masks or "masked_fill" in str(func), (
                f"{func}: a boolean index has a shape that depends on values"
            )
        result = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, result))
        return result


class RecordedGraph:
    """Has what `executor.model.cuda_graphs.Capture` asks for."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        with _Recorder(self.operations):
            return run()

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, result in self.operations:
            inputs = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again)):
                # Views and in-place results lie in recorded memory already; new memory is copied back to it.
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in inputs:
                    old.copy_(new)
