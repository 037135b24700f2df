"""What a run folder says about itself: everything needed to run it again, and where its costs came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from metrics.run_folder.folder import versions_of
from policies import knobs_of
from policies.contract.draft import UNLIMITED
from policies.edges.input_digests import digests_of
from profiler import load_hardware, load_model_spec
from profiler.evidence import Evidence, evidence_of
from profiler.specs.number_format import FORMATS
from profiler.specs.shape_columns import ShapeColumns
from simulator.replica.attention_ffn_apart import make_apart
from workloads import Trace

if TYPE_CHECKING:
    from metrics import RunTables
    from simulator.cluster.pools import ClusterPlan
    from simulator.replica.replica_kind import Engine

PACKAGES = ("charioteer", "simpy", "numpy", "pandas", "pyarrow", "scikit-learn")


MOST_WEIGHED = 20_000
"""Iterations that a run's evidence is told from: evenly spaced ones of a longer run."""


def run_config(
    trace: Trace, plan: ClusterPlan, cluster: Mapping[str, Any], tables: RunTables | None = None
) -> dict[str, Any]:
    """config.json of a simulated run. `replay` holds the fields that `--config` reads back.

    tables: its iterations tell what share of the time comes from measured operators; None: there are none yet.
    cluster: what became of it (`Cluster.facts`). Where pools differ, a fact of theirs is given only in `pools`; names
    are joined.
    """
    config = plan.config
    pools = [_engine_facts(pool.engine) for pool in plan.pools]
    facts = {key: _shared(key, [pool[key] for pool in pools]) for key in pools[0]}
    rows = [{"role": pool.role, "replicas": pool.replicas, **row} for pool, row in zip(plan.pools, pools)]
    engine = plan.engine.config
    width = engine.tp, engine.pp, config.weight_dtype
    work = work_facts(config.model, engine.gpu, config.dtype, config.kv_dtype, *width)
    work["peaks"] = _mean_peaks(plan, config.dtype)
    return {
        "world": "simulated",
        "model": str(config.model),
        **facts,
        "router": config.router if plan.config.pools or config.replicas > 1 else None,
        "rank_router": config.rank_router if any(pool.engine.ranks > 1 for pool in plan.pools) else None,
        "cost_evidence": cost_evidence(plan, cluster, tables).as_dict() if tables is not None else None,
        "pools": rows,
        "cluster": dict(cluster),
        "memory": dict(cluster.get("memory") or {}),
        "trace": trace.facts(),
        "inputs": digests_of(config.as_dict()),
        "replay": {**config.as_dict(), "knobs": dict(config.knobs)},
        "seed": config.seed,
        "versions": versions_of(PACKAGES),
        **work,
    }


def cost_evidence(plan: ClusterPlan, cluster: Mapping[str, Any], tables: RunTables) -> Evidence:
    """What the predicted time of a run rests on, iteration by iteration."""
    iterations = tables.iterations
    every = -(-iterations.num_rows // MOST_WEIGHED)
    if every > 1:
        iterations = iterations.take(np.arange(0, iterations.num_rows, every))
    replica = iterations.column("replica").to_numpy()
    pool_of = {life["replica"]: life["pool"] for life in cluster.get("lives") or ()}
    pools = np.array([pool_of.get(number, 0) for number in range(int(replica.max(initial=0)) + 1)])[replica]
    weighed = []
    for number, pool in enumerate(plan.pools):
        own = np.flatnonzero(pools == number)
        if len(own):
            weighed.append((pool.engine.cost, ShapeColumns.of_iterations(iterations.take(own)), np.ones(len(own))))
    return evidence_of(weighed or [(pool.engine.cost, [], []) for pool in plan.pools])


def _engine_facts(engine: Engine) -> dict[str, Any]:
    """What the replicas of one pool are."""
    config, cost, policy = engine.config, engine.cost, engine.policy
    scheduler = engine.scheduler()
    knobs = {name: getattr(policy, name) for name in knobs_of(type(policy))}
    return {
        "policy": config.policy,
        "knobs": knobs,
        "gpu": str(config.gpu),
        "cost_model": cost.name,
        "cost_kind": cost.kind,
        "calibrated": cost.calibrated,
        "cost_provenance": dict(cost.provenance()),
        "engine": engine.named.facts(),
        "tp": config.tp,
        "pp": config.pp,
        "dp": config.dp,
        "ep": config.ep,
        "ranks_step_together": engine.together,
        "ahead": engine.ahead,
        "devices_per_replica": engine.devices,
        "token_budget": _limit(scheduler.token_budget),
        "max_num_seqs": _limit(scheduler.max_num_seqs),
        "max_model_len": engine.max_model_len,
        "block_size": config.block_size,
        "num_blocks": engine.num_blocks,
        "watermark_blocks": scheduler.watermark_blocks,
        "slots": max(1, scheduler.ledger.slots // config.pp),
        "chunk_size": knobs.get("chunk_size"),
    }


def _shared(key: str, values: list[Any]) -> Any:
    """One value for all pools: their common one, names joined, `calibrated` only if all are; else None."""
    if all(value == values[0] for value in values):
        return values[0]
    if key == "calibrated":
        return all(values)
    return " + ".join(dict.fromkeys(values)) if isinstance(values[0], str) else None


def _mean_peaks(plan: ClusterPlan, dtype: str) -> dict[str, float]:
    """Peak rates per device, averaged over all devices of the cluster, so that rate x devices is the cluster's."""
    of_gpu: dict[str, int] = {}
    for pool in plan.pools:
        config = pool.engine.config
        apart = make_apart(config.afd) if config.afd else None
        elsewhere = apart.ffn * pool.replicas if apart is not None and apart.ffn_gpu else 0
        for gpu, count in ((config.gpu, pool.devices - elsewhere), (apart.ffn_gpu if apart else "", elsewhere)):
            if count:
                of_gpu[gpu] = of_gpu.get(gpu, 0) + count
    each = {
        gpu: work_facts(plan.config.model, gpu, dtype, "auto", 1, 1, plan.config.weight_dtype)["peaks"]
        for gpu in of_gpu
    }
    return {
        **{
            name: sum(each[gpu][name] * count for gpu, count in of_gpu.items()) / plan.devices
            for name in ("peak_flops", "peak_bytes_per_s")
        },
        "devices": plan.devices,
    }


def work_facts(
    model: Any, gpu: Any, dtype: str, kv_dtype: str, tp: int, pp: int, weight_dtype: str = "auto"
) -> dict[str, Any]:
    """Peak rates and the work of an iteration as coefficients, so that MFU and MBU follow from the folder alone."""
    from profiler.specs.useful_work import byte_coefficients, flop_coefficients, peaks

    hardware = load_hardware(gpu)
    spec, dtype = load_model_spec(model).served_as(dtype, weight_dtype)
    rate = FORMATS[spec.weight_format].products if spec.weight_format else ""
    known = rate in hardware.peak_flops and spec.quantised == "blocks"
    return {
        "peaks": peaks(spec, hardware, rate if known else dtype, tp, pp),
        "model_flops": flop_coefficients(spec),
        "model_bytes": byte_coefficients(spec, dtype, kv_dtype),
    }


def _limit(value: int) -> int | None:
    return None if value >= UNLIMITED else value
