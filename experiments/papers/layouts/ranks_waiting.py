"""How long ranks that step together wait for each other: by width, by what a batch may hold, and by router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.papers.chosen_costs import chosen_costs
from experiments.papers.experiment import Check, Result, Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "How much of their time do data-parallel ranks of an expert model wait for the slowest of them?"
SOURCE = "vLLM's data-parallel deployment: expert layers align the forward passes of all ranks"
MINUTES = 0.6

ENGINE: dict[str, Any] = {"model": "qwen3-30b-a3b", "gpu": "h100", "ep": True, "policy": "vllm_v1"}
WIDTHS = (2, 4, 8, 16)
BUDGETS = (256, 512, 2048)
ROUTERS = ("random", "vllm_ranks", "least_kv")
RATE = 6
"""Requests per second and rank."""


def run(quick: bool) -> Result:
    from simulator import replay
    from workloads import generate
    from workloads.generating.example import OUTPUT, PROMPT

    rows: Rows = []
    costs = []
    count = 60 if quick else 200
    for width in WIDTHS[: 2 if quick else None]:
        trace = generate(
            requests=count * width,
            arrivals=f"poisson:{RATE * width}",
            prompt=PROMPT,
            output=OUTPUT,
            stratified=True,
            seed=4,
        )
        for budget in BUDGETS:
            for router in ROUTERS if budget == BUDGETS[-1] else ROUTERS[1:2]:
                run = replay(
                    trace,
                    **ENGINE,
                    dp=width,
                    token_budget=budget,
                    rank_router=router,
                    cost_model=chosen_costs(),
                    warmup=str(count * width // 5),
                )
                keys = ("rank_waiting_share", "rank_dummy_share", "rank_imbalance", "tpot_s_p50", "ttft_s_p50")
                found = {key: run.summary[key] for key in keys}
                rows.append({"ranks": width, "token_budget": budget, "router": router, **found})
                costs.append(run.config["cost_model"])
    share = {(row["ranks"], row["token_budget"], row["router"]): row["rank_waiting_share"] for row in rows}
    widths = sorted({row["ranks"] for row in rows})
    widest, largest = widths[-1], BUDGETS[-1]
    by_width = [share[width, largest, "vllm_ranks"] for width in widths]
    by_budget = [share[widest, budget, "vllm_ranks"] for budget in BUDGETS]
    by_router = [share[widest, largest, router] for router in ROUTERS]
    checks = [
        Check(
            f"the wider, the longer the wait: {by_width[0]:.0%} of a step at {widths[0]} ranks, {by_width[-1]:.0%} at "
            f"{widest}",
            by_width == sorted(by_width),
        ),
        Check(
            f"smaller batches wait less: {by_budget[0]:.0%} with {BUDGETS[0]} tokens, {by_budget[-1]:.0%} with "
            f"{largest} (one rank prefills while others decode)",
            by_budget == sorted(by_budget),
        ),
        Check(
            f"routers change little: {min(by_router):.0%} to {max(by_router):.0%}",
            max(by_router) - min(by_router) < 0.05,
        ),
    ]
    setting = {
        **ENGINE,
        "workload": f"as examples/trace.csv (Azure conversation, 2023), {RATE} requests/s a rank",
        "requests a rank": count,
        "token budgets": BUDGETS,
        "routers": ROUTERS,
    }
    note = (
        "What a rank waits is the difference between its own device time and that of the slowest rank of a step. "
        "One prompt somewhere makes a step long for everybody, and with more ranks there is one in more of the steps."
    )
    return Result(setting, list(dict.fromkeys(costs)), {"waiting": rows}, checks, note=note)


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import legend_above, new_figure, styles_for

    rows = result.tables["waiting"]
    lines = {
        f"{budget} tokens" + ("" if router == "vllm_ranks" else f", {router}"): (budget, router)
        for budget in BUDGETS
        for router in ROUTERS
        if any(row["token_budget"] == budget and row["router"] == router for row in rows)
    }
    styles = styles_for(dict.fromkeys(lines))
    figure, axes = new_figure(width_in, 2.6)
    ax = axes[0, 0]
    for name, (budget, router) in lines.items():
        own = [row for row in rows if (row["token_budget"], row["router"]) == (budget, router)]
        style = styles[name]
        ax.plot(
            [row["ranks"] for row in own],
            [100 * row["rank_waiting_share"] for row in own],
            label=name,
            marker=style.marker,
            markersize=4,
            **style.line(),
        )
    widths = sorted({row["ranks"] for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(widths, [str(width) for width in widths])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel("data-parallel ranks")
    ax.set_ylabel("waiting, % of steps")
    legend_above(figure, ax, len(lines), per_row=3 if width_in > 5 else 2)
    return figure
