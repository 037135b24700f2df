"""What it is worth that a batch is a whole number of tiles."""

from __future__ import annotations

from typing import Any

from experiments.papers.chosen_costs import cost_of
from experiments.papers.claim import FAILS, HOLDS, Finding, holds_under
from experiments.papers.paper_workloads import closed_batches, closed_run, split_by_ratio, tokens_per_s

CLAIM = "Aligning batches to GEMM tiles is worth about 5 %."
ENGINES = (("llama-13b", "a6000", 18), ("llama-3.1-8b", "a100", 18), ("llama-3.1-8b", "h100", 18))


def run(quick: bool) -> Finding:
    rows: list[dict[str, Any]] = []
    costs = []
    for model, gpu, slots in ENGINES:
        cost = cost_of(model, gpu)
        costs.append(cost.name)
        for chunk in (256, 512, 1024):
            prompt, decodes = split_by_ratio(1024, (chunk - (slots - 1)) / (slots - 1))
            trace = closed_batches(prompt, decodes, slots * (3 if quick else 8))
            aligned = tokens_per_s(closed_run(trace, slots, "decode_maximal", cost, chunk_size=chunk))
            # The same chunk with the decodes on top of it, as a budget on prefill tokens alone would plan.
            loose = closed_run(trace, slots, "decode_maximal", cost, chunk_size=chunk + slots - 1, align="none")
            rows.append({"engine": f"{model} on {gpu}", "chunk": chunk, "gain": aligned / tokens_per_s(loose) - 1})
    near = [row for row in rows if 0.03 <= row["gain"] <= 0.08]
    ours = "; ".join(
        f"{engine}: " + ", ".join(f"chunk {row['chunk']} {row['gain']:+.0%}" for row in rows if row["engine"] == engine)
        for engine in dict.fromkeys(row["engine"] for row in rows)
    )
    if len(near) == len(rows):
        verdict = HOLDS
    elif near:
        where = ", ".join(f"{row['engine']} with chunk {row['chunk']}" for row in near)
        verdict = holds_under(
            f"{where}; elsewhere it is {min(r['gain'] for r in rows):+.0%} to {max(r['gain'] for r in rows):+.0%}"
        )
    else:
        verdict = FAILS
    setting = "decode_maximal, chunks of C - (B - 1) against chunks of C with B - 1 decodes on top; 1K tokens, B = 18"
    return Finding(setting, ours, verdict, costs, {"rows": rows})
