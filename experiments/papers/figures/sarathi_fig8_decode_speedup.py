"""How much cheaper decodes become when they ride along with prefill chunks, by batch size and sequence length."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from experiments.papers.chosen_costs import cost_of
from experiments.papers.experiment import Check, Comparison, Result, Rows, within_check
from experiments.papers.figure_parts import PAPER_POINT
from experiments.papers.paper_workloads import split_by_ratio
from experiments.papers.step_costs import decode, hybrid, linear_and_attention_ms, prefill

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from profiler.cost_model import CostModel

QUESTION = "How many times cheaper is a decode in a decode-maximal batch than in a batch of decodes?"
SOURCE = "SARATHI (arXiv 2308.16369), Fig. 8 and Table 4"

CHUNK = 256
ENGINES = {"llama-13b": "a6000", "llama-33b": "a100"}
BATCHES = {1024: (2, 4, 6, 9, 12, 18), 2048: (2, 4, 6, 9), 3072: (2, 4, 6)}
TABLE4 = (
    ("llama-13b", 1024, 6, 5.45),
    ("llama-13b", 2048, 6, 3.26),
    ("llama-13b", 3072, 6, 2.51),
    ("llama-33b", 1024, 10, 3.83),
    ("llama-33b", 2048, 5, 4.25),
    ("llama-33b", 3072, 3, 3.51),
)


def run(quick: bool) -> Result:
    costs = {model: cost_of(model, gpu, dtype="float16") for model, gpu in ENGINES.items()}
    rows: Rows = []
    for length, batches in BATCHES.items():
        for batch in batches:
            rows.append(_point("llama-13b", costs["llama-13b"], length, batch))
    comparisons = []
    for model, length, batch, paper in TABLE4:
        row = _point(model, costs[model], length, batch)
        if row not in rows:
            rows.append(row)
        what = f"{model}, {length // 1024}K, batch {batch}"
        comparisons.append(Comparison(what, row["speedup"], paper, "x", "Table 4"))
    own = [row["speedup"] for row in rows if row["model"] == "llama-13b"]
    by_length = [comparison.ours for comparison in comparisons[:3]]
    checks = [
        Check(
            f"decodes get cheaper everywhere ({min(own):.1f} to {max(own):.1f} times on {ENGINES['llama-13b']}; the "
            "paper says 2.8 to 10)",
            min(own) > 1.5,
        ),
        Check(
            "the longer the sequences, the less (attention over the context cannot be shared)",
            by_length[0] > by_length[1] > by_length[2],
        ),
        within_check(comparisons, 0.25),
    ]
    setting = {"models": ENGINES, "dtype": "float16", "chunk size": CHUNK, "P:D": "(C - (B - 1)) / (B - 1)"}
    note = (
        "Marginal cost: an iteration of C - (B - 1) prefill tokens and B - 1 decodes, less one of C prefill tokens, "
        "over the chunks of a prompt; decodes stand in the middle of their outputs. Linear layers and attention alone, "
        "as the paper's tables add them up."
    )
    return Result(setting, [cost.name for cost in costs.values()], {"speedup": rows}, checks, comparisons, note)


def _point(model: str, cost: CostModel, length: int, batch: int) -> dict[str, object]:
    chunk = CHUNK - (batch - 1)
    prompt, decodes = split_by_ratio(length, chunk / (batch - 1))
    context = prompt + decodes // 2
    alone = linear_and_attention_ms(cost, decode(batch, context)) / batch
    marginal = []
    for prefix in range(0, max(1, prompt - chunk + 1), chunk):
        with_decodes = linear_and_attention_ms(cost, hybrid(chunk, prefix, batch - 1, context))
        marginal.append((with_decodes - linear_and_attention_ms(cost, prefill(CHUNK, prefix))) / (batch - 1))
    riding = fmean(marginal)
    return {
        "model": model,
        "length": length,
        "batch": batch,
        "alone_ms": alone,
        "riding_ms": riding,
        "speedup": alone / riding,
    }


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import new_figure

    rows = [row for row in result.tables["speedup"] if row["model"] == "llama-13b"]
    figure, axes = new_figure(width_in, 2.2)
    ax = axes[0, 0]
    looks = {1024: ("#0072B2", "o", "-"), 2048: ("#009E73", "s", "--"), 3072: ("#D55E00", "^", "-.")}
    for length, (colour, marker, dashes) in looks.items():
        line = sorted((row["batch"], row["speedup"]) for row in rows if row["length"] == length)
        ax.plot(
            *zip(*line), color=colour, marker=marker, markersize=4, linestyle=dashes, label=f"{length // 1024}K tokens"
        )
    points = [(batch, paper) for model, _, batch, paper in TABLE4 if model == "llama-13b"]
    ax.plot(*zip(*points), label="paper (1K, 2K, 3K)", **PAPER_POINT)
    ax.set_xlabel("batch size")
    ax.set_ylabel("decode speed-up")
    ax.set_ylim(bottom=0)
    ax.legend()
    return figure
