"""Uniform batches leave a pipeline almost no bubbles; whole prompts between decodes leave it mostly bubbles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.papers.experiment import Check, Comparison, Result, Rows, within_check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = (
    "How much of a deep pipeline's time do bubbles take, from which causes, and how much sooner is all work done?"
)
SOURCE = "SARATHI (arXiv 2308.16369), Fig. 12 and Sec. 5.3"
MINUTES = 3.0

PIPELINES = {"SARATHI TP8 PP8": "decode_maximal", "Orca TP8 PP8": "orca"}
CAUSE_LOOKS: dict[str, dict[str, Any]] = {
    "pb1": {"facecolor": "#0072B2", "hatch": ""},
    "pb2": {"facecolor": "#D55E00", "hatch": "////"},
    "pb3": {"facecolor": "#E69F00", "hatch": "...."},
    "transfer": {"facecolor": "#009E73", "hatch": "\\\\\\\\"},
    "starvation": {"facecolor": "#FFFFFF", "hatch": "xxxx"},
    "others": {"facecolor": "#BBBBBB", "hatch": ""},
}


def run(quick: bool) -> Result:
    from experiments.papers.sarathi_pipeline import GPU, MODEL, SLOTS_PIPELINE, SLOTS_REPLICA, sarathi_pipeline

    requests = 400 if quick else 10_000
    study = sarathi_pipeline(requests)
    outcomes: Rows = []
    quantiles: Rows = []
    for outcome in study["outcomes"]:
        causes = dict(outcome["bubble_share_by_cause"])
        shown = {name: causes.pop(name, 0.0) for name in CAUSE_LOOKS if name != "others"}
        outcomes.append(
            {
                "deployment": outcome["name"],
                "completion_s": outcome["completion_s"],
                "bubble_share": outcome["bubble_share"],
                "request_bubble_s_p50": outcome["request_bubble_s_p50"],
                **shown,
                "others": sum(causes.values()),
            }
        )
        quantiles += [
            {"deployment": outcome["name"], "percentile": percent, "bubble_s": seconds}
            for percent, seconds in enumerate(outcome["request_bubble_s"])
        ]
    comparisons = [Comparison(row["what"], row["ours"], row["paper"], "x", "Sec. 5.3") for row in study["ratios"]]
    bubbles, sooner, over_replicas, _ = comparisons
    share = {row["deployment"]: row["bubble_share"] for row in outcomes}
    checks = [
        Check(f"SARATHI's requests meet {bubbles.ours:.0f} times less bubble time at the median", bubbles.ours > 3),
        Check(
            f"bubbles fall from {share['Orca TP8 PP8']:.0%} to {share['SARATHI TP8 PP8']:.0%} of stage time",
            share["SARATHI TP8 PP8"] < 0.3 * share["Orca TP8 PP8"],
        ),
        Check(f"SARATHI is done {sooner.ours:.2f} times sooner than Orca in the same pipeline", sooner.ours > 1.3),
        Check(f"and {over_replicas.ours:.2f} times sooner than eight replicas of 8 GPUs", over_replicas.ours > 1.2),
        within_check(comparisons, 0.25),
    ]
    setting = {
        "model": MODEL,
        "gpu": f"64 x {GPU}",
        "requests": requests,
        "lengths": "1K to 4K, Zipf 0.4",
        "P:D": 10,
        "chunk size": 256,
        "slots": f"{SLOTS_PIPELINE} a micro-batch, {SLOTS_REPLICA} a replica",
    }
    note = (
        "Orca at its best: one whole prompt a batch. Our Orca pipeline loses more to bubbles than the paper's "
        "simulation, and so its distance to the others is larger; docs/concepts/pipelines.md explains the differences."
    )
    tables = {"deployments": outcomes, "per-request": quantiles}
    costs = list(dict.fromkeys(outcome["cost_model"] for outcome in study["outcomes"]))
    return Result(setting, costs, tables, checks, comparisons, note)


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import POLICY_STYLES, legend_above, new_figure
    from metrics.drawing.log_axis import log_scale
    from metrics.measures.bubble_causes import CAUSE_NAMES

    wide = width_in > 5
    figure, axes = new_figure(width_in, 2.4 if wide else 5.6, *((1, 3) if wide else (3, 1)))
    cdf, causes, done = axes.flat
    for name, policy in PIPELINES.items():
        line = [row for row in result.tables["per-request"] if row["deployment"] == name and row["bubble_s"] > 0]
        cdf.plot(
            [row["bubble_s"] for row in line],
            [row["percentile"] for row in line],
            label=name.split(" ")[0],
            **POLICY_STYLES[policy].line(),
        )
    log_scale(cdf, "x")
    cdf.set_xlabel("bubble time of a request (s)")
    cdf.set_ylabel("% of requests")
    cdf.legend()
    rows = [row for row in result.tables["deployments"] if row["bubble_share"] is not None]
    below = [0.0] * len(rows)
    for cause, look in CAUSE_LOOKS.items():
        values = [100 * row[cause] for row in rows]
        causes.bar(
            range(len(rows)),
            values,
            0.6,
            bottom=below,
            label=CAUSE_NAMES.get(cause, cause),
            edgecolor="#333333",
            linewidth=0.4,
            **look,
        )
        below = [a + b for a, b in zip(below, values)]
    causes.set_xticks(range(len(rows)), [row["deployment"].split(" ")[0] for row in rows])
    causes.set_ylabel("bubbles, % of in-flight time")
    causes.set_xlim(-0.6, len(rows) - 0.4)
    causes.grid(axis="x", visible=False)
    legend_above(figure, causes, len(CAUSE_LOOKS), per_row=3 if wide else 2)
    rows = result.tables["deployments"]
    colours = {"SARATHI": POLICY_STYLES["decode_maximal"].colour, "Orca": POLICY_STYLES["orca"].colour}
    for position, row in enumerate(rows):
        done.bar(
            position,
            row["completion_s"],
            0.7,
            facecolor=colours[row["deployment"].split(" ")[0]],
            hatch="////" if "8 x" in row["deployment"] else "",
            edgecolor="#333333",
            linewidth=0.4,
        )
    done.set_xticks(
        range(len(rows)), [row["deployment"].replace(" ", "\n", 1).replace("TP8 PP8", "TP8\nPP8") for row in rows]
    )
    done.set_ylabel("time to complete (s)")
    done.grid(axis="x", visible=False)
    return figure
