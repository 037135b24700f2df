"""Decode-maximal batching saves in the linear layers, whose weights the decodes no longer read for themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.papers.chosen_costs import cost_of
from experiments.papers.experiment import Check, Comparison, Result, Rows
from experiments.papers.figure_parts import GROUP_LOOKS, stacked_bars
from experiments.papers.paper_workloads import closed_batches, closed_run, split_by_ratio
from experiments.papers.step_costs import ATTENTION, FFN, GROUPS, POSTPROJ, PREPROJ, layers_ms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from profiler.cost_model import CostModel
    from simulator.simulation import Run

QUESTION = "Which operators get faster with decode-maximal batches, and by how much?"
SOURCE = "SARATHI (arXiv 2308.16369), Fig. 10 and Sec. 5.1.4"

MODEL, GPU, CHUNK = "llama-13b", "a6000", 256
SLOTS = {1024: 18, 2048: 9, 3072: 6}
PAPER_FFN, PAPER_PROJECTIONS = (1.3, 1.6), (1.05, 1.38)


def run(quick: bool) -> Result:
    cost = cost_of(MODEL, GPU, dtype="float16")
    rows: Rows = []
    for length, slots in SLOTS.items():
        prompt, decodes = split_by_ratio(length, (CHUNK - (slots - 1)) / (slots - 1))
        trace = closed_batches(prompt, decodes, slots * (2 if quick else 4))
        for policy, knobs in (("request_level", {}), ("decode_maximal", {"chunk_size": CHUNK})):
            parts = _time_by_operator(cost, closed_run(trace, slots, policy, cost, **knobs))
            per_request = {name: ms / len(trace) for name, ms in parts.items()}
            rows.append(
                {"length": length, "slots": slots, "policy": policy, **per_request, "total": sum(per_request.values())}
            )
    saved = {}
    for name in (*GROUPS, "total"):
        static, maximal = (
            [row[name] for row in rows if row["policy"] == p] for p in ("request_level", "decode_maximal")
        )
        saved[name] = [a / b for a, b in zip(static, maximal)]
    low, high = min(saved[FFN]), max(saved[FFN])
    projections = [*saved[PREPROJ], *saved[POSTPROJ]]
    comparisons = [
        Comparison("FFN time, least reduction", low, PAPER_FFN[0], "x", "Sec. 5.1.4"),
        Comparison("FFN time, largest reduction", high, PAPER_FFN[1], "x", "Sec. 5.1.4"),
        Comparison("projections, least reduction", min(projections), PAPER_PROJECTIONS[0], "x", "Sec. 5.1.4"),
        Comparison("projections, largest reduction", max(projections), PAPER_PROJECTIONS[1], "x", "Sec. 5.1.4"),
    ]
    checks = [
        Check(f"FFN takes {low:.2f} to {high:.2f} times less (the paper: 1.3 to 1.6)", low > 1.2 and high < 1.75),
        Check(
            f"projections take {min(projections):.2f} to {max(projections):.2f} times less (the paper: 1.05 to 1.38)",
            min(projections) > 1.0 and max(projections) < 1.6,
        ),
        Check(
            f"attention saves less than the FFN ({min(saved[ATTENTION]):.2f} to {max(saved[ATTENTION]):.2f} times)",
            max(saved[ATTENTION]) < low,
        ),
    ]
    setting = {
        "model": MODEL,
        "gpu": GPU,
        "dtype": "float16",
        "chunk size": CHUNK,
        "slots by length": SLOTS,
        "P:D": "(C - (B - 1)) / (B - 1)",
    }
    return Result(setting, [cost.name], {"time by operator": rows}, checks, comparisons, "Device time in the layers.")


def _time_by_operator(cost: CostModel, run: Run) -> dict[str, float]:
    """Milliseconds in each operator group over all iterations of a run."""
    from collections import Counter

    from policies import BatchShape

    table = run.tables.table("iterations")
    plain = ("decodes", "decode_context_total", "decode_context_max", "dummy_tokens", "sampled", "executed_rows")
    columns = [run.tables.column("iterations", name).tolist() for name in plain]
    chunks = [tuple((c["tokens"], c["prefix"]) for c in batch) for batch in table.column("chunks").to_pylist()]
    total = dict.fromkeys(GROUPS, 0.0)
    for shape, count in Counter(BatchShape(*row) for row in zip(chunks, *columns)).items():
        for name, ms in layers_ms(cost, shape).items():
            total[name] += ms * count
    return total


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import legend_above, new_figure

    rows = [
        {**row, "bar": f"{row['length'] // 1024}K\n{'static' if row['policy'] == 'request_level' else 'ours'}"}
        for row in result.tables["time by operator"]
    ]
    figure, axes = new_figure(width_in, 2.4)
    ax = axes[0, 0]
    stacked_bars(ax, rows, "bar", GROUPS, GROUP_LOOKS)
    ax.set_xticks(range(len(rows)), [row["bar"].replace("ours", "decode-\nmaximal") for row in rows])
    ax.set_ylabel("ms per request")
    legend_above(figure, ax, len(GROUPS), per_row=3 if width_in < 5 else 5)
    return figure
