"""How many requests a second a policy can serve within a latency objective: what a stall costs in machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.papers.chosen_costs import chosen_costs
from experiments.papers.experiment import Check, Comparison, Result, Rows
from experiments.papers.paper_workloads import ARXIV, CHAT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "At which rate does each policy still keep the P99 time between tokens, strict and relaxed?"
SOURCE = "Sarathi-Serve (OSDI 2024), Fig. 10, Tables 2 and 3, abstract"
MINUTES = 6.0

ENGINES: dict[str, dict[str, Any]] = {
    "Mistral-7B, A100": {"model": "mistral-7b-v0.2", "gpu": "a100"},
    # The paper serves up to 16,384 tokens, which need the model's 200K variant: of the same shape, with more positions.
    "Yi-34B, 2 x A100": {"model": "yi-34b", "gpu": "a100-pcie", "tp": 2, "max_model_len": 16_900},
}
SLO_S = {
    "Mistral-7B, A100": {"strict": 0.1, "relaxed": 0.5},
    "Yi-34B, 2 x A100": {"strict": 0.2, "relaxed": 1.0},
}
CHUNK = {"strict": 512, "relaxed": 2048}
WORKLOADS = {"chat": CHAT, "arxiv": ARXIV}
SYSTEMS = ("prefill_priority", "orca", "chunked")
PAPER_GAIN = {"Mistral-7B, A100": 2.6, "Yi-34B, 2 x A100": 3.7}
"""Abstract: "2.6x higher serving capacity" (Mistral-7B), "up to 3.7x" (Yi-34B), both against vLLM."""


def run(quick: bool) -> Result:
    rows: Rows = []
    for engine in list(ENGINES)[: 1 if quick else 2]:
        for workload in list(WORKLOADS)[: 1 if quick else 2]:
            for objective in ("strict", "relaxed"):
                labels = {"engine": engine, "workload": workload, "objective": objective}
                rows += [{**labels, **row} for row in _capacities(engine, workload, objective, quick)]
    chunked = [row for row in rows if row["policy"] == "chunked"]
    orca = {_key(row): row["requests_per_s"] for row in rows if row["policy"] == "orca"}
    relaxed = {_key(row)[:2]: row["gain"] for row in chunked if row["objective"] == "relaxed"}
    strict = [row for row in chunked if row["objective"] == "strict"]
    comparisons = [
        Comparison(f"{engine}: chunked over prefill priority, most", max(gains), paper, "x", "abstract")
        for engine, paper in PAPER_GAIN.items()
        if (gains := [row["gain"] for row in chunked if row["engine"] == engine])
    ]
    said = ", ".join(
        f"{row['engine'].split(',')[0]} {row['workload']} {row['objective']} {row['gain']:.1f}x" for row in chunked
    )
    checks = [
        Check(f"chunks serve more than prefill priority ({said})", all(row["gain_low"] > 1 for row in chunked)),
        Check(
            "a strict objective gains more than a relaxed one",
            all(row["gain"] > relaxed[_key(row)[:2]] for row in strict),
        ),
        Check(
            "chunks serve more than Orca everywhere", all(row["requests_per_s"] > orca[_key(row)] for row in chunked)
        ),
    ]
    setting = {
        "engines": ENGINES,
        "P99 time between tokens (s)": SLO_S,
        "chunk size": CHUNK,
        "batch": "128; Orca 16",
        "rule": "median scheduling delay <= 2 s",
        "intervals": "95 %, Student's t over draws",
    }
    note = (
        "The paper's gains are over the vLLM of its day, which is prefill_priority here. They depend on how far stalls "
        "lie beyond the objective, and so on the engine's speed; our costs describe compiled engines. Intervals of a "
        "capacity are wide because draws of 400 requests differ; gains are taken draw by draw."
    )
    costs = list(dict.fromkeys(row["cost_model"] for row in rows))
    return Result(setting, costs, {"capacity": rows}, checks, comparisons, note)


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["engine"], row["workload"], row["objective"]


def _capacities(engine: str, workload: str, objective: str, quick: bool) -> Rows:
    from experiments.capacity.draws import draw_plan
    from experiments.capacity.search import Objective
    from experiments.capacity.study import find_capacities

    slo_s = SLO_S[engine][objective]
    draws = draw_plan(WORKLOADS[workload], arrivals="poisson", requests=120 if quick else 400, draws=4, seed=5)
    base = {
        **ENGINES[engine],
        "cost_model": chosen_costs(),
        "chunk_size": CHUNK[objective],
        "max_batch_size": 16,
        "max_num_seqs": 128,
    }
    study = find_capacities(
        {"policy": SYSTEMS}, base, draws, Objective.of(f"tbt_p99={slo_s:g}"), count=2 if quick else 4, tolerance=0.02
    )
    keys = ("policy", "requests_per_s", "requests_per_s_low", "requests_per_s_high", "limited_by", "cost_model")
    renamed = {"ratio": "gain", "ratio_low": "gain_low", "ratio_high": "gain_high"}
    return [
        {"slo_s": slo_s, **{key: row[key] for key in keys}, **{new: row[old] for old, new in renamed.items()}}
        for row in study.rows()
    ]


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import POLICY_STYLES, legend_above, new_figure

    rows = result.tables["capacity"]
    panels = list(dict.fromkeys((row["engine"], row["workload"]) for row in rows))
    columns = min(len(panels), 4 if width_in > 5 else 2)
    figure, axes = new_figure(
        width_in, 2.3 if width_in > 5 else 0.4 + 1.9 * -(-len(panels) // columns), -(-len(panels) // columns), columns
    )
    hatches = {"orca": "////", "prefill_priority": "....", "chunked": ""}
    for ax, (engine, workload) in zip(axes.flat, panels):
        for position, policy in enumerate(("orca", "prefill_priority", "chunked")):
            own = [r for r in rows if (r["engine"], r["workload"], r["policy"]) == (engine, workload, policy)]
            heights = [row["requests_per_s"] for row in own]
            below = [max(0.0, row["requests_per_s"] - row["requests_per_s_low"]) for row in own]
            above = [row["requests_per_s_high"] - row["requests_per_s"] for row in own]
            places = [x + 0.27 * (position - 1) for x in range(len(own))]
            ax.bar(
                places,
                heights,
                0.27,
                yerr=[below, above],
                label=policy,
                facecolor=POLICY_STYLES[policy].colour,
                edgecolor="#333333",
                linewidth=0.4,
                hatch=hatches[policy],
                error_kw={"linewidth": 0.8, "capsize": 1.5},
            )
            ax.set_xticks(range(len(own)), [row["objective"] for row in own])
        ax.set_title(f"{engine.split(',')[0]}, {workload}", loc="left")
        ax.grid(axis="x", visible=False)
    for ax in axes[:, 0]:
        ax.set_ylabel("capacity (requests/s)")
    legend_above(figure, axes.flat[0], len(SYSTEMS))
    return figure
