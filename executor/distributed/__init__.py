"""Live pipelines and tensor parallelism: one process per rank, on PyTorch's distributed package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.distributed.sharded_replay import ShardedModel, load_sharded

__all__ = ["ShardedModel", "load_sharded"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    from executor.distributed import sharded_replay as replay

    return getattr(replay, name)
