"""Does the simulator name the right winner? Policies served live by this project's executor, beside their simulation.

Live runs and the cost model that was fitted before them travel as facts; the simulation is made again. A pair of
policies is decided by a statistic where the ranges of their live repeats do not meet.
"""

from __future__ import annotations

import csv
from itertools import combinations
from pathlib import Path
from typing import Any

from policies.edges.input_file import read_json
from profiler.measurements.facts import LIVE_RUNS

STATISTICS = ("ttft_s_mean", "tpot_s_mean", "e2e_s_mean", "e2e_s_p90")


def rankings() -> list[dict[str, Any]]:
    """One row a carried study, load and statistic: live and simulated order, decided pairs, pairs in the live order."""
    return [row for folder in sorted(LIVE_RUNS.glob("*/live.csv")) for row in study(folder.parent)]


def study(folder: Path) -> list[dict[str, Any]]:
    """The rows of one study: study.json, model.json, device.toml, live.csv and a trace a load in one folder."""
    from experiments.errors import ExperimentError

    about = read_json(folder / "study.json", ExperimentError)
    with (folder / "live.csv").open(encoding="utf-8", newline="") as lines:
        live = list(csv.DictReader(lines))
    found = []
    for load in sorted({row["load"] for row in live}, key=float):
        policies = list(dict.fromkeys(row["policy"] for row in live if row["load"] == load))
        simulated = {policy: simulate(folder, about["replay"], load, policy) for policy in policies}
        for statistic in STATISTICS:
            repeats = {
                policy: [float(row[statistic]) for row in live if (row["load"], row["policy"]) == (load, policy)]
                for policy in policies
            }
            predicted = {policy: float(simulated[policy][statistic]) for policy in policies}
            found.append(
                {
                    "study": folder.name,
                    "note": about["note"],
                    "load": float(load),
                    **rank(statistic, repeats, predicted),
                }
            )
    return found


def simulate(folder: Path, settings: Any, load: str, policy: str) -> dict[str, Any]:
    """The summary of one policy's simulation with the model that was fitted before the live runs."""
    from profiler.iterations.iteration_file import read_fit
    from profiler.iterations.iteration_model import IterationModel
    from simulator import ReplayConfig, replay
    from workloads import read_trace

    trace = read_trace(folder / f"trace-{load}.csv")
    config = ReplayConfig(policy=policy, gpu=str(folder / "device.toml"), **settings)
    return replay(trace, config, cost=IterationModel(read_fit(folder / "model.json"))).summary


def rank(statistic: str, repeats: dict[str, list[float]], predicted: dict[str, float]) -> dict[str, Any]:
    """Orders from the best policy to the worst, and the decided pairs that are predicted in the live order."""
    means = {policy: sum(values) / len(values) for policy, values in repeats.items()}
    decided = [
        (one, other)
        for one, other in combinations(repeats, 2)
        if len(repeats[one]) > 1 and len(repeats[other]) > 1
        and (max(repeats[one]) < min(repeats[other]) or max(repeats[other]) < min(repeats[one]))
    ]  # fmt: skip
    agreed = [
        pair for pair in decided if (means[pair[0]] < means[pair[1]]) == (predicted[pair[0]] < predicted[pair[1]])
    ]
    live_order, simulated_order = sorted(means, key=means.__getitem__), sorted(predicted, key=predicted.__getitem__)
    best = live_order[0]
    known = all(max(repeats[best]) < min(repeats[other]) for other in repeats if other != best)
    return {
        "statistic": statistic,
        "live_order": live_order,
        "simulated_order": simulated_order,
        "pairs": len(repeats) * (len(repeats) - 1) // 2,
        "decided": len(decided),
        "agreed": len(agreed),
        # None where the live repeats single out no winner.
        "winner_named": simulated_order[0] == best if known else None,
    }
