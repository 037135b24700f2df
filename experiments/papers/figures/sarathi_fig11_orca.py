"""Mixing whole prompts with decodes helps only while requests happen to be out of step; chunks help always."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.papers.chosen_costs import cost_of
from experiments.papers.experiment import Check, Comparison, Result, Rows, within_check
from experiments.papers.figure_parts import PAPER_POINT
from experiments.papers.paper_workloads import closed_batches, closed_run, split_by_ratio, tokens_per_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "How much throughput does decode-maximal batching give over Orca at its best and at its worst?"
SOURCE = "SARATHI (arXiv 2308.16369), Fig. 11 and Sec. 5.2"

MODEL, GPU, CHUNK = "llama-13b", "a6000", 256
SLOTS = {1024: 18, 2048: 10, 3072: 6}
PAPER = {1024: 1.27, 2048: 1.25, 3072: 1.23}
PAPER_ORCA_BEST, PAPER_ORCA_WORST = 1.11, 1.0
SYSTEMS = ("orca, worst", "orca, best", "decode_maximal")


def run(quick: bool) -> Result:
    cost = cost_of(MODEL, GPU, dtype="float16")
    rows: Rows = []
    for length, slots in SLOTS.items():
        prompt, decodes = split_by_ratio(length, (CHUNK - (slots - 1)) / (slots - 1))
        count = slots * (6 if quick else 16)
        in_step = closed_batches(prompt, decodes, count)
        # The first batch ends request by request, so that each new prompt meets decodes of all the others.
        staggered = closed_batches(prompt, decodes, count, [max(1, decodes * (k + 1) // slots) for k in range(slots)])
        base = tokens_per_s(closed_run(in_step, slots, "request_level", cost))
        speeds = {
            "orca, worst": tokens_per_s(closed_run(in_step, slots, "orca", cost)),
            "orca, best": tokens_per_s(closed_run(staggered, slots, "orca", cost)),
            "decode_maximal": tokens_per_s(closed_run(in_step, slots, "decode_maximal", cost, chunk_size=CHUNK)),
        }
        rows += [
            {"length": length, "slots": slots, "system": name, "gain": speed / base} for name, speed in speeds.items()
        ]
    gain = {(row["length"], row["system"]): row["gain"] for row in rows}
    comparisons = [
        Comparison(f"decode_maximal, {length // 1024}K", gain[length, "decode_maximal"], paper, "x", "Sec. 5.2")
        for length, paper in PAPER.items()
    ]
    comparisons.append(Comparison("Orca at its best, 1K", gain[1024, "orca, best"], PAPER_ORCA_BEST, "x", "Sec. 5.2"))
    comparisons.append(
        Comparison("Orca at its worst, 1K", gain[1024, "orca, worst"], PAPER_ORCA_WORST, "x", "Sec. 5.2")
    )
    checks = [
        Check(
            "Orca at its worst is static batching "
            f"({', '.join(format(gain[length, 'orca, worst'], '.2f') for length in SLOTS)}x)",
            all(abs(gain[length, "orca, worst"] - 1) < 0.05 for length in SLOTS),
        ),
        Check(
            "decode-maximal beats Orca's best at every length",
            all(gain[length, "decode_maximal"] > gain[length, "orca, best"] for length in SLOTS),
        ),
        within_check(comparisons, 0.1),
    ]
    setting = {
        "model": MODEL,
        "gpu": GPU,
        "dtype": "float16",
        "chunk size": CHUNK,
        "slots by length": SLOTS,
        "P:D": "(C - (B - 1)) / (B - 1)",
        "baseline": "request_level",
    }
    note = (
        "Worst case: all requests start and end together. Best case: requests out of step, so that every prompt is "
        "prefilled beside B - 1 decodes."
    )
    return Result(setting, [cost.name], {"gain": rows}, checks, comparisons, note)


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import POLICY_STYLES, legend_above, new_figure

    rows = result.tables["gain"]
    figure, axes = new_figure(width_in, 2.2)
    ax = axes[0, 0]
    orca, maximal = POLICY_STYLES["orca"].colour, POLICY_STYLES["decode_maximal"].colour
    looks = {
        "orca, worst": {"facecolor": orca, "alpha": 0.5, "hatch": "////"},
        "orca, best": {"facecolor": orca},
        "decode_maximal": {"facecolor": maximal},
    }
    lengths = list(SLOTS)
    for position, system in enumerate(SYSTEMS):
        values = [next(r["gain"] for r in rows if (r["length"], r["system"]) == (length, system)) for length in lengths]
        places = [x + 0.26 * (position - 1) for x in range(len(lengths))]
        ax.bar(places, values, 0.26, label=system, edgecolor="#333333", linewidth=0.4, **looks[system])
    ax.plot(
        [x + 0.26 for x in range(len(lengths))], [PAPER[length] for length in lengths], label="paper", **PAPER_POINT
    )
    ax.plot([0, -0.26], [PAPER_ORCA_BEST, PAPER_ORCA_WORST], **PAPER_POINT)
    ax.axhline(1, color="#555555", linewidth=0.6)
    ax.set_xticks(range(len(lengths)), [f"{length // 1024}K, batch {SLOTS[length]}" for length in lengths])
    ax.set_ylabel("throughput over static")
    ax.set_ylim(0, 1.45)
    ax.grid(axis="x", visible=False)
    legend_above(figure, ax, 4, per_row=2 if width_in < 5 else 4)
    return figure
