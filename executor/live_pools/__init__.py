"""Prompts in one process, answers in another: the live counterpart of the simulator's prefill and decode pools."""

from executor.live_pools.replay import PoolsRun, replay_pools

__all__ = ["PoolsRun", "replay_pools"]
