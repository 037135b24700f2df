"""Which latency is to be had at which throughput: every policy's frontier over rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.papers.chosen_costs import chosen_costs
from experiments.papers.experiment import Check, Result, Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = "Which policy and chunk size give the best tail latency at a given throughput?"
SOURCE = "the throughput-latency trade-off of Sarathi-Serve (OSDI 2024), Fig. 1 and Sec. 5.3"
MINUTES = 2.5

ENGINE: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h100"}
SYSTEMS: dict[str, dict[str, Any]] = {
    "prefill_priority": {"policy": "prefill_priority"},
    "orca": {"policy": "orca"},
    "vllm_v1": {"policy": "vllm_v1"},
    "chunked 256": {"policy": "chunked", "chunk_size": 256},
    "chunked 512": {"policy": "chunked", "chunk_size": 512},
    "chunked 1024": {"policy": "chunked", "chunk_size": 1024},
    "decode_maximal": {"policy": "decode_maximal"},
}
RATES = (4, 8, 12, 16, 20, 24)


def run(quick: bool) -> Result:
    from simulator import replay
    from workloads import generate
    from workloads.generating.example import OUTPUT, PROMPT

    rows: Rows = []
    count = 200 if quick else 1200
    for rate in RATES[:: 2 if quick else 1]:
        trace = generate(
            requests=count, arrivals=f"poisson:{rate}", prompt=PROMPT, output=OUTPUT, stratified=True, seed=4
        )
        for name, options in SYSTEMS.items():
            run = replay(trace, **ENGINE, **options, cost_model=chosen_costs(), warmup=str(count // 5))
            keys = ("output_tokens_per_s", "tbt_s_p99", "tbt_s_p50", "ttft_s_p99", "ttft_s_p50", "stalls", "overloaded")
            rows.append({"system": name, "rate": rate, **{key: run.summary[key] for key in keys}})
    at = {(row["system"], row["rate"]): row for row in rows}
    busy = RATES[2]
    tails = {name: at[name, busy]["tbt_s_p99"] for name in SYSTEMS}
    chunks = [tails[f"chunked {size}"] for size in (256, 512, 1024)]
    checks = [
        Check(
            f"at {busy} requests/s chunks keep the P99 gap within {1e3 * max(chunks):.0f} ms, "
            f"prefill priority to {1e3 * tails['prefill_priority']:.0f} ms",
            tails["prefill_priority"] > 2 * max(chunks),
        ),
        Check("the smaller the chunk, the shorter the tail", chunks == sorted(chunks)),
        Check(
            f"whole prompts in decode batches (orca) leave a longer one, {1e3 * tails['orca']:.0f} ms",
            tails["orca"] > max(chunks),
        ),
    ]
    setting = {
        **ENGINE,
        "workload": "as examples/trace.csv (Azure conversation, 2023)",
        "requests": count,
        "rates": RATES,
        "systems": SYSTEMS,
    }
    note = "Hollow points are overloaded: what they wait grows with the length of the run."
    return Result(setting, [run.config["cost_model"]], {"frontier": rows}, checks, note=note)


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import legend_above, new_figure, styles_for
    from metrics.drawing.log_axis import log_scale

    rows = result.tables["frontier"]
    styles = styles_for({name: options["policy"] for name, options in SYSTEMS.items()})
    wide = width_in > 5
    figure, axes = new_figure(width_in, 2.6 if wide else 5.0, *((1, 2) if wide else (2, 1)))
    for ax, key, scale, label in (
        (axes.flat[0], "tbt_s_p99", 1e3, "P99 gap (ms)"),
        (axes.flat[1], "ttft_s_p50", 1.0, "median first token (s)"),
    ):
        for name, style in styles.items():
            line = [row for row in rows if row["system"] == name]
            ax.plot(
                [row["output_tokens_per_s"] for row in line],
                [scale * row[key] for row in line],
                label=name,
                marker=style.marker,
                markersize=4,
                **style.line(),
            )
            over = [row for row in line if row["overloaded"]]
            ax.plot(
                [row["output_tokens_per_s"] for row in over],
                [scale * row[key] for row in over],
                style.marker,
                color=style.colour,
                markersize=4,
                markerfacecolor="white",
                zorder=4,
            )
        if any(row["overloaded"] for row in rows):
            ax.plot([], [], "o", color="#555555", markersize=4, markerfacecolor="white", label="open: overloaded")
        log_scale(ax, "y")
        ax.set_xlabel("output tokens/s")
        ax.set_ylabel(label)
    legend_above(figure, axes.flat[0], len(styles) + 1, per_row=2 if not wide else 4)
    return figure
