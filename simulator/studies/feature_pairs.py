"""Which features of a simulated run go together: every pair is run on a small trace, or refused by name.

docs/reference/features.md shows the answers; a test holds every one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from policies.edges.errors import PolicyError
from profiler.errors import ProfileError
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.simulation import Run, replay
from workloads import Trace, generate

REFUSALS = (SimulationError, PolicyError, ProfileError)


@dataclass(frozen=True)
class Feature:
    """A feature as a user switches it on. settings: of the run. workload: of the generated trace."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)


_POOLS = ({"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 1})

FEATURES = (
    Feature("tensor parallel", {"tp": 2}),
    Feature("pipeline", {"pp": 2}),
    Feature("ranks", {"dp": 2}),
    Feature("ranks that step together", {"dp": 2, "ranks_step": "together"}),
    Feature("experts over ranks", {"model": "qwen3-30b-a3b", "dp": 2, "ep": True}),
    Feature("planning ahead", {"knobs": {"async_scheduling": True}}),
    Feature("prefix cache", {"prefix_caching": True}, {"turns": "fixed:3", "think": "fixed:0.05"}),
    Feature("swapping", {"preemption": "swap"}),
    Feature("overload ladder", {"ladder": "all"}),
    Feature(
        "shared KV store", {"kv_store_gib": 1.0, "prefix_caching": True}, {"turns": "fixed:3", "think": "fixed:0.05"}
    ),
    Feature("compressed KV", {"kv_compression": "kivi4"}),
    Feature("prefill and decode pools", {"pools": _POOLS, "kv_bandwidth": 25e9}),
    Feature("attention apart from FFN", {"afd": {"attention": "1", "ffn": "1"}}),
    Feature("several replicas", {"replicas": 2, "router": "prefix_affinity"}),
    Feature("failures", {"failures": ("0@0.02+0.1",)}),
    Feature("autoscaling", {"autoscale": {"most": "2", "by": "queue", "startup_s": "0.02"}}),
    Feature("engine as served", {"engine": "vllm:0.19"}),
    Feature("speculation", {"speculation": "ngram:4", "acceptance": "0.6"}),
    Feature("closed loop", workload={"arrivals": "closed:3,0.01"}),
    Feature("clients that give up", workload={"timeout": "uniform:0.1,2"}),
    Feature("reference simulator", {"reference": True}),
)
"""What is crossed with what. One policy (vllm_v1) and one model for all, so that a cell is about its two features."""

BLOCKS = 24
"""KV blocks of a replica: two or three of the requests below at once, so that memory features have something to do."""


def workload_of(*features: Feature) -> Trace:
    """Twelve short requests, as four sessions of three turns where a prefix cache is asked for."""
    settings = {key: value for feature in features for key, value in feature.workload.items()}
    if "arrivals" in settings:  # a closed loop has no sessions: its clients wait for their own answers
        settings = {key: value for key, value in settings.items() if key not in ("turns", "think")}
    shape: dict[str, Any] = {"requests": 12, "prompt": "uniform:60,200", "output": "uniform:20,60", "seed": 3}
    if "turns" in settings:
        shape |= {"requests": 4, "prompt": "uniform:40,80", "output": "uniform:10,30"}
    return generate(**{"arrivals": "poisson:400", **shape, **settings})


def config_of(*features: Feature) -> ReplayConfig:
    """One run with the settings of all features; tables (knobs) are joined."""
    settings: dict[str, Any] = {"policy": "vllm_v1", "gpu": "h100", "cost_model": "roofline", "num_blocks": BLOCKS}
    for feature in features:
        for key, value in feature.settings.items():
            settings[key] = {**settings.get(key, {}), **value} if isinstance(value, Mapping) else value
    return ReplayConfig(**settings)


def try_together(*features: Feature) -> Run | str:
    """The run that all features make together, or the sentence that refuses it."""
    try:
        return replay(workload_of(*features), config_of(*features))
    except REFUSALS as refused:
        return str(refused)


def pairs() -> list[tuple[Feature, Feature]]:
    return list(combinations(FEATURES, 2))


def page() -> str:
    """docs/reference/features.md: a table of every pair, and below it the sentences of those that are refused."""
    numbers: dict[str, int] = {}
    cells: dict[tuple[str, str], str] = {}
    for one, other in pairs():
        answer = try_together(one, other)
        if isinstance(answer, str):
            sentence = re.sub(r"\s+", " ", answer)
            cell = f"[{numbers.setdefault(sentence, len(numbers) + 1)}]"
        else:
            cell = "runs"
        cells[one.name, other.name] = cells[other.name, one.name] = cell
    names = [feature.name for feature in FEATURES]
    lines = [
        "# Which features go together",
        "",
        "Every pair of features is run by `tests/simulator/test_feature_pairs.py` on a small trace under `vllm_v1`: it",
        "serves every request with the same rows with and without leaps, or it is refused with the numbered sentence.",
        "This page is written by `python -m simulator.studies.feature_pairs`.",
        "",
        "| | " + " | ".join(str(number) for number in range(1, len(names) + 1)) + " |",
        "|---|" + "---|" * len(names),
    ]
    for number, name in enumerate(names, 1):
        row = [cells.get((name, other), "") for other in names]
        lines.append(f"| {number} {name} | " + " | ".join(row) + " |")
    lines += ["", *(f"{number}. {sentence}" for sentence, number in numbers.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from policies.edges.output_file import write_bytes

    write_bytes("docs/reference/features.md", page().encode(), SimulationError)
