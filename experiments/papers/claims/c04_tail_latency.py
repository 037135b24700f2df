"""The tail of the time between tokens where prompts are long."""

from __future__ import annotations

from typing import Any

from experiments.papers.chosen_costs import chosen_costs
from experiments.papers.claim import FAILS, HOLDS, Finding, holds_under
from experiments.papers.paper_workloads import ARXIV

CLAIM = "Chunking lowers tail latency beside long prompts by 80 %."
ENGINE: dict[str, Any] = {"model": "mistral-7b-v0.2", "gpu": "a100", "max_num_seqs": 128}
LOADS = (0.2, 0.4, 0.6, 0.8)
CHUNK = 512
PERCENTILES = (99, 99.9, 100)


def run(quick: bool) -> Finding:
    from simulator import replay
    from workloads import generate

    engine = {**ENGINE, "cost_model": chosen_costs()}
    rows: list[dict[str, Any]] = []
    for load in LOADS[:: 3 if quick else 1]:
        trace = generate(requests=100 if quick else 400, arrivals=f"poisson:{load}", seed=6, **ARXIV)
        whole = replay(trace, policy="prefill_priority", **engine)
        chunked = replay(trace, policy="chunked", chunk_size=CHUNK, **engine)
        rows += [
            {"load": load, "percentile": percentile, "whole_s": one, "chunked_s": other, "lowered": 1 - other / one}
            for percentile, one, other in zip(PERCENTILES, _gaps(whole), _gaps(chunked))
        ]
    lowered = {
        percentile: [row["lowered"] for row in rows if row["percentile"] == percentile] for percentile in PERCENTILES
    }
    names = {99: "P99", 99.9: "P99.9", 100: "the longest gap"}
    ours = "; ".join(
        f"{names[percentile]} {-max(values):+.0%} to {-min(values):+.0%}" for percentile, values in lowered.items()
    )
    good = [names[percentile] for percentile, values in lowered.items() if min(values) >= 0.8]
    verdict = (
        HOLDS
        if len(good) == len(PERCENTILES)
        else holds_under(f"{' and '.join(good)}, where the stalls lie")
        if good
        else FAILS
    )
    setting = (
        "Mistral-7B on A100, arxiv_summarization (median prompt 7,059), Poisson at 0.2 to 0.8 requests/s, chunks "
        f"of {CHUNK} against prefill priority; gaps between tokens"
    )
    return Finding(setting, f"change over these loads: {ours}", verdict, [whole.config["cost_model"]], {"rows": rows})


def _gaps(run: Any) -> list[float]:
    from metrics.measures.statistics import percentiles
    from metrics.measures.token_times import TokenTimes

    gaps = TokenTimes(run.tables).gaps(run.tables.column("requests", "status") == "finished")
    return percentiles(gaps.ns / 1e9, PERCENTILES, gaps.count)
