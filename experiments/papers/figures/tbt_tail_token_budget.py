"""The token budget is the knob between the tail of the time between tokens and the time to the first one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.papers.chosen_costs import chosen_costs
from experiments.papers.experiment import Check, Result, Rows
from experiments.papers.paper_workloads import CHAT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "How does the tail of the time between tokens depend on the token budget, and what does a small one cost?"
SOURCE = "Sarathi-Serve (OSDI 2024), Sec. 4.3 and 5.4"
MINUTES = 1.0

ENGINE: dict[str, Any] = {"model": "mistral-7b-v0.2", "gpu": "a100", "max_num_seqs": 128}
BUDGETS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
LOAD = 1.5


def run(quick: bool) -> Result:
    from simulator import replay
    from workloads import generate

    trace = generate(requests=150 if quick else 800, arrivals=f"poisson:{LOAD}", seed=3, **CHAT)
    engine = {**ENGINE, "cost_model": chosen_costs()}
    rows: Rows = []
    options: dict[str, dict[str, Any]] = {
        "chunked": {"policy": "chunked"},
        "vllm_v1": {"policy": "vllm_v1"},
    }
    for name, option in options.items():
        for budget in BUDGETS[:: 3 if quick else 1]:
            knobs = {"chunk_size": budget} if name == "chunked" else {}
            run = replay(trace, **engine, **option, token_budget=budget, **knobs)
            rows.append({"policy": name, "token_budget": budget, **_row(run.summary)})
    whole = replay(trace, **engine, policy="prefill_priority")
    rows.append({"policy": "prefill_priority", "token_budget": None, **_row(whole.summary)})
    line = [row for row in rows if row["policy"] == "chunked"]
    tails = [row["tbt_s_p99"] for row in line]
    middle = min(line, key=lambda row: abs(row["token_budget"] - 512))
    best = min(line, key=lambda row: row["ttft_s_p99"])
    checks = [
        Check(
            f"the P99 gap grows with the budget ({1e3 * tails[0]:.0f} ms at {line[0]['token_budget']}, "
            f"{1e3 * tails[-1]:.0f} ms at {line[-1]['token_budget']})",
            tails == sorted(tails),
        ),
        Check(
            f"a budget of {line[0]['token_budget']} costs the first token: P99 {line[0]['ttft_s_p99']:.1f} s against "
            f"{best['ttft_s_p99']:.1f} s at {best['token_budget']}",
            line[0]["ttft_s_p99"] > 1.5 * best["ttft_s_p99"],
        ),
        Check(
            f"a budget of {middle['token_budget']} keeps the P99 gap far below prefill priority's "
            f"({1e3 * middle['tbt_s_p99']:.0f} ms against {1e3 * rows[-1]['tbt_s_p99']:.0f} ms)",
            middle["tbt_s_p99"] < 0.6 * rows[-1]["tbt_s_p99"],
        ),
    ]
    setting = {
        **ENGINE,
        "workload": "openchat_sharegpt4",
        "load": f"{LOAD} requests/s, Poisson",
        "requests": len(trace),
    }
    return Result(setting, [whole.config["cost_model"]], {"budgets": rows}, checks)


def _row(summary: dict[str, Any]) -> dict[str, Any]:
    keys = ("tbt_s_p50", "tbt_s_p99", "tbt_s_max", "ttft_s_p50", "ttft_s_p99", "output_tokens_per_s", "stalls")
    return {key: summary[key] for key in keys}


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import POLICY_STYLES, legend_above, new_figure

    rows = result.tables["budgets"]
    wide = width_in > 5
    figure, axes = new_figure(width_in, 2.2 if wide else 3.8, *((1, 2) if wide else (2, 1)), sharex=not wide)
    for ax, key, scale, name, ticks in (
        (axes.flat[0], "tbt_s_p99", 1e3, "P99 gap (ms)", (10, 20, 50, 100, 200)),
        (axes.flat[1], "ttft_s_p99", 1.0, "P99 first token (s)", (0.5, 1, 2, 4, 8, 16)),
    ):
        for policy in ("chunked", "vllm_v1"):
            style = POLICY_STYLES[policy]
            line = [row for row in rows if row["policy"] == policy]
            ax.plot(
                [row["token_budget"] for row in line],
                [scale * row[key] for row in line],
                label=policy,
                marker=style.marker,
                markersize=4,
                **style.line(),
            )
        other = next(row for row in rows if row["policy"] == "prefill_priority")
        ax.axhline(scale * other[key], label="prefill_priority", **POLICY_STYLES["prefill_priority"].line())
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.set_yticks([], minor=True)
        ax.set_xticks([128, 256, 512, 1024, 2048, 4096], ["128", "256", "512", "1K", "2K", "4K"])
        ax.set_ylabel(name)
        if wide or ax is axes.flat[1]:
            ax.set_xlabel("token budget")
    legend_above(figure, axes.flat[0], 3)
    return figure
