"""What a large service is in machines."""

from __future__ import annotations

import math
from typing import Any

from experiments.papers.chosen_costs import chosen_costs
from experiments.papers.claim import Finding, holds_under

CLAIM = "A service handles ten billion tokens a day (how many GPUs is that?)."
TOKENS_PER_DAY = 10e9
SLO = "ttft_p99=2,tbt_p99=0.2"
ENGINES: tuple[dict[str, Any], ...] = (
    {"model": "llama-3.1-8b", "gpu": "h100", "tp": 1},
    {"model": "llama-3.1-8b", "gpu": "a100", "tp": 1},
    {"model": "llama-3.1-70b", "gpu": "h100", "tp": 4},
)
PEAK_OVER_MEAN = 2.0
"""Of a day's load; an assumption, since the claim says nothing of it."""


def run(quick: bool) -> Finding:
    from experiments.capacity.draws import draw_plan
    from experiments.capacity.search import Objective
    from experiments.capacity.study import find_capacities
    from workloads.generating.example import OUTPUT, PROMPT, example_trace

    trace = example_trace()
    per_request = float(trace.prompt_tokens.mean() + trace.output_tokens.mean())
    rate = TOKENS_PER_DAY / 86_400 / per_request
    lengths = {"prompt": PROMPT, "output": OUTPUT, "stratified": True}
    draws = draw_plan(lengths, arrivals="poisson", requests=200 if quick else 800, draws=3, seed=10)
    rows, costs = [], []
    for engine in ENGINES:
        base = {**engine, "async_scheduling": True, "cost_model": chosen_costs()}
        study = find_capacities(
            {"policy": ["vllm_v1"]}, base, draws, Objective.of(SLO), count=2 if quick else 3, tolerance=0.02
        )
        found = study.settings[0]
        replicas = math.ceil(rate / found.rate)
        rows.append(
            {
                "engine": f"{engine['model']} on {engine['tp']} x {engine['gpu']}",
                "requests_per_s": found.rate,
                "half_width": found.half_width,
                "gpus": replicas * engine["tp"],
                "gpus_at_peak": math.ceil(PEAK_OVER_MEAN * rate / found.rate) * engine["tp"],
            }
        )
        costs.append(found.cost_model)
    ours = f"{TOKENS_PER_DAY / 86_400:,.0f} tokens/s, {rate:.0f} requests/s of {per_request:,.0f} tokens: " + "; ".join(
        f"{row['engine']}: {row['gpus']} GPUs at an even load, {row['gpus_at_peak']} for a peak of twice the mean"
        for row in rows
    )
    fewest, most = min(row["gpus"] for row in rows), max(row["gpus_at_peak"] for row in rows)
    verdict = holds_under(f"{fewest} to {most} GPUs, by model and peak")
    setting = f"Azure-like conversation, Poisson arrivals, vllm_v1, {SLO}; prompt and output tokens counted together"
    return Finding(setting, ours, verdict, costs, {"rows": rows, "requests_per_s": rate})
