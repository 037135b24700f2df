"""Decode-maximal batching gains most where every chunk finds exactly the decodes that it can carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.papers.chosen_costs import cost_of
from experiments.papers.experiment import Check, Comparison, Result, Rows, within_check
from experiments.papers.figure_parts import PAPER_POINT
from experiments.papers.paper_workloads import closed_batches, closed_run, split_by_ratio, tokens_per_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from profiler.cost_model import CostModel

QUESTION = "How does the throughput gain over static batching depend on P:D and chunk size, and where is its peak?"
SOURCE = "SARATHI (arXiv 2308.16369), Fig. 9, Table 4 and Sec. 5.1.3"
MINUTES = 1.5

MODEL, GPU = "llama-13b", "a6000"
SLOTS = {1024: 18, 2048: 9, 3072: 6}
CHUNKS = (128, 256, 512)
RATIOS = (1, 2, 4, 6, 8, 11, 14, 18, 22, 28, 36, 50, 75, 100)
SARATHI_GAINS = (("llama-13b", "a6000", 1024, 18, 14, 256, 1.27), ("llama-13b", "a6000", 1024, 18, 28, 512, 1.23))
TABLE4 = (
    ("llama-13b", "a6000", 1024, 6, 50, 256, 1.33),
    ("llama-13b", "a6000", 2048, 6, 50, 256, 1.26),
    ("llama-13b", "a6000", 3072, 6, 50, 256, 1.22),
    ("llama-33b", "a100", 1024, 10, 28, 256, 1.25),
    ("llama-33b", "a100", 2048, 5, 63, 256, 1.22),
    ("llama-33b", "a100", 3072, 3, 127, 256, 1.14),
)


def run(quick: bool) -> Result:
    costs = {key: cost_of(*key, dtype="float16") for key in (("llama-13b", "a6000"), ("llama-33b", "a100"))}
    cost = costs[MODEL, GPU]
    rows: Rows = []
    for length, slots in list(SLOTS.items())[: 1 if quick else 3]:
        for ratio in RATIOS[:: 3 if quick else 1]:
            for chunk, gain in _gains(cost, length, slots, ratio, CHUNKS, quick).items():
                rows.append({"length": length, "slots": slots, "chunk": chunk, "pd_ratio": ratio, "gain": gain})
    comparisons = []
    for model, gpu, length, slots, ratio, chunk, paper in (*SARATHI_GAINS, *TABLE4):
        gain = _gains(costs[model, gpu], length, slots, ratio, (chunk,), quick)[chunk]
        what = f"{model} {length // 1024}K, batch {slots}, P:D {ratio}, chunk {chunk}"
        comparisons.append(Comparison(what, gain, paper, "x", "Table 4" if (slots != 18) else "Sec. 5.1.3"))
    peaks = {}
    for chunk in (256, 512):
        line = {row["pd_ratio"]: row["gain"] for row in rows if row["length"] == 1024 and row["chunk"] == chunk}
        peaks[chunk] = max(line, key=lambda ratio: line[ratio])
    optimum = {chunk: (chunk - 17) / 17 for chunk in peaks}
    checks = [
        Check(
            f"the gain peaks near P:D = (C - (B - 1)) / (B - 1): chunk {chunk}, 1K, batch 18 peaks at {peak} "
            f"(formula {optimum[chunk]:.0f})",
            0.6 <= peak / optimum[chunk] <= 1.6,
        )
        for chunk, peak in peaks.items()
    ]
    checks.append(within_check(comparisons, 0.1))
    setting = {
        "model": MODEL,
        "gpu": GPU,
        "dtype": "float16",
        "slots by length": SLOTS,
        "chunk sizes": CHUNKS,
        "baseline": "request_level, batches of as many",
        "policy": "decode_maximal",
    }
    note = "All requests wait from the start; throughput counts prefill and decode tokens over the whole run."
    return Result(setting, [c.name for c in costs.values()], {"gain": rows}, checks, comparisons, note)


def _gains(
    cost: CostModel, length: int, slots: int, ratio: float, chunks: tuple[int, ...], quick: bool
) -> dict[int, float]:
    prompt, decodes = split_by_ratio(length, ratio)
    trace = closed_batches(prompt, decodes, slots * (4 if quick else 10))
    base = tokens_per_s(closed_run(trace, slots, "request_level", cost))
    return {
        chunk: tokens_per_s(closed_run(trace, slots, "decode_maximal", cost, chunk_size=chunk)) / base
        for chunk in chunks
    }


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import legend_above, new_figure

    rows = result.tables["gain"]
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    shape = (1, len(lengths)) if width_in > 5 else (len(lengths), 1)
    figure, axes = new_figure(width_in, 2.3 if width_in > 5 else 0.5 + 1.6 * len(lengths), *shape, sharex=True)
    looks = {128: ("#D55E00", "^", "-."), 256: ("#0072B2", "o", "-"), 512: ("#009E73", "s", "--")}
    for ax, length in zip(axes.flat, lengths):
        for chunk, (colour, marker, dashes) in looks.items():
            line = [(row["pd_ratio"], row["gain"]) for row in rows if row["length"] == length and row["chunk"] == chunk]
            ax.plot(*zip(*line), color=colour, marker=marker, markersize=3, linestyle=dashes, label=f"chunk {chunk}")
        slots = SLOTS[length]
        points = [(p[4], p[6]) for p in (*SARATHI_GAINS, *TABLE4) if p[0] == MODEL and (p[2], p[3]) == (length, slots)]
        if points:
            ax.plot(*zip(*points), label="paper", **PAPER_POINT)
        ax.axhline(1, color="#555555", linewidth=0.6)
        ax.set_xscale("log")
        ax.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
        ax.set_xticks([], minor=True)
        ax.set_title(f"{length // 1024}K tokens, batch {slots}", loc="left")
        ax.set_ylabel("throughput gain")
    for ax in axes[-1]:
        ax.set_xlabel("P:D")
    legend_above(figure, axes.flat[0], 4, per_row=2 if width_in < 5 else 4)
    return figure
