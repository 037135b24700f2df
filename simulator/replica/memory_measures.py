"""A config's memory measures, made for one replica: host memory to swap to, and the admission control."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from policies.kv_memory.swap import HostMemory, Swap, SwapCosts
from policies.scheduling.memory_counts import memory_counts
from policies.scheduling.overload_ladder import AdmissionControl, Ladder
from policies.work.batch import BatchShape
from profiler import load_hardware, load_model_spec
from profiler.compression_cost import PackedCost, prices_of
from profiler.specs.kv_compression import Compression
from profiler.specs.layer_split import split_layers
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.replica.host_link import HostLink

if TYPE_CHECKING:
    from policies.scheduling.scheduler import Scheduler
    from profiler.cost_model import CostModel
    from simulator.cluster.shared_kv_store import KVStore
    from simulator.replica.replica_kind import Engine

GIB, MIB = 2**30, 2**20


class ReplicaMemory:
    """Sizes and costs of one engine's swapping. block_bytes: KV of one block on all devices of a replica together;
    device_block_bytes: on the device that holds most of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config = config = engine.config
        self.ladder = Ladder.of_settings(config)
        model = load_model_spec(config.model)
        kv_dtype = kv_dtype_of(config)
        # What is swapped is mostly old: a thousand tokens stand for it.
        packed = compression_ratio(config, 1000 + config.kv_window)
        self.block_bytes = round(model.kv_bytes_per_token(kv_dtype) * config.block_size / packed)
        layers = max(config.layer_split) if config.layer_split else -(-model.layers // config.pp)
        per_token = model.kv_bytes_per_token(kv_dtype, engine.kv_devices // config.pp, layers=layers)
        self.device_block_bytes = round(per_token * config.block_size / packed)

    @property
    def swaps(self) -> bool:
        """Whether preempted requests may go to host memory."""
        if self.ladder is not None:
            return "offload" in self.ladder.rungs
        return self.config.preemption != "recompute"

    def link(self) -> HostLink:
        """A link between a device and its host."""
        bandwidth = self.config.swap_bandwidth or load_hardware(self.config.gpu).host_bandwidth
        if bandwidth is None:
            raise SimulationError(f"gpu {self.config.gpu}: its link to the host is not known; give --swap-bandwidth")
        return HostLink(bandwidth)

    def swap(self) -> Swap | None:
        if not self.swaps:
            return None
        config = self.config
        memory = HostMemory.of(round(config.swap_gib * GIB), self.block_bytes, round(config.swap_page_mib * MIB))
        link = self.link()
        # A ladder that offloads does it where it costs less, unless it was told otherwise.
        how = "auto" if config.preemption == "recompute" else config.preemption
        costs = SwapCosts(lambda blocks: link.time_ns(blocks * self.device_block_bytes), self.prefill_ns)
        return Swap(memory, how, costs)  # type: ignore[arg-type]

    def admission(self) -> AdmissionControl | None:
        if self.ladder is None:
            return None
        return AdmissionControl(self.ladder, self._first_rate)

    def prefill_ns(self, tokens: int) -> int:
        """Time to compute so many tokens again, in chunks as large as batches may be."""
        chunk = self._chunk
        total, done = 0, 0
        while done < tokens:
            size = min(chunk, tokens - done)
            total += self.engine.estimate_ns(BatchShape(((size, done),), sampled=int(done + size == tokens)))
            done += size
        return total

    @cached_property
    def _chunk(self) -> int:
        policy = self.engine.policy
        own = policy.largest_chunk()
        budget = self.config.token_budget or policy.default_token_budget(self.engine.max_model_len)
        return int(min(own or 8192, budget or 8192))

    @cached_property
    def _first_rate(self) -> float:
        """Prefill tokens per second of a batch of nothing else."""
        return self._chunk * 1e9 / self.engine.estimate_ns(BatchShape(((self._chunk, 0),)))


def compression_of(config: ReplayConfig) -> Compression | None:
    """What `kivi4` or `delta8` stands for; None for keys and values as they are."""
    if config.kv_compression is None:
        return None
    return Compression.parse(config.kv_compression, config.block_size, config.kv_window)


def compression_ratio(config: ReplayConfig, tokens: int) -> float:
    """How many times smaller the KV of a request with so many tokens is than in full; 1 without compression."""
    compression = compression_of(config)
    return 1.0 if compression is None else compression.ratio(load_model_spec(config.model), tokens, kv_dtype_of(config))


def packed_cost(config: ReplayConfig, cost: CostModel, tp: int) -> CostModel:
    """The cost model with the time of packing and of reading packed keys and values in it."""
    compression = compression_of(config)
    if compression is None or isinstance(cost, PackedCost):
        return cost
    model = load_model_spec(config.model)
    prices = prices_of(config.kv_compression_cost, compression, model, load_hardware(config.gpu), kv_dtype_of(config))
    if prices is None:
        return cost
    layers = config.layer_split or (split_layers(model.layers, cost.stages) if cost.stages > 1 else (model.layers,))
    return PackedCost(cost, compression, prices, model, layers, tp)


def stored_bytes_per_token(config: ReplayConfig) -> int:
    """KV bytes of a token that lies in a store or crosses a network: packed where keys and values are."""
    compression, model = compression_of(config), load_model_spec(config.model)
    if compression is not None:
        return round(compression.packed_bytes_per_token(model))
    return int(model.kv_bytes_per_token(kv_dtype_of(config)))


def check_memory(config: ReplayConfig) -> None:
    """SimulationError or PolicyError for memory settings that make no sense, whether or not they are used."""
    for flag, value in (("--swap-gib", config.swap_gib), ("--swap-page-mib", config.swap_page_mib)):
        if not 0 < value < float("inf"):
            raise SimulationError(f"{flag}: found {value:g}, expected above 0")
    if config.swap_bandwidth is not None and not 0 < config.swap_bandwidth < float("inf"):
        raise SimulationError(f"--swap-bandwidth: found {config.swap_bandwidth:g}, expected bytes per second above 0")
    if config.kv_store_gib is not None and not 0 < config.kv_store_gib < float("inf"):
        raise SimulationError(f"--kv-store-gib: found {config.kv_store_gib:g}, expected above 0")
    ladder = Ladder.of_settings(config)
    if ladder is not None and config.preemption != "recompute" and "offload" not in ladder.rungs:
        raise SimulationError(
            f"--preemption {config.preemption} beside --ladder {config.ladder}: expected the rung offload in it"
        )


def kv_dtype_of(config: ReplayConfig) -> str:
    """The dtype of keys and values in a run."""
    model, dtype = load_model_spec(config.model).served_as(config.dtype, config.weight_dtype)
    return model.kv_dtype(dtype, config.kv_dtype)


def memory_facts(
    schedulers: Iterable[tuple[Scheduler, int]], links: Collection[HostLink], store: KVStore | None
) -> dict[str, Any]:
    """What swapping, the trouble ladder and the shared store did in a cluster, as plain data (see `memory_counts`)."""
    facts = memory_counts(schedulers)
    if links:
        facts["swap_link_busy_s"] = sum(link.busy_ns for link in links) / 1e9
        facts["swap_link_wait_s"] = sum(link.waited_ns for link in links) / 1e9
    if store is not None:
        facts.update(store.facts())
    return facts
