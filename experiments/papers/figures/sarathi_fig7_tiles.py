"""One token more than a whole number of GEMM tiles costs as much as a whole tile more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.papers.chosen_costs import cost_of
from experiments.papers.experiment import Check, Comparison, Result, within_check
from experiments.papers.figure_parts import PAPER_POINT
from experiments.papers.step_costs import iteration_ms, prefill

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "How does the time of an iteration grow with its tokens, and what does one token over a tile cost?"
SOURCE = "SARATHI (arXiv 2308.16369), Fig. 7 and Sec. 4.4"

MODEL, GPU = "llama-13b", "a6000"
PAPER_MS = {128: 55.0, 256: 69.8, 257: 92.33}


def run(quick: bool) -> Result:
    cost = cost_of(MODEL, GPU, dtype="float16")
    tokens = range(32, 545, 8 if quick else 1)
    rows = [
        {"tokens": n, "ms": iteration_ms(cost, prefill(n))}
        for n in sorted({*tokens, *PAPER_MS, 129, 384, 385, 512, 513})
    ]
    at = {row["tokens"]: row["ms"] for row in rows}
    comparisons = [Comparison(f"{n} tokens", at[n], ms, "ms", "Sec. 4.4") for n, ms in PAPER_MS.items()]
    comparisons += [
        Comparison("from 128 to 256", 100 * (at[256] / at[128] - 1), 27.0, "%", "Sec. 4.4"),
        Comparison("from 256 to 257", 100 * (at[257] / at[256] - 1), 32.0, "%", "Sec. 4.4"),
    ]
    steps = {n: at[n + 1] / at[n] - 1 for n in (128, 256, 384, 512)}
    checks = [
        Check(
            "one token over a tile costs, in per cent: " + ", ".join(f"{n + 1}: {s:.0%}" for n, s in steps.items()),
            all(step > 0.05 for step in steps.values()),
        ),
        within_check(comparisons[:3], 0.15),
        within_check(comparisons[3:], 0.35),
    ]
    setting = {"model": MODEL, "gpu": GPU, "dtype": "float16", "tile": cost.tile}
    return Result(setting, [cost.name], {"iteration time": rows}, checks, comparisons)


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import new_figure

    rows = result.tables["iteration time"]
    figure, axes = new_figure(width_in, 2.1)
    ax = axes[0, 0]
    ax.plot([row["tokens"] for row in rows], [row["ms"] for row in rows], color="#0072B2", label="ours")
    ax.plot(list(PAPER_MS), list(PAPER_MS.values()), label="paper", **PAPER_POINT)
    ax.set_xticks(range(0, 545, 128))
    ax.set_xlabel("tokens in the batch")
    ax.set_ylabel("ms per iteration")
    ax.set_ylim(bottom=0)
    ax.legend()
    return figure
