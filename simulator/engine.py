"""What the replicas of one kind share: policy, cost model, KV pool and limits, resolved from a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies import Policy, Scheduler, make_policy, make_scheduler
from profiler import load_cost_model, load_hardware, load_model_spec
from profiler.capacity import plan_memory
from profiler.cost_model import CostModel
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from workloads import Trace


@dataclass(frozen=True)
class Engine:
    """What every replica of a run shares: the policy, its costs and its limits."""

    policy: Policy
    cost: CostModel
    num_blocks: int
    max_model_len: int
    config: ReplayConfig

    @property
    def devices(self) -> int:
        """Devices of one replica."""
        return self.config.tp * self.config.pp

    def scheduler(self) -> Scheduler:
        """A fresh scheduler for one replica."""
        config = self.config
        return make_scheduler(
            self.policy,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            max_model_len=self.max_model_len,
            token_budget=config.token_budget,
            max_num_seqs=config.max_num_seqs,
            watermark=config.watermark,
            micro_batches=config.pp,
            chase_chunks=config.chase_chunks,
            tile=self.cost.tile,
            estimator=self.estimate_ns,
        )

    def estimate_ns(self, shape: Any) -> int:
        """Predicted duration of one iteration, for policies that plan by time."""
        cost = self.cost
        before, after = cost.host_ns(shape)
        return before + after + sum([cost.stage_ns(shape, s) + cost.send_ns(shape, s) for s in range(cost.stages)])


def make_engine(config: ReplayConfig, trace: Trace, cost: CostModel | None = None) -> Engine:
    """Resolve a config's names into a policy, a cost model and a KV pool. `cost` overrides the config's cost model."""
    policy = make_policy(config.policy, config.knobs)
    if config.pp > 1 and getattr(policy, "async_scheduling", False):
        raise SimulationError(
            f"--async with --pp {config.pp}: a pipeline plans ahead already, one micro-batch a stage; leave --async out"
        )
    longest = int((trace.prompt_tokens + trace.max_output_tokens).max()) if len(trace) else 1
    max_model_len = config.max_model_len or longest
    model, gpu = load_model_spec(config.model), load_hardware(config.gpu)
    if cost is None:
        cost = load_cost_model(
            model, gpu, cost_model=config.cost_model, dtype=config.dtype, kv_dtype=config.kv_dtype, tp=config.tp,
            pp=config.pp, layer_split=config.layer_split,
        )  # fmt: skip
    num_blocks = config.num_blocks
    if num_blocks is None:
        rule = policy.memory
        memory: dict[str, Any] = {"utilisation": rule.utilisation}
        if rule.headroom:
            memory = {"headroom": rule.headroom}
        if config.gpu_memory_utilization is not None:
            memory = {"utilisation": config.gpu_memory_utilization}
        num_blocks = plan_memory(
            model, gpu, dtype=_dtype(config.dtype, model), kv_dtype=config.kv_dtype, tp=config.tp, pp=config.pp,
            layer_split=config.layer_split, block_size=config.block_size, **memory,
        ).num_blocks  # fmt: skip
    return Engine(policy, cost, num_blocks, max_model_len, config)


def _dtype(dtype: str, model: Any) -> str:
    if dtype != "auto":
        return dtype
    return model.dtype if model.dtype in ("bfloat16", "float16") else "bfloat16"
