"""Real engine runs beside their prediction. Nothing is fitted here: costs are those that ship for the GPU.

An entry is plain data: names of the run, then for every statistic what was measured and what was predicted, in ms
(latencies) or tokens/s, and what others published for the same run.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.measurements.facts import FACTS, STEP_LOGS, VLLM_RUNS

if TYPE_CHECKING:
    from experiments.vllm.fidelity import Bench

LATENCIES = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")
DIGITS = 5
"""Significant digits of every figure on the board."""
STEP_LOGS_OF = {
    "fp32_t2q_512": {"num_blocks": 512, "block_size": 128},
    "nano_rate2_512": {"num_blocks": 4096, "block_size": 128},
    "preempt_b512_k250": {"num_blocks": 250, "block_size": 32},
    "preempt_cache_b512_k250": {"num_blocks": 250, "block_size": 32, "prefix_caching": True},
    "spec_b512": {"num_blocks": 4096, "block_size": 32, "speculation": "ngram:4", "max_model_len": 2048},
    "spec_preempt_b512_k90": {"num_blocks": 90, "block_size": 32, "speculation": "ngram:4", "max_model_len": 2048},
}
"""Step logs of real schedulers, and the engine settings that made them (docs: profiler/data/facts/sources.toml)."""


@dataclass(frozen=True)
class Entry:
    """One run. measured, predicted: statistic, e.g. ttft_mean_ms -> value. others: tool -> statistic -> its value.

    costs: where the predicted costs come from. calibrated: what of them was fitted on this very run, in words.
    """

    run: str
    engine: str
    model: str
    gpu: str
    tp: int
    load: str
    costs: str
    calibrated: str
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    others: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data with every figure rounded to DIGITS."""
        plain = asdict(self)
        plain["measured"] = rounded(self.measured)
        plain["predicted"] = rounded(self.predicted)
        plain["others"] = {tool: rounded(values) for tool, values in self.others.items()}
        return plain


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.{DIGITS}g}") for name, value in values.items()}


def vllm_entries() -> list[Entry]:
    """The recorded vLLM runs, request by request."""
    published = published_predictions()
    folders = [path.parent for path in sorted(VLLM_RUNS.glob("*/*/requests.parquet"))]
    found = [vllm_entry(folder, published) for folder in folders]
    # Whether the GPUs of a node reach each other was not recorded: the other answer is told beside the default.
    found += [vllm_entry(folder, published, p2p=False) for folder, entry in zip(folders, found) if entry.tp > 1]
    return found


def vllm_entry(
    folder: Path, published: Mapping[str, Mapping[str, Mapping[str, float]]], p2p: bool | None = None
) -> Entry:
    from experiments.vllm.fidelity import make_bench
    from experiments.vllm.recorded_run import read_vllm_run
    from profiler.commands.profiles import gpu_name
    from profiler.operators.fitted_model import find_fitted

    run = read_vllm_run(folder)
    bench = make_bench(folder, profile=find_fitted(gpu_name(run.gpu)), p2p=p2p)
    result = bench.replay()
    first, last = run.requests["queued_s"].min(), run.requests["last_s"].max()
    tokens = float(run.requests["output"].sum())
    times = result.replayed.tables.requests.to_pandas()
    measured = {**_in_ms(result.measured), "output_tokens_per_s": tokens / float(last - first)}
    span = float(times["finished_s"].max() - times["arrival_s"].min())
    predicted = {**_in_ms(result.simulated), "output_tokens_per_s": tokens / span}
    rate = (len(run.requests) - 1) / float(run.requests["queued_s"].max() - first)
    return Entry(
        run=run.name if p2p is None else f"{run.name}, no peer-to-peer",
        engine=f"vLLM {run.meta.get('vllm_version', '')}".strip(),
        model=bench.spec.name,
        gpu=bench.hardware.name,
        tp=bench.tp,
        load=f"{len(run.requests)} requests, {rate:.1f}/s",
        costs=_costs(bench),
        calibrated=_calibrated(bench.source, run.name),
        measured=measured,
        predicted=predicted,
        others=published.get(run.name, {}),
    )


def _calibrated(source: str, run: str) -> str:
    """What a bench's source says to be CALIBRATED on the run itself; whatever was calibrated on another is no fit."""
    parts = [part.strip() for part in re.split("[,;:]", source)]
    marked = [part.partition(" CALIBRATED on ")[0] for part in parts if part.endswith(f"CALIBRATED on {run}")]
    return ", ".join(marked) or "nothing"


def _costs(bench: Bench) -> str:
    profiled = sorted({model for model, _ in bench.fit.profiled})
    known = "its own kernels" if bench.spec.name in profiled else f"composed from {', '.join(profiled) or 'kernels'}"
    return f"shipped fit of {bench.hardware.name}; {known}"


def _in_ms(latencies: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{key}_{name}_ms": 1e3 * latencies[key][name] for key in LATENCIES for name in STATISTICS}


def published_predictions() -> dict[str, dict[str, dict[str, float]]]:
    """run -> tool -> statistic -> what the tool's own project published as its prediction, in ms."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    with (FACTS / "published_errors.csv").open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            tool = found.setdefault(row["run"], {}).setdefault(row["tool"], {})
            tool[f"{row['latency']}_{row['statistic']}_ms"] = float(row["predicted_ms"])
    return found


def parity_entries() -> list[dict[str, Any]]:
    """Steps of real schedulers' logs, and how many of them `vllm_v1` plans alike."""
    from experiments.vllm.parity import compare_with_vllm

    found = []
    for name, engine in STEP_LOGS_OF.items():
        steps, requests = (STEP_LOGS / f"{kind}_{name}.parquet" for kind in ("steps", "reqs"))
        result = compare_with_vllm(steps, requests, token_budget=512, max_num_seqs=64, **engine)
        found.append({"log": name, "steps": result.steps, "matched": result.matched})
    return found
