"""A burst of very long prompts into a busy chat service, with each rung of the trouble ladder on and off.

Chat requests (1,000 tokens in, 400 out, limit 800) arrive at 6 per second for 120 s on one H100 with an 8B model whose
KV pool holds 200,000 tokens; at 20 s, 50 prompts of 100,000 tokens arrive at once. From left to right: KV blocks in use
(means over 10 s), preemptions by kind, time until everybody was served or rejected, and chat requests per second that
got their first token within 10 s and had no gap above 1 s.

    python examples/memory_pressure.py [OUT.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from metrics.drawing.figure_style import DOUBLE_COLUMN_IN, house_style, new_figure
from simulator import Run, replay
from workloads import Trace

CHATS, RATE, LONG, AT_S, BLOCKS = 720, 6.0, 50, 20.0, 12_500
LADDERS = {
    "policy's own": None,
    "none": "none",
    "1 preempt": "preempt",
    "1+2 plain": "preempt,plain",
    "1+3 offload": "preempt,offload",
    "1+4 oversubscribe": "preempt,oversubscribe",
    "1+5 reject": "preempt,reject",
    "all": "all",
}


def burst_trace(seed: int = 0) -> Trace:
    """The chats as a Poisson process, and the long prompts in its middle."""
    rng = np.random.default_rng(seed)
    chats_s = np.cumsum(rng.exponential(1 / RATE, CHATS))
    at_s = np.concatenate((chats_s, np.full(LONG, AT_S)))
    prompts = np.concatenate((rng.integers(500, 1500, CHATS), np.full(LONG, 100_000)))
    outputs = np.concatenate((rng.integers(200, 600, CHATS), np.full(LONG, 200)))
    limits = np.concatenate((np.full(CHATS, 800), np.full(LONG, 400)))
    order = np.argsort(at_s, kind="stable")
    slo = np.array(["chat"] * CHATS + ["long"] * LONG)[order].tolist()
    arrival_ns = np.rint(at_s[order] * 1e9).astype(np.int64)
    return Trace("burst", arrival_ns, prompts[order], outputs[order], limits[order], slo=slo)


def run(ladder: str | None, **options: Any) -> Run:
    return replay(
        burst_trace(),
        policy="vllm_v1",
        model="llama-3.1-8b",
        gpu="h100",
        cost_model="roofline",
        ladder=ladder,
        num_blocks=BLOCKS,
        max_wait_s=8.0,
        **options,
    )


def chat_goodput(result: Run) -> float:
    """Chat requests per second of the whole run that met their objective."""
    from metrics import summarise_classes

    chats = summarise_classes(result.tables, slo={"chat": "ttft_p99=10,tbt_max=1"})["chat"]
    return float(chats["slo_attainment"]) * RATE


def draw(path: Path) -> list[dict[str, Any]]:
    """All panels into one PNG or PDF; returns the numbers behind them."""
    runs = {label: run(ladder) for label, ladder in LADDERS.items()}
    rows = []
    with house_style():
        figure, axes = new_figure(DOUBLE_COLUMN_IN, 2.3, 1, 4, width_ratios=(1.5, 1, 1, 1))
        use, kinds, whole, good = axes[0]
        shown = (("policy's own", "#0072B2", "-"), ("1+3 offload", "#D55E00", (0, (4, 1.2))), ("all", "#009E73", ":"))
        for label, colour, dashes in shown:
            tables = runs[label].tables
            used = 1 - tables.column("iterations", "free_blocks") / BLOCKS
            at_s, until_s = (tables.column("iterations", f"{when}_s") for when in ("planned", "end"))
            edges = np.arange(0, until_s.max() + 10, 10)
            held, total = (np.histogram(at_s, edges, weights=(until_s - at_s) * part)[0] for part in (used, 1))
            mean = np.divide(held, total, out=np.zeros_like(held), where=total > 0)
            use.stairs(mean, edges, label=label, lw=1, color=colour, linestyle=dashes)
        use.set(xlabel="time (s)", ylabel="KV blocks in use", ylim=(0, 1.5), yticks=(0, 0.5, 1), xlim=(0, None))
        use.legend(loc="upper right")
        names = list(runs)
        places = np.arange(len(names))[::-1]
        for label, result in runs.items():
            summary = result.summary
            rows.append(
                {
                    "ladder": label,
                    "finished": summary["finished"],
                    "rejected": summary["rejected"],
                    "recompute": summary["preemptions_by_recompute"],
                    "swap": summary["preemptions_by_swap"],
                    "plain_plans": summary["plain_plans"],
                    "duration_s": summary["duration_s"],
                    "kv_use_max": summary["kv_use_max"],
                    "goodput": chat_goodput(result),
                }
            )
        recompute, swap = (np.array([row[key] for row in rows]) for key in ("recompute", "swap"))
        kinds.barh(places, recompute, color="#3B5B92", label="recompute")
        kinds.barh(places, swap, left=recompute, color="#F2B84B", label="swap", hatch="////")
        kinds.set_yticks(places, names)
        kinds.set_xlabel("preemptions")
        kinds.legend(loc="lower right")
        whole.barh(places, [row["duration_s"] for row in rows], color="#7F7F7F")
        whole.set_yticks(places, [""] * len(names))
        whole.set_xlabel("until all ended (s)")
        good.barh(places, [row["goodput"] for row in rows], color="#009E73")
        good.set_yticks(places, [""] * len(names))
        good.set_xlabel("chats in time (1/s)")
        good.set_xlim(0, RATE)
        figure.savefig(path)
    return rows


if __name__ == "__main__":
    words = argparse.ArgumentParser(description="Draw what engines do when KV memory is short.")
    words.add_argument("out", nargs="?", type=Path, default=Path("docs/figures/memory_pressure.png"))
    for row in draw(words.parse_args().out):
        cells = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values())
        print("  ".join(f"{key} {cell}" for key, cell in zip(row, cells)))
