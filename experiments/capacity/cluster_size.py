"""The smallest cluster that serves a trace: as few equal replicas as meet the objective on the trace as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from experiments.capacity.search import Objective, judge, mean_rate
from experiments.running.workload import load_workload
from metrics.measures.summary_keys import BASIS

MOST_REPLICAS = 1024


def run_task(task: Mapping[str, Any]) -> dict[str, Any]:
    """Find the fewest replicas for one setting. Every request of the trace is measured; nothing is left out.

    replicas is None where even MOST_REPLICAS are too few: then the objective fails for each request by itself.
    """
    import numpy as np

    from experiments.sweeps.point import replay_config
    from simulator import replay

    trace = load_workload(task["trace"])
    config = replay_config(task)
    if config.rate_scale != 1.0:
        trace = trace.scaled(config.rate_scale)
        config = replace(config, rate_scale=1.0)
    objective = Objective(**task["objective"])
    tried: dict[int, dict[str, Any]] = {}

    def holds(replicas: int) -> bool:
        run = replay(trace, replace(config, replicas=replicas))
        everyone = np.ones(run.tables.rows("requests"), dtype=bool)
        probe = judge(run.tables, objective, everyone, mean_rate(trace))
        tried[replicas] = {
            **asdict(probe),
            "holds": probe.holds,
            "tightest": probe.tightest,
            "duration_s": run.summary["duration_s"],
            "devices": run.config["peaks"]["devices"],
            "cost_model": run.config["cost_model"],
            **{key: run.summary[key] for key in BASIS},
        }
        return probe.holds

    low, high = 0, 1
    while not holds(high):
        low, high = high, high * 2
        if high > MOST_REPLICAS:
            return {"replicas": None, "tried": {str(n): facts for n, facts in tried.items()}}
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return {"replicas": high, "tried": {str(n): facts for n, facts in sorted(tried.items())}}
