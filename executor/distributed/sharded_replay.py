"""Load a model over ranks and replay a trace with it: what `executor.serving.replay` does for `--tp` or `--pp` above
1.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from executor.batches.batch_arrays import Step
from executor.config import LiveConfig
from executor.distributed.clocks import Offset
from executor.distributed.layout import Layout
from executor.distributed.plans import step_bytes
from executor.distributed.ranks import Ranks
from executor.distributed.sharded_engine import PlanningRunner, ShardedEngine
from executor.distributed.stage_worker import ShardOrder
from executor.errors import ExecutorError
from executor.model.loading import Loaded, find_model
from executor.serving.live_engine import LiveEngine
from executor.serving.memory_measures import MeasuredCosts
from executor.serving.replay import OneRank
from executor.serving.runner import Runner
from policies import Scheduler, make_policy

_NOT_YET = (
    ("kv_compression", None, "--kv-compression"),
    ("ladder", None, "--ladder"),
    ("preemption", "recompute", "--preemption"),
)


@dataclass(eq=False)
class ShardedModel(Loaded):
    """Rank 0's part of a model, and all ranks. A context manager: leaving it ends the other ranks."""

    ranks: Ranks | None = None
    is_sharded: ClassVar[bool] = True

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the memory that a rank may take: a device of its own, or a share of what all ranks of a CPU have."""
        assert self.ranks is not None
        most: int = max(told["kv_bytes_per_token"] for told in self.ranks.facts)
        return most * (self.ranks.local_ranks if self.device.type == "cpu" else 1)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        assert self.ranks is not None
        self.ranks.__exit__(kind, error, trace)


def check_sharded(config: LiveConfig) -> None:
    """Raise ExecutorError for what does not go together with several ranks."""
    for name, plain, flag in _NOT_YET:
        if getattr(config, name) != plain:
            raise ExecutorError(f"{flag} with --tp {config.tp} --pp {config.pp}: not with several ranks; leave it out")
    if config.ahead:
        raise ExecutorError(f"--async with --tp {config.tp} --pp {config.pp}: not with several ranks; leave it out")
    if getattr(make_policy(config.policy, config.knobs), "async_scheduling", False):
        raise ExecutorError(f"async_scheduling with --tp {config.tp} --pp {config.pp}: not with several ranks")
    if config.graphs == "on" and config.device == "cpu":
        raise ExecutorError("--graphs on: CUDA graphs need a CUDA device, the device is cpu")


def load_sharded(config: LiveConfig, longest: int, ranks: Ranks | None = None) -> ShardedModel:
    """Start the ranks (or join those that torchrun started) and load the config's model on all of them.

    ranks: of an earlier model with the same layout, which is then dropped.
    """
    check_sharded(config)
    spec = find_model(config.model).spec
    layout = Layout.of(spec, config.tp, config.pp, config.layer_split)
    if ranks is None:
        ranks = Ranks(layout, config.device)
    try:
        threads = config.threads or max(1, (os.cpu_count() or 1) // ranks.local_ranks)
        order = ShardOrder(
            config.model,
            config.tp,
            config.pp,
            layout.split,
            config.device,
            config.dtype,
            config.kv_dtype,
            config.kernels,
            config.attention,
            config.seed,
            min(longest, spec.max_position),
            config.trim_last_layer,
            config.block_size,
            threads,
            config.graphs,
        )
        loaded = ranks.load(order)
        _warm_up(ranks, config.block_size)
    except BaseException:
        ranks.close(kill=True)
        raise
    names = ("model", "source", "device", "dtype", "kv_dtype", "seed", "max_tokens", "graphs")
    return ShardedModel(**{name: getattr(loaded, name) for name in names}, ranks=ranks)


def _warm_up(ranks: Ranks, block_size: int) -> None:
    """First use of kernels, buffers, threads and connections, so that the first request does not pay for them."""
    ranks.new_pools(4, block_size)
    for rows in (64, 1, 1):
        run_steps(ranks, [_empty_step(rows)], block_size)


def _empty_step(rows: int) -> Step:
    """A chunk of token 0 that is stored nowhere and samples once."""
    zero, none = np.zeros(1, np.int32), np.empty(0, np.int32)
    return Step(
        rows=rows,
        token_ids=np.zeros(rows, np.int64),
        positions=np.zeros(rows, np.int32),
        slots=np.full(rows, -1, np.int64),
        tables=zero[None],
        chunk_row=none,
        chunk_tokens=none,
        chunk_prefix=none,
        chunk_table=none,
        decode_row=none,
        decode_context=none,
        decode_table=none,
        sampled_rows=none,
        sampled_table=none,
    )


def run_steps(ranks: Ranks, steps: list[Step], block_size: int, *, first_number: int = -1) -> None:
    """Run steps through the stages, as many at a time as there are stages. A negative number is recorded nowhere."""
    flying = 0
    for at, step in enumerate(steps):
        if flying == ranks.layout.pp:
            _wait_for_one(ranks)
            flying -= 1
        ranks.submit(step_bytes(first_number + at if first_number >= 0 else -1, step, block_size))
        flying += 1
    for _ in range(flying):
        _wait_for_one(ranks)


def _wait_for_one(ranks: Ranks) -> None:
    while ranks.result(None) is None:
        pass


class ManyRanks(OneRank):
    """A model on several ranks, as `replay_live` sees it."""

    loaded: ShardedModel

    def __init__(self, loaded: Loaded) -> None:
        assert isinstance(loaded, ShardedModel)
        assert loaded.ranks is not None
        super().__init__(loaded)
        self.ranks = loaded.ranks
        self._pool_bytes = 0
        self._before: list[Offset] = []

    def make_runner(
        self, config: LiveConfig, scheduler: Scheduler, longest: int, rows: int, most_tokens: int
    ) -> Runner:
        check_sharded(config)
        self._pool_bytes = self.ranks.new_pools(scheduler.ledger.total_blocks, config.block_size)
        assert self.ranks.stage is not None
        assert self.ranks.stage.cache is not None
        cache = self.ranks.stage.cache
        return PlanningRunner(self.loaded, cache, scheduler.ledger, longest, rows=rows, poison=config.poison)

    def make_engine(self, *arguments: Any, **options: Any) -> LiveEngine:
        return ShardedEngine(self.ranks, *arguments, **options)

    def make_ready(self, runner: Runner, scheduler: Scheduler, costs: MeasuredCosts) -> None:
        self._before = self.ranks.offsets()

    def after(self, engine: LiveEngine) -> dict[str, Any]:
        """Gather every rank's times and write the records."""
        assert isinstance(engine, ShardedEngine)
        clocks = self.ranks.clocks(self._before, self.ranks.offsets())
        engine.write_records(self.ranks.logs(), clocks)
        layout = self.ranks.layout
        return {
            "tp": layout.tp,
            "pp": layout.pp,
            "layer_split": list(layout.split),
            "kv_pool_bytes": self._pool_bytes,
            "clocks": [clock.as_dict() for clock in clocks],
            "ranks": [{"rank": rank, **told} for rank, told in enumerate(self.ranks.facts)],
        }
