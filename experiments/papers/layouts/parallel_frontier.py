"""Throughput against interactivity: how to lay a dense and an expert model on eight devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.papers.chosen_costs import chosen_costs
from experiments.papers.experiment import Check, Result, Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "How should eight devices be divided over tensor, data and expert parallel, by how fast a user reads?"
SOURCE = "throughput a device against tokens/s a user, as InferenceMAX (SemiAnalysis, 2025) plots engines"
MINUTES = 1.0

ENGINE: dict[str, Any] = {"gpu": "h200", "policy": "vllm_v1", "max_num_seqs": 1024}
DEVICES = 8
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama-3.1-70b": {"TP8": {"tp": 8}, "TP4 DP2": {"tp": 4, "dp": 2}, "TP2 DP4": {"tp": 2, "dp": 4}},
    "qwen3-235b-a22b": {
        "TP8": {"tp": 8},
        "TP8 EP": {"tp": 8, "ep": True},
        "TP4 DP2 EP": {"tp": 4, "dp": 2, "ep": True},
        "TP2 DP4 EP": {"tp": 2, "dp": 4, "ep": True},
        "DP8 EP": {"dp": 8, "ep": True},
    },
}
CLIENTS = (8, 32, 128, 512)


def run(quick: bool) -> Result:
    from simulator import replay
    from workloads import generate

    rows: Rows = []
    costs = []
    for clients in CLIENTS[:: 3 if quick else 1]:
        trace = generate(
            requests=(2 if quick else 4) * clients,
            arrivals=f"closed:{clients},0",
            prompt="lognormal:1000,0.6",
            output="lognormal:250,0.5",
            seed=1,
        )
        for model, layouts in LAYOUTS.items():
            for name, layout in layouts.items():
                run = replay(
                    trace, model=model, **ENGINE, **layout, cost_model=chosen_costs(), warmup=str(clients // 2)
                )
                summary = run.summary
                rows.append(
                    {
                        "model": model,
                        "layout": name,
                        "clients": clients,
                        "tokens_per_s_a_device": summary["output_tokens_per_s"] / DEVICES,
                        "tokens_per_s_a_user": 1.0 / summary["tpot_s_p50"],
                        "rank_waiting_share": summary["rank_waiting_share"] if "dp" in layout else None,
                    }
                )
                costs.append(run.config["cost_model"])
    few, many = CLIENTS[0], CLIENTS[-1]
    at = {(row["model"], row["layout"], row["clients"]): row for row in rows}
    dense, experts = LAYOUTS

    def best(model: str, clients: int, key: str) -> str:
        return max(LAYOUTS[model], key=lambda layout: at[model, layout, clients][key])

    fastest = {model: best(model, few, "tokens_per_s_a_user") for model in LAYOUTS}
    busiest = {model: best(model, many, "tokens_per_s_a_device") for model in LAYOUTS}
    waits = [at[experts, name, many]["rank_waiting_share"] for name in ("TP4 DP2 EP", "TP2 DP4 EP", "DP8 EP")]
    checks = [
        Check(
            f"with {few} clients all devices for each token are fastest: {fastest[dense]} and {fastest[experts]}",
            set(fastest.values()) == {"TP8"},
        ),
        Check(
            f"with {many} clients ranks serve more: {busiest[dense]} and {busiest[experts]}",
            all("DP" in name for name in busiest.values()),
        ),
        Check(
            f"ranks of the dense model never wait for each other, those of the expert model {waits[0]:.0%} of a step "
            f"with 2 and {waits[-1]:.0%} with 8 of them",
            not any(row["rank_waiting_share"] for row in rows if row["model"] == dense) and waits == sorted(waits),
        ),
    ]
    setting = {
        **ENGINE,
        "devices": DEVICES,
        "workload": "closed loops, prompts of 1,000 and answers of 250 tokens in the median",
        "clients": CLIENTS,
        "layouts": LAYOUTS,
    }
    note = (
        "TP: devices that share each layer; DP: ranks with schedulers and KV of their own; EP: whole experts on each "
        "device, of the expert model alone. Ranks of the dense model are independent engines; those of the expert "
        "model start each step together."
    )
    return Result(setting, list(dict.fromkeys(costs)), {"frontier": rows}, checks, note=note)


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import legend_above, new_figure, styles_for

    rows = result.tables["frontier"]
    names = list(dict.fromkeys(_shown(name) for layouts in LAYOUTS.values() for name in layouts))
    styles = styles_for(dict.fromkeys(names))
    wide = width_in > 5
    figure, axes = new_figure(width_in, 2.6 if wide else 5.0, *((1, 2) if wide else (2, 1)))
    for ax, (model, layouts) in zip(axes.flat, LAYOUTS.items()):
        for name in layouts:
            line = [row for row in rows if (row["model"], row["layout"]) == (model, name)]
            ax.plot(
                [row["tokens_per_s_a_user"] for row in line],
                [row["tokens_per_s_a_device"] for row in line],
                label=_shown(name),
                marker=styles[_shown(name)].marker,
                markersize=4,
                **styles[_shown(name)].line(),
            )
        ax.set_title(model, loc="left", pad=2)
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("tokens/s a user (1 / median TPOT)")
        ax.set_ylabel("output tokens/s a device")
    legend_above(figure, axes.flat[1], len(names), per_row=3 if not wide else 6)
    return figure


def _shown(layout: str) -> str:
    """Layouts of both models that differ in expert parallel alone look alike."""
    return f"{layout.removesuffix(' EP')} (EP)" if "DP" in layout and layout != "DP8 EP" else layout
