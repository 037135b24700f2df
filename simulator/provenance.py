"""What a run folder says about itself: everything needed to run it again, and where its costs came from."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from policies import knobs_of
from policies.draft import UNLIMITED
from profiler import load_hardware, load_model_spec
from workloads import Trace

if TYPE_CHECKING:
    from simulator.simulation import Engine

PACKAGES = ("charioteer", "simpy", "numpy", "pandas", "pyarrow", "scikit-learn")


def run_config(trace: Trace, engine: Engine) -> dict[str, Any]:
    """config.json of a simulated run. `replay` holds the fields that `--config` reads back."""
    config = engine.config
    scheduler = engine.scheduler()
    policy = engine.policy
    knobs = {name: getattr(policy, name) for name in knobs_of(type(policy))}
    cost = engine.cost
    return {
        "world": "simulated",
        "policy": config.policy,
        "knobs": knobs,
        "model": str(config.model),
        "gpu": str(config.gpu),
        "cost_model": cost.name,
        "cost_kind": cost.kind,
        "calibrated": cost.calibrated,
        "cost_provenance": dict(cost.provenance()),
        "tp": config.tp,
        "pp": config.pp,
        "token_budget": _limit(scheduler.token_budget),
        "max_num_seqs": _limit(scheduler.max_num_seqs),
        "max_model_len": engine.max_model_len,
        "block_size": config.block_size,
        "num_blocks": engine.num_blocks,
        "watermark_blocks": scheduler.watermark_blocks,
        "slots": max(1, scheduler.ledger.slots // config.pp),
        "chunk_size": knobs.get("chunk_size"),
        "trace": trace_facts(trace),
        "replay": {**config.as_dict(), "knobs": dict(config.knobs)},
        "seed": config.seed,
        "versions": versions(),
        **work_facts(config.model, config.gpu, config.dtype, config.kv_dtype, config.tp, config.pp),
    }


def trace_facts(trace: Trace) -> dict[str, Any]:
    """Name, form and size of a trace, and what its reader had to say."""
    return {
        "name": trace.name,
        "format": trace.source_format,
        "requests": len(trace),
        "span_s": float(trace.arrival_ns[-1] - trace.arrival_ns[0]) / 1e9 if len(trace) else 0.0,
        "notes": list(trace.notes),
        "provenance": dict(trace.provenance),
    }


def work_facts(model: Any, gpu: Any, dtype: str, kv_dtype: str, tp: int, pp: int) -> dict[str, Any]:
    """Peak rates and the work of an iteration as coefficients, so that MFU and MBU follow from the folder alone."""
    from profiler.work import byte_coefficients, flop_coefficients, peaks

    spec, hardware = load_model_spec(model), load_hardware(gpu)
    if dtype == "auto":
        dtype = spec.dtype if spec.dtype in ("bfloat16", "float16") else "bfloat16"
    return {
        "peaks": peaks(spec, hardware, dtype, tp, pp),
        "model_flops": flop_coefficients(spec),
        "model_bytes": byte_coefficients(spec, dtype, kv_dtype),
    }


def versions() -> Mapping[str, str]:
    """Versions of Python and of the libraries that a result depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "source"
    return found


def _limit(value: int) -> int | None:
    return None if value >= UNLIMITED else value
