"""A decode that rides along with a prefill chunk costs a tenth of one in a batch of decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.papers.chosen_costs import cost_of
from experiments.papers.experiment import Check, Comparison, Result, Rows, within_check
from experiments.papers.step_costs import (
    ATTENTION,
    decode,
    hybrid,
    layers_ms,
    linear_and_attention_ms,
    linear_ms,
    prefill,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "What does a decode cost on top of a prefill chunk, and what in a batch of its own?"
SOURCE = "SARATHI (arXiv 2308.16369), Table 2"

MODEL, GPU, LENGTH = "llama-13b", "a6000", 1024
SHAPES = {
    "prefill only": prefill(1024),
    "decode only": decode(4, LENGTH),
    "hybrid": hybrid(1021, 0, 3, LENGTH, samples=True),
}
PAPER = {
    "prefill only": {"linear": 224.8, "attention": 10.0, "total": 234.8},
    "decode only": {"linear": 44.28, "attention": 5.68, "total": 49.96},
    "hybrid": {"linear": 223.2, "attention": 15.2, "total": 238.4},
}


def run(quick: bool) -> Result:
    cost = cost_of(MODEL, GPU, dtype="float16")
    rows: Rows = []
    for name, shape in SHAPES.items():
        parts = layers_ms(cost, shape)
        rows.append(
            {
                "batch": name,
                "linear_ms": linear_ms(parts),
                "attention_ms": parts[ATTENTION],
                "total_ms": linear_and_attention_ms(cost, shape),
                "paper_linear_ms": PAPER[name]["linear"],
                "paper_attention_ms": PAPER[name]["attention"],
                "paper_total_ms": PAPER[name]["total"],
            }
        )
    total = {row["batch"]: row["total_ms"] for row in rows}
    alone = total["decode only"] / 4
    riding = (total["hybrid"] - total["prefill only"]) / 3
    comparisons = [
        Comparison(f"{row['batch']}, {part}", row[f"{part}_ms"], row[f"paper_{part}_ms"], "ms", "Table 2")
        for row in rows
        for part in ("linear", "total")
    ]
    comparisons += [
        Comparison("a decode in a batch of four", alone, 12.49, "ms/token", "Table 2"),
        Comparison("a decode beside a chunk", riding, 1.2, "ms/token", "Table 2"),
        Comparison("how much cheaper", alone / riding, 12.49 / 1.2, "x", "Table 2"),
    ]
    checks = [
        Check(
            f"a decode beside a chunk costs {riding:.2f} ms, {alone / riding:.1f} times less than {alone:.1f} ms in "
            "a batch of four",
            alone / riding > 5,
        ),
        within_check(comparisons[:-1], 0.2),
    ]
    setting = {"model": MODEL, "gpu": GPU, "dtype": "float16", "batches": "1024 prefill; 4 decodes at 1024; 1021 + 3"}
    note = (
        "The paper's caption says four prefills of 1024, but its time per token means 1024 tokens in all. A marginal "
        "decode is the difference of two long iterations, so a 1 % error in either moves it by half. A total "
        "is the paper's sum of linear layers and attention."
    )
    return Result(setting, [cost.name], {"steps": rows}, checks, comparisons, note)


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import new_figure

    rows = result.tables["steps"]
    figure, axes = new_figure(width_in, 2.1)
    ax = axes[0, 0]
    looks = {"linear": {"facecolor": "#0072B2"}, "attention": {"facecolor": "#E69F00", "hatch": "////"}}
    for offset, source, alpha in ((-0.19, "", 1.0), (0.19, "paper_", 0.45)):
        below = [0.0] * len(rows)
        for part, look in looks.items():
            values = [row[f"{source}{part}_ms"] for row in rows]
            label = f"{part}, {'paper' if source else 'ours'}"
            ax.bar(
                [x + offset for x in range(len(rows))],
                values,
                0.36,
                bottom=below,
                label=label,
                alpha=alpha,
                edgecolor="#333333",
                linewidth=0.4,
                **look,
            )
            below = [a + b for a, b in zip(below, values)]
    ax.set_xticks(range(len(rows)), [row["batch"] for row in rows])
    ax.set_ylabel("ms per iteration")
    ax.set_ylim(0, 330)
    ax.legend(ncols=2, loc="upper center")
    ax.grid(axis="x", visible=False)
    return figure
