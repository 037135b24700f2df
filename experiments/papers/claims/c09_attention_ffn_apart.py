"""Attention and FFN on devices of their own."""

from __future__ import annotations

import math
from typing import Any

from experiments.papers.claim import FAILS, Finding, holds_under

CLAIM = "Scheduling FFN and attention apart gives very low latency and costs about 15 % of throughput."
SETTINGS = (
    ("llama-3.1-70b", "h100", 8, "link"),
    ("llama-3.1-70b", "h100", 16, "link"),
    ("llama-3.1-70b", "a100", 8, "link"),
    ("llama-3.1-70b", "a100", 8, "network"),
    ("llama-3.1-8b", "h100", 8, "link"),
)


def run(quick: bool) -> Finding:
    from experiments.papers.attention_ffn import frontiers

    rows: list[dict[str, Any]] = []
    tightest: dict[str, dict[str, float]] = {}
    for model, gpu, devices, link in SETTINGS:
        engine = f"{model} on {devices} x {gpu}, {link}"
        found = frontiers(model=model, gpu=gpu, devices=devices, link=link)
        tightest[engine] = {
            way: min((row["bound_ms"] for row in found if row[way]), default=math.inf) for way in ("together", "apart")
        }
        for row in found:
            if row["throughput_lost"] is not None:
                rows.append(
                    {
                        "engine": engine,
                        "bound_ms": row["bound_ms"],
                        "lost": row["throughput_lost"],
                        "together": row["together"],
                        "apart": row["apart"],
                    }
                )
    near = [row for row in rows if 0.10 <= row["lost"] <= 0.20]
    ahead = [row for row in rows if row["lost"] < 0]
    low = [row for row in near if row["bound_ms"] <= tightest[row["engine"]]["together"]]
    losses = [row["lost"] for row in rows]
    ours = f"throughput lost by going apart: {min(losses):.0%} to {max(losses):.0%}"
    ours += f"; about 15 % at {_spoken(near)}" if near else ""
    ours += f"; apart is ahead at {len(ahead)} of {len(rows)} bounds; tightest bound kept, together / apart: "
    ours += ", ".join(f"{name} {both['together']:g} / {both['apart']:g} ms" for name, both in tightest.items())
    if low:
        verdict = holds_under(_spoken(low))
    elif near:
        loose = [row["bound_ms"] / tightest[row["engine"]]["together"] for row in near]
        verdict = holds_under(
            f"bounds {min(loose):.1f} to {max(loose):.1f} times as loose as what is kept together: {_spoken(near)}"
        )
    else:
        verdict = FAILS
    setting = (
        "decode-only iterations, contexts of 2048; best division of the devices either way at each bound on the gap"
    )
    return Finding(setting, ours, verdict, ["roofline of each model and GPU"], {"rows": rows, "tightest_ms": tightest})


def _spoken(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['engine']} within {row['bound_ms']:g} ms: {row['lost']:.0%}" for row in rows)
