"""Which replicas a run has: one pool of equal ones, or several of different kinds and roles.

A pool is written as a table, or as text for a flag: `role=decode,replicas=2,gpu=h200,tp=2,policy=vllm_v1`. What it does
not say it takes from the run's config; a key that is no field of the engine has to be a knob of the pool's policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from policies.edges.settings import shown
from profiler.cost_model import CostModel
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.replica.replica_kind import Engine, make_engine
from simulator.routers import router_class
from workloads import Trace

ROLES = ("serve", "prefill", "decode")
ENGINE_FIELDS: Mapping[str, type] = {
    "policy": str,
    "gpu": str,
    "cost_model": str,
    "tp": int,
    "pp": int,
    "dp": int,
    "ep": bool,
    "pp_link": str,
    "chase_chunks": bool,
    "pp_overlap": bool,
    "token_budget": int,
    "max_num_seqs": int,
    "num_blocks": int,
    "gpu_memory_utilization": float,
    "watermark": float,
}
"""What a pool may have of its own, beside layer_split, afd and its policy's knobs. Model and dtypes are the run's."""


@dataclass(frozen=True)
class Pool:
    """Equal replicas. role: serve (whole requests), prefill (up to the first token) or decode (from then on)."""

    role: str
    replicas: int
    engine: Engine

    @property
    def devices(self) -> int:
        return self.replicas * self.engine.devices


@dataclass(frozen=True)
class ClusterPlan:
    """The pools of a run, and the config they came from."""

    config: ReplayConfig
    pools: tuple[Pool, ...]

    @classmethod
    def of(cls, engine: Engine) -> ClusterPlan:
        """As many equal replicas as the engine's config says."""
        return cls(engine.config, (Pool("serve", engine.config.replicas, engine),))

    @property
    def engine(self) -> Engine:
        """The first pool's engine: what a run of one kind is described by."""
        return self.pools[0].engine

    @property
    def devices(self) -> int:
        return sum(pool.devices for pool in self.pools)

    def drawn(self, seed: int) -> ClusterPlan:
        """The same pools with costs drawn from their cost models' own errors (`Engine.drawn`)."""
        return replace(self, pools=tuple(replace(pool, engine=pool.engine.drawn(seed)) for pool in self.pools))


def make_cluster_plan(config: ReplayConfig, trace: Trace, cost: CostModel | None = None) -> ClusterPlan:
    """Resolve every name of a config: pools, engines, router. `cost` overrides the cost model of every pool.

    Raises SimulationError, PolicyError or ProfileError for whatever does not exist or fit together.
    """
    if not config.pools:
        return ClusterPlan.of(make_engine(config, trace, cost))
    if config.replicas != 1:
        raise SimulationError("--replicas beside --pool: found both, expected replicas= inside each pool")
    pools = tuple(_pool(config, table, number, trace, cost) for number, table in enumerate(config.pools))
    roles = {pool.role for pool in pools}
    for one, other in (("prefill", "decode"), ("decode", "prefill")):
        if one in roles and other not in roles:
            raise SimulationError(f"--pool: found a {one} pool without a {other} pool")
    return ClusterPlan(config, pools)


def looks_for_prefixes(plan: ClusterPlan) -> bool:
    """Whether anything in the cluster asks which prompts begin alike: a cache, a shared store, a router."""
    config = plan.config
    caches = any(
        pool.engine.config.prefix_caching or getattr(pool.engine.policy, "prefix_caching", False) for pool in plan.pools
    )
    routers = [config.router, config.decode_router]
    if any(pool.engine.ranks > 1 for pool in plan.pools):
        routers.append(config.rank_router)
    routes = any(router_class(name).routes_by == "prefix_hashes" for name in routers)
    return caches or routes or config.kv_store_gib is not None


def parse_pool(text: str) -> dict[str, Any]:
    """`role=prefill,replicas=2,gpu=h100,layer_split=16+16` as a table; values become numbers where they have to be."""
    table: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not key or not value:
            raise SimulationError(f"--pool: found {shown(part.strip())}, expected key=value pairs separated by commas")
        if key in ROLES:
            raise SimulationError(f"--pool: found {shown(part.strip())}, expected role={key}, beside replicas=N")
        key = key.replace("-", "_")
        table[key] = value.split("+") if key == "layer_split" else value
    return table


def _pool(config: ReplayConfig, table: Mapping[str, Any], number: int, trace: Trace, cost: CostModel | None) -> Pool:
    rest = {key.replace("-", "_"): value for key, value in table.items()}
    role = rest.pop("role", "serve")
    if role not in ROLES:
        raise SimulationError(f"--pool {number}: found role {shown(role)}, expected one of {', '.join(ROLES)}")
    replicas = _as(int, "replicas", rest.pop("replicas", 1), number)
    if replicas < 1:
        raise SimulationError(f"--pool {number}: found {replicas} replicas, expected at least 1")
    own: dict[str, Any] = {
        key: _as(ENGINE_FIELDS[key], key, rest.pop(key), number) for key in list(rest) if key in ENGINE_FIELDS
    }
    if "layer_split" in rest:
        own["layer_split"] = tuple(_as(int, "layer_split", layers, number) for layers in rest.pop("layer_split"))
    elif own.get("pp", config.pp) != config.pp:
        own["layer_split"] = None
    if "afd" in rest:
        own["afd"] = _afd(rest.pop("afd"), number)
    knobs = {**rest.pop("knobs", {}), **rest}
    if "policy" not in own:
        knobs = {**config.knobs, **knobs}
    return Pool(role, replicas, make_engine(replace(config, pools=(), knobs=knobs, **own), trace, cost))


def _afd(value: Any, number: int) -> Mapping[str, Any]:
    """A table, or `attention:4+ffn:4` in a pool's text."""
    if isinstance(value, Mapping):
        return value
    pairs = [part.partition(":") for part in str(value).split("+")]
    if not all(colon for _, colon, _ in pairs):
        raise SimulationError(f"--pool {number}, afd: found {shown(value)}, expected attention:4+ffn:4")
    return {key: text for key, _, text in pairs}


def _as(kind: type, key: str, value: Any, number: int) -> Any:
    try:
        if kind is bool:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[str(value).lower()]
        return kind(value)
    except (TypeError, ValueError, KeyError):
        raise SimulationError(f"--pool {number}, {key}: found {shown(value)}, expected {kind.__name__}") from None
