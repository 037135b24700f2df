"""What every rank does with a batch: take its hidden states, run its layers, hand on, and note when.

The same on all ranks. The compute thread runs batches in the order in which they were planned; on stages after the
first a receiving thread has fetched their hidden states meanwhile.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from executor.attention import make_attention
from executor.distributed.graphed_stage import GraphedStage, stage_graphs_for
from executor.distributed.layout import Layout, Shard
from executor.distributed.links import HiddenStates
from executor.distributed.plans import Plan
from executor.distributed.shard_weights import shard_weights
from executor.distributed.stage_model import StageModel
from executor.errors import ExecutorError
from executor.kernels import make_kernels
from executor.kv_memory.pool import KVCache
from executor.model.loading import Loaded, find_model, pick_device, torch_dtype, use_device

SWITCH_S = 2e-4
"""How long one thread of a rank may keep another one from the interpreter: a result has to be noticed, and a batch
handed on, while the model computes."""
COLUMNS = 7
"""Of a rank's log: batch, input is there, start, end (ns of this rank's clock), CPU time (ns), experts touched by the
batch in all layers together, layers with experts that it ran through."""


class Ready(NamedTuple):
    """A batch whose input is there. at_ns: since when; slot, hidden: its buffer (None on the first stage)."""

    plan: Plan
    at_ns: int
    slot: int = 0
    hidden: Tensor | None = None


class Ran(NamedTuple):
    """What a rank makes of a batch. ids: on the last stage, sampled tokens."""

    number: int
    ids: list[int] | None
    end_ns: int


@dataclass(frozen=True)
class ShardOrder:
    """What a rank needs to know to load its shard, as plain data: the fields of `LiveConfig` of the same names."""

    model: str
    tp: int
    pp: int
    layer_split: tuple[int, ...] | None
    device: str
    dtype: str
    kv_dtype: str
    kernels: str
    attention: str
    seed: int
    max_tokens: int
    trim_last_layer: bool
    block_size: int
    threads: int
    graphs: str = "auto"

    @classmethod
    def of(cls, values: dict[str, Any]) -> ShardOrder:
        split = values["layer_split"]
        return cls(**{**values, "layer_split": None if split is None else tuple(split)})


def load_shard(order: ShardOrder, layout: Layout, rank: int, local_rank: int, group: Any) -> Loaded:
    """The part of the model that this rank holds. group: the ranks of its stage (None for a single one)."""
    torch.set_num_threads(order.threads)
    source = find_model(order.model)
    shard = Shard(source.spec, layout, rank)
    device = pick_device(order.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
    device = use_device(device)
    dtype = order.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else source.spec.dtype
    weight_dtype = torch_dtype(dtype)
    pool_dtype = weight_dtype if order.kv_dtype == "auto" else torch_dtype(order.kv_dtype, "kv_dtype")
    kernels = make_kernels(order.kernels, device, weight_dtype, pool_dtype, with_experts=shard.whole.experts > 0)
    attention = make_attention(
        order.attention, shard.spec, device, pool_dtype, kernels.activation_dtype, block_size=order.block_size
    )
    weights = shard_weights(source, shard, order.seed, weight_dtype, device)
    model = StageModel(
        shard, weights, kernels, attention, order.max_tokens, group, trim_last_layer=order.trim_last_layer
    )
    return Loaded(model, source, device, weight_dtype, pool_dtype, order.seed, order.max_tokens, order.graphs)


class StageWorker:
    """One rank's model, pool and log. waiting: batches whose input is there, for the compute thread."""

    def __init__(self, loaded: Loaded, layout: Layout, rank: int) -> None:
        assert isinstance(loaded.model, StageModel)
        self.loaded, self.layout, self.rank = loaded, layout, rank
        self.model: StageModel = loaded.model
        self.shard = self.model.shard
        kernels = self.model.kernels
        self.hidden = HiddenStates(layout, rank, self.shard.whole.hidden, kernels.activation_dtype, loaded.device)
        self.cache: KVCache | None = None
        self.graphs: GraphedStage | None = None
        self.log: array[int] = array("q")

    def new_cache(self, blocks: int, block_size: int, fill_seed: int | None = None) -> KVCache:
        """The pool of a run, the old one dropped. fill_seed: small random numbers in it (to measure with)."""
        self.cache = self.graphs = None
        self.cache = self.loaded.new_cache(blocks, block_size)
        group = self.model.group
        self.graphs = stage_graphs_for(self.loaded, self.cache, group is None or dist.get_backend(group) == "nccl")
        if fill_seed is not None:
            generator = torch.Generator(device=self.loaded.device).manual_seed(fill_seed)
            self.cache.pool.normal_(0.0, 0.5, generator=generator)
        self.log = array("q")
        return self.cache

    def fetch(self, plan: Plan) -> Ready:
        """Wait for a planned batch's input."""
        if self.shard.is_first:
            return Ready(plan, time.perf_counter_ns())
        slot, hidden = self.hidden.receive(plan.step.rows)
        return Ready(plan, time.perf_counter_ns(), slot, hidden)

    @torch.inference_mode()
    def run(self, ready: Ready, waited: bool) -> Ran:
        """Run the stage. waited: the compute thread had nothing to do until the input came, so handing it over between
        threads belongs to its way here, not to a queue."""
        if self.cache is None:
            raise ExecutorError("found a batch before a KV pool was made")
        start = time.perf_counter_ns()
        cpu = time.thread_time_ns()
        plan, step, model = ready.plan, ready.plan.step, self.model
        if plan.poison:
            self.cache.poison(plan.poison)
        slot, hidden = ready.slot, ready.hidden
        first = hidden is None
        if hidden is None:
            slot, hidden = self.hidden.buffer(step.rows)
        ids: list[int] | None = None
        sizes = None if self.graphs is None or plan.sampling is not None else self.graphs.fits(step)
        if self.graphs is not None and sizes is not None:
            given = step.tensor(step.token_ids) if first else hidden
            sampled = self.graphs.run(given, step, hidden, sizes)
            ids = None if sampled is None else sampled[: len(plan.positions)].tolist()
        else:
            if first:
                model.kernels.begin()
                model.embed(step.tensor(step.token_ids), hidden)
            out = model.run_layers(hidden, step, self.cache)
            if self.shard.is_last:
                ids = model.sample(out, plan.sampling, plan.positions).tolist() if len(plan.positions) else []
        if self.loaded.device.type == "cuda":
            torch.cuda.current_stream(self.loaded.device).synchronize()
        end = time.perf_counter_ns()
        if not self.shard.is_last:
            self.hidden.send(slot, hidden)
        if plan.recorded:
            arrived = start if waited else ready.at_ns
            touched, layers = model.routing.touched()
            self.log.extend((plan.number, arrived, start, end, time.thread_time_ns() - cpu, touched, layers))
        return Ran(plan.number, ids, end)

    def take_log(self) -> NDArray[np.int64]:
        """[batches, COLUMNS] since the last call."""
        found = np.array(self.log, dtype=np.int64).reshape(-1, COLUMNS)
        self.log = array("q")
        return found


def next_ready(queue: SimpleQueue[Any]) -> tuple[Any, bool]:
    """The next item of a queue, and whether it came after one began to wait for it."""
    began = time.perf_counter_ns()
    item = queue.get()
    return item, isinstance(item, Ready) and item.at_ns >= began


def stage_group(layout: Layout, rank: int) -> Any:
    """The process group of this rank's stage: made by all ranks, in the same order; None for a single rank."""
    own = None
    for stage in range(layout.pp):
        if layout.tp > 1:
            group = dist.new_group(layout.ranks_of(stage))
            if layout.stage_of(rank) == stage:
                own = group
    return own
