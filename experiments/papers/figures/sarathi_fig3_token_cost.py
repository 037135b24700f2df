"""Prefill tokens are cheap in any batch; a decode token is dear unless many share the weights that it makes us read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.papers.chosen_costs import cost_of
from experiments.papers.experiment import Check, Comparison, Result, within_check
from experiments.papers.figure_parts import GROUP_LOOKS, stacked_bars
from experiments.papers.step_costs import GROUPS, OTHERS, decode, layers_ms, prefill

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "What does one token cost in prefill and in decode, by operator and batch size?"
SOURCE = "SARATHI (arXiv 2308.16369), Fig. 3 and Sec. 3.1"

MODEL, GPU, LENGTH = "llama-13b", "a6000", 1024
BATCHES = (1, 2, 4, 8, 18)
PAPER_RATIO = {1: 200.0, 2: 100.0, 18: 16.7}


def run(quick: bool) -> Result:
    cost = cost_of(MODEL, GPU, dtype="float16")
    rows = []
    for batch in BATCHES:
        for phase, shape, tokens in (
            ("prefill", prefill(LENGTH, count=batch), batch * LENGTH),
            ("decode", decode(batch, LENGTH), batch),
        ):
            parts = {name: ms / tokens for name, ms in layers_ms(cost, shape).items()}
            rows.append({"phase": phase, "batch": batch, **parts, "ms_per_token": sum(parts.values())})
    per_token = {(row["phase"], row["batch"]): row["ms_per_token"] for row in rows}
    ratio = {batch: per_token["decode", batch] / per_token["prefill", batch] for batch in BATCHES}
    comparisons = [
        Comparison(f"decode over prefill cost, batch {batch}", ratio[batch], paper, "x", "Sec. 3.1")
        for batch, paper in PAPER_RATIO.items()
    ]
    prefills = [per_token["prefill", batch] for batch in BATCHES]
    others = max(row[OTHERS] / row["ms_per_token"] for row in rows if row["phase"] == "prefill")
    checks = [
        Check(
            f"a prefill token costs the same at any batch size (spread {max(prefills) / min(prefills) - 1:.1%})",
            max(prefills) / min(prefills) < 1.05,
        ),
        Check(
            f"a decode token gets cheaper as the batch grows ({ratio[1]:.0f}x a prefill token alone, "
            f"{ratio[18]:.0f}x at batch 18)",
            ratio[1] > 5 * ratio[18],
        ),
        Check(f"what is neither linear nor attention is at most 5 % of a prefill ({others:.1%})", others <= 0.05),
        within_check(comparisons, 0.25),
    ]
    setting = {"model": MODEL, "gpu": GPU, "dtype": "float16", "sequence length": LENGTH, "batch sizes": BATCHES}
    return Result(setting, [cost.name], {"token cost": rows}, checks, comparisons, "Layers alone, as in the paper.")


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import legend_above, new_figure

    rows = result.tables["token cost"]
    figure, axes = new_figure(width_in, 2.2, columns=2)
    for ax, phase in zip(axes[0], ("prefill", "decode")):
        stacked_bars(ax, [row for row in rows if row["phase"] == phase], "batch", GROUPS, GROUP_LOOKS)
        ax.set_title(phase, loc="left")
        ax.set_xlabel("batch size")
    axes[0, 0].set_ylabel("ms per token")
    legend_above(figure, axes[0, 0], len(GROUPS), per_row=3 if width_in < 5 else 5)
    return figure
