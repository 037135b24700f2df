"""The summary of simulated runs against one that is worked out token by token and second by second, without tricks."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from metrics import RunTables, summarise
from simulator import replay
from workloads import Trace

NS = 1_000_000_000
SETTINGS: dict[str, dict[str, Any]] = {
    "preempting": {"policy": "vllm_v1", "num_blocks": 24},
    "padded": {"policy": "request_level", "max_batch_size": 4},
    "pipeline": {"policy": "orca", "pp": 4, "num_blocks": 120},
    "replicas": {"policy": "chunked", "chunk_size": 64, "replicas": 3, "failures": ("1@2",)},
    "pools": {
        "policy": "chunked",
        "pools": ({"role": "prefill", "replicas": 2}, {"role": "decode", "replicas": 1, "tp": 2}),
    },
    "cache": {"policy": "slo_aware", "prefix_caching": True, "num_blocks": 60},
}


def trace(requests: int = 40) -> Trace:
    rng = np.random.default_rng(5)
    output = rng.integers(1, 60, requests)
    return Trace(
        "oracle",
        np.sort(rng.integers(0, 6 * NS, requests)),
        rng.integers(1, 300, requests),
        output,
        output,
        prefix_hashes=[(int(row % 3),) for row in range(requests)],
        hash_tokens=64,
        slo=["chat" if row % 2 else "batch" for row in range(requests)],
    )


def by_hand(run: RunTables, warmup_s: float, bounds: dict[str, float]) -> dict[str, float]:
    """bounds: for P90 of TTFT, TBT and E2E, that each request has to meet."""
    requests = run.frame("requests").to_dict("records")
    times = {(t["replica"], t["cohort"], t["step"]): t["time_s"] for t in run.frame("tokens").to_dict("records")}
    tokens: dict[int, list[float]] = defaultdict(list)
    for part in run.frame("segments").to_dict("records"):
        for step in range(part["from_step"], part["to_step"]):
            tokens[part["request"]].append(times[part["replica"], part["cohort"], step])
    start = warmup_s or min(row["arrival_s"] for row in requests)
    end = max(row["finished_s"] for row in requests)
    measured = [row for row in requests if row["arrival_s"] >= start]
    finished = [row for row in measured if row["status"] == "finished"]
    gaps = {row["request"]: np.diff(tokens[row["request"]]) for row in requests}
    own = {
        "ttft": [row["first_token_s"] - row["arrival_s"] for row in finished],
        "tbt": [gap for row in finished for gap in gaps[row["request"]]],
        "tpot": [
            (row["finished_s"] - row["first_token_s"]) / (row["output_tokens"] - 1)
            for row in finished
            if row["output_tokens"] > 1
        ],
        "e2e": [row["finished_s"] - row["arrival_s"] for row in finished],
        "normalized_latency": [(row["finished_s"] - row["arrival_s"]) / row["output_tokens"] for row in finished],
        "scheduling_delay": [row["admitted_s"] - row["arrival_s"] for row in finished],
    }
    found: dict[str, float] = {}
    for name, values in own.items():
        found[f"{name}_s_mean"], found[f"{name}_s_max"] = float(np.mean(values)), float(np.max(values))
        found |= {f"{name}_s_p{q}": float(np.percentile(values, q)) for q in (50, 90, 95, 99)}
    good = sum(
        row["first_token_s"] - row["arrival_s"] <= bounds["ttft"]
        and (len(gaps[row["request"]]) == 0 or float(np.percentile(gaps[row["request"]], 90)) <= bounds["tbt"])
        and row["finished_s"] - row["arrival_s"] <= bounds["e2e"]
        for row in finished
    )
    window = end - start
    delivered = sum(at >= start for row in requests for at in tokens[row["request"]])
    prompts = sum(row["prompt_tokens"] for row in requests if row["first_token_s"] >= start)
    rates = [row["output_tokens"] / (row["finished_s"] - row["arrival_s"]) for row in finished]
    found |= {
        "measured": len(measured),
        "measured_finished": len(finished),
        "stalls": sum(gap > 0.2 for gap in own["tbt"]),
        "stall_s_total": sum(gap for gap in own["tbt"] if gap > 0.2),
        "stalled_requests": sum(bool((gaps[row["request"]] > 0.2).any()) for row in finished),
        "requests_per_s": sum(r["status"] == "finished" and r["finished_s"] >= start for r in requests) / window,
        "output_tokens_per_s": delivered / window,
        "total_tokens_per_s": (delivered + prompts) / window,
        "slo_attainment": good / len(measured),
        "goodput_requests_per_s": good / window,
        "fairness_jain": sum(rates) ** 2 / len(rates) / sum(rate**2 for rate in rates),
        "preemptions": sum(row["preemptions"] for row in measured),
        "prompt_tokens": sum(row["prompt_tokens"] for row in measured),
        "cached_tokens": sum(row["cached_tokens"] for row in measured),
        **_iterations(run, start, end),
    }
    return found


def _iterations(run: RunTables, start: float, end: float) -> dict[str, float]:
    rows = [row for row in run.frame("iterations").to_dict("records") if row["end_s"] > start]
    plans = defaultdict(list)
    for row in run.frame("iterations").to_dict("records"):
        plans[row["replica"]].append((row["iteration"], row["planned_s"]))
    # Until the next plan, which may follow at the same moment where planning runs ahead.
    held = [
        min([row["end_s"], *(at for number, at in plans[row["replica"]] if number > row["iteration"])])
        - row["planned_s"]
        for row in rows
    ]
    pools, lives = run.config["pools"], run.config["cluster"]["lives"]
    there = sum(
        pools[life["pool"]]["pp"]
        * max(0.0, (end if life["down_s"] is None else min(life["down_s"], end)) - max(life["ordered_s"], start))
        for life in lives
    )
    useful = sum(row["chunk_tokens"] + row["decodes"] for row in rows)
    found = {
        "iterations": len(rows),
        "tokens_per_iteration": useful / len(rows),
        "chunk_tokens_total": sum(row["chunk_tokens"] for row in rows),
        "dummy_share": sum(row["dummy_tokens"] for row in rows) / sum([useful, *(row["dummy_tokens"] for row in rows)]),
        "iteration_s_p90": float(np.percentile([row["end_s"] - row["start_s"] for row in rows], 90)),
        "running_mean": float(np.average([row["running"] for row in rows], weights=held)),
        "waiting_max": max(row["waiting"] for row in rows),
        "device_busy_share": sum(
            max(0.0, row["end_s"] - max(row["start_s"], start)) for row in run.frame("stages").to_dict("records")
        )
        / there,
    }
    if blocks := run.config.get("num_blocks"):
        found["kv_use_mean"] = float(np.average([1 - row["free_blocks"] / blocks for row in rows], weights=held))
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_every_number_is_what_a_slow_count_finds(name: str) -> None:
    run = replay(trace(), model="llama-3.1-8b", gpu="a100", cost_model="roofline", **SETTINGS[name]).tables
    told = summarise(run)
    bounds = {metric: told[f"{metric}_s_p90"] * 0.999 for metric in ("ttft", "tbt", "e2e")}
    slo = ",".join(f"{metric}_p90={bound:.17g}" for metric, bound in bounds.items())
    for warmup_s in (0.0, 2.5):
        summary = summarise(run, warmup=f"{warmup_s}s", slo=slo)
        for key, value in by_hand(run, warmup_s, bounds).items():
            assert math.isclose(summary[key], value, rel_tol=1e-9, abs_tol=1e-9), (key, summary[key], value, warmup_s)
        assert 0 < summary["slo_attainment"] < 1
