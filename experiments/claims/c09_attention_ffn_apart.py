"""Attention and FFN on devices of their own."""

from __future__ import annotations

from experiments.claim import FAILS, Finding, holds_under

CLAIM = "Scheduling FFN and attention apart gives very low latency and costs about 15 % of throughput."
SETTINGS = (
    ("llama-3.1-70b", "h100", 8, "link"), ("llama-3.1-70b", "h100", 16, "link"), ("llama-3.1-70b", "a100", 8, "link"),
    ("llama-3.1-70b", "a100", 8, "network"), ("llama-3.1-8b", "h100", 8, "link"),
)  # fmt: skip


def run(quick: bool) -> Finding:
    from experiments.attention_ffn import frontiers

    rows = []
    for model, gpu, devices, link in SETTINGS:
        for row in frontiers(model=model, gpu=gpu, devices=devices, link=link):
            if row["throughput_lost"] is not None:
                rows.append({"engine": f"{model} on {devices} x {gpu}, {link}", "bound_ms": row["bound_ms"],
                             "lost": row["throughput_lost"], "together": row["together"],
                             "apart": row["apart"]})  # fmt: skip
    near = [row for row in rows if 0.10 <= row["lost"] <= 0.20]
    faster = [row for row in rows if row["lost"] < 0]
    losses = [row["lost"] for row in rows]
    said = ", ".join(f"{row['engine']} within {row['bound_ms']:g} ms: {row['lost']:.0%}" for row in near)
    ours = f"throughput lost by going apart: {min(losses):.0%} to {max(losses):.0%}" + (
        f"; about 15 % at {said}" if near else ""
    )
    ours += (
        f"; apart is ahead in {len(faster)} of {len(rows)} cases"
        if faster
        else "; at no bound is apart ahead, and the lowest latency is had together"
    )
    verdict = holds_under("loose bounds on latency, not very low ones: " + said) if near else FAILS
    setting = (
        "decode-only iterations, contexts of 2048; best division of the devices either way at each bound on the gap"
    )
    return Finding(setting, ours, verdict, ["roofline of each model and GPU"], {"rows": rows})
