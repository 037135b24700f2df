"""How much faster decodes flow when they ride along."""

from __future__ import annotations

from experiments.papers.claim import FAILS, HOLDS, Finding, holds_under

CLAIM = "Decode throughput rises 3 to 5 times."


def run(quick: bool) -> Finding:
    from experiments.papers.figures.sarathi_fig8_decode_speedup import run as speedups

    result = speedups(quick)
    rows = [row for row in result.tables["speedup"] if row["model"] == "llama-13b"]
    inside = [row for row in rows if 3 <= row["speedup"] <= 5]
    values = [row["speedup"] for row in rows]
    spoken = ", ".join(f"{row['length'] // 1024}K batch {row['batch']}: {row['speedup']:.1f}" for row in rows)
    where = ", ".join(f"{row['length'] // 1024}K at batch {row['batch']}" for row in inside)
    verdict = HOLDS if len(inside) == len(rows) else holds_under(where) if inside else FAILS
    ours = f"{min(values):.1f} to {max(values):.1f} times ({spoken})"
    setting = (
        "LLaMA-13B on A6000, decode-maximal batches of 256 rows; marginal cost of a decode against one among decodes, "
        "linear layers and attention"
    )
    costs = [name for name in result.cost_models if "llama-13b" in name]
    return Finding(setting, ours, verdict, costs, {"rows": rows})
