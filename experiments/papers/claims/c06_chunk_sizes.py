"""Which chunk size is for what."""

from __future__ import annotations

from typing import Any

from experiments.papers.chosen_costs import chosen_costs
from experiments.papers.claim import FAILS, HOLDS, Finding, holds_under

CLAIM = "Chunk 256 is for throughput and chunk 128 for latency; chunk 128 loses throughput."
CHUNKS = (64, 128, 256, 512, 1024)


def run(quick: bool) -> Finding:
    old = _one("llama-13b", "a6000", quick)
    new = _one("llama-3.1-8b", "h100", quick)
    setting = (
        "decode_maximal with all requests waiting (output tokens/s) and at a tenth of that rate (P99 gap); prompts "
        "900, outputs 100; LLaMA-13B on A6000, the paper's engine, and Llama-3.1-8B on H100"
    )
    parts = []
    for engine in (old, new):
        speed = ", ".join(
            f"{chunk}: {row['tokens_per_s']:.0f}/s, {1e3 * row['gap_s']:.0f} ms"
            for chunk, row in engine["rows"].items()
        )
        parts.append(f"{engine['engine']} ({speed})")
    throughput = {e["engine"]: max(e["rows"], key=lambda c: e["rows"][c]["tokens_per_s"]) for e in (old, new)}
    latency_order = all(
        e["rows"][128]["gap_s"] < e["rows"][256]["gap_s"]
        and e["rows"][128]["tokens_per_s"] < e["rows"][256]["tokens_per_s"]
        for e in (old, new)
    )
    if latency_order and throughput[old["engine"]] == 256:
        best = throughput[new["engine"]]
        verdict = HOLDS if best == 256 else holds_under(f"slow GPUs; on an H100 throughput peaks at chunk {best}")
    elif latency_order:
        said = ", ".join(f"{engine} at {chunk}" for engine, chunk in throughput.items())
        verdict = holds_under(f"comparing 128 with 256 alone; throughput peaks elsewhere ({said})")
    else:
        verdict = FAILS
    return Finding(setting, "; ".join(parts), verdict, [old["cost_model"], new["cost_model"]], {"engines": [old, new]})


def _one(model: str, gpu: str, quick: bool) -> dict[str, Any]:
    from simulator import replay
    from workloads import generate

    lengths = {"prompt": "fixed:900", "output": "fixed:100", "seed": 7}
    options: dict[str, Any] = {
        "policy": "decode_maximal",
        "model": model,
        "gpu": gpu,
        "max_num_seqs": 18,
        "num_blocks": 18 * 63,
        "cost_model": chosen_costs(),
    }
    burst = generate(requests=60 if quick else 300, arrivals="burst", **lengths)
    full = {chunk: replay(burst, chunk_size=chunk, **options) for chunk in CHUNKS}
    # A tenth of what the engine can serve at best, so that gaps are those of single chunks, and the same for all sizes.
    rate = max(run.summary["requests_per_s"] for run in full.values()) / 10
    gentle = generate(requests=40 if quick else 150, arrivals=f"poisson:{rate}", **lengths)
    rows = {
        chunk: {
            "tokens_per_s": run.summary["output_tokens_per_s"],
            "gap_s": replay(gentle, chunk_size=chunk, **options).summary["tbt_s_p99"],
        }
        for chunk, run in full.items()
    }
    return {"engine": f"{model} on {gpu}", "rows": rows, "cost_model": full[CHUNKS[0]].config["cost_model"]}
