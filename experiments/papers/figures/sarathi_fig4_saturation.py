"""Prefills saturate the GPU from a few hundred tokens on; decodes would need hundreds of requests for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.papers.chosen_costs import cost_of
from experiments.papers.experiment import Check, Comparison, Result, Rows
from experiments.papers.figure_parts import GROUP_LOOKS, PAPER_POINT
from experiments.papers.step_costs import ATTENTION, FFN, POSTPROJ, PREPROJ, decode, layers_ms, prefill

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from policies import BatchShape
    from profiler.specs.model_spec import ModelSpec

QUESTION = "From how many tokens on is the GPU saturated, and how much does an operator compute per byte it moves?"
SOURCE = "SARATHI (arXiv 2308.16369), Fig. 4 and Sec. 3.1"

MODEL, GPU, LENGTH = "llama-13b", "a6000", 1024
PREFILL_TOKENS = (32, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096)
DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)
SATURATED_TOKENS_PER_MS = 180.0
OPERATORS = (PREPROJ, ATTENTION, POSTPROJ, FFN)


def run(quick: bool) -> Result:
    from profiler import load_hardware, load_model_spec

    cost = cost_of(MODEL, GPU, dtype="float16")
    model, gpu = load_model_spec(MODEL), load_hardware(GPU)
    rows: Rows = []
    for phase, sizes in (("prefill", PREFILL_TOKENS), ("decode", DECODE_BATCHES)):
        for tokens in sizes:
            shape = (
                prefill(min(tokens, LENGTH), count=-(-tokens // LENGTH))
                if phase == "prefill"
                else decode(tokens, LENGTH)
            )
            per_layer_ms = sum(layers_ms(cost, shape).values()) / model.layers
            rows.append({"phase": phase, "tokens": tokens, "tokens_per_ms": shape.tokens / per_layer_ms})
    intensity: Rows = []
    for phase, shape in (
        ("prefill", prefill(LENGTH)),
        *((f"decode, batch {n}", decode(n, LENGTH)) for n in (1, 18, 256)),
    ):
        intensity += [
            {"phase": phase, "operator": name, "flops_per_byte": _intensity(model, name, shape)} for name in OPERATORS
        ]
    balance = gpu.peak("float16") / gpu.memory_bandwidth
    speed = {(row["phase"], row["tokens"]): row["tokens_per_ms"] for row in rows}
    peak = max(speed["prefill", tokens] for tokens in PREFILL_TOKENS)
    of = {(row["phase"], row["operator"]): row["flops_per_byte"] for row in intensity}
    most = max(speed["decode", batch] for batch in DECODE_BATCHES)
    needed = next(batch for batch in DECODE_BATCHES if speed["decode", batch] >= 0.95 * most)
    checks = [
        Check(
            f"a prefill of 512 tokens reaches 90 % of peak throughput ({speed['prefill', 512] / peak:.0%})",
            speed["prefill", 512] >= 0.9 * peak,
        ),
        Check(
            f"a chunk of 256 loses 12.5 % of it ({1 - speed['prefill', 256] / peak:.1%})",
            abs(1 - speed["prefill", 256] / peak - 0.125) < 0.05,
        ),
        Check(f"decodes need a batch of {needed} for 95 % of their peak (the paper: 256)", 128 <= needed <= 512),
        Check(
            f"prefill GEMMs are above the GPU's balance of {balance:.0f} FLOPs a byte ({of['prefill', FFN]:.0f}), "
            f"those of 18 decodes far below ({of['decode, batch 18', FFN]:.0f})",
            of["prefill", FFN] > balance > 5 * of["decode, batch 18", FFN],
        ),
    ]
    comparisons = [
        Comparison("prefill throughput of one layer, saturated", peak, SATURATED_TOKENS_PER_MS, "tokens/ms", "Fig. 4a"),
        Comparison("loss of a 256-token chunk", 100 * (1 - speed["prefill", 256] / peak), 12.5, "%", "Sec. 4.2"),
    ]
    setting = {"model": MODEL, "gpu": GPU, "dtype": "float16", "context of decodes": LENGTH, "what": "one layer"}
    crowd = layers_ms(cost, decode(needed, LENGTH))
    note = (
        "The paper states a balance of 53 FLOPs a byte for this GPU, which is its fp32 rate over its bandwidth; tensor "
        f"cores make it {balance:.0f}. Of {needed} decodes, attention over their contexts takes "
        f"{crowd[ATTENTION] / sum(crowd.values()):.0%} of the time."
    )
    tables = {"throughput": rows, "intensity": [*intensity, {"phase": "gpu balance", "flops_per_byte": balance}]}
    return Result(setting, [cost.name], tables, checks, comparisons, note)


def _intensity(model: ModelSpec, operator: str, shape: BatchShape) -> float:
    """FLOPs per byte of one operator of one layer, operands and result each moved once, in 16 bits."""
    rows = shape.rows
    if operator == ATTENTION:
        pairs = sum(model.attended(tokens, prefix) for tokens, prefix in shape.chunks)
        pairs += shape.decode_context_total + shape.decodes
        seen = sum(tokens + prefix for tokens, prefix in shape.chunks) + shape.decode_context_total + shape.decodes
        return 4 * model.q_size * pairs / (2 * (2 * model.kv_size * seen + 2 * model.q_size * rows))
    named = {PREPROJ: ("qkv",), POSTPROJ: ("attention_out",), FFN: ("ffn_up", "ffn_down")}[operator]
    gemms = [gemm for gemm in model.gemms(1) if gemm.name in named]
    moved = sum(2 * (gemm.k * gemm.n + rows * (gemm.k + gemm.n)) for gemm in gemms)
    return sum(2 * rows * gemm.n * gemm.k for gemm in gemms) / moved


def draw(result: Result, width_in: float) -> Figure:
    from metrics.drawing.figure_style import new_figure
    from metrics.drawing.log_axis import log_scale

    figure, axes = new_figure(width_in, 2.3 if width_in > 5 else 4.2, *((1, 2) if width_in > 5 else (2, 1)))
    left, right = axes.flat
    for phase, marker, colour in (("prefill", "o", "#0072B2"), ("decode", "s", "#D55E00")):
        rows = [row for row in result.tables["throughput"] if row["phase"] == phase]
        left.plot(
            [row["tokens"] for row in rows],
            [row["tokens_per_ms"] for row in rows],
            marker=marker,
            markersize=3,
            color=colour,
            label=phase,
        )
    left.plot([512], [SATURATED_TOKENS_PER_MS], label="paper", **PAPER_POINT)
    left.set_xscale("log", base=2)
    left.set_xticks([1, 8, 64, 512, 4096], ["1", "8", "64", "512", "4,096"])
    left.set_xlabel("tokens in the batch")
    left.set_ylabel("tokens/ms, one layer")
    left.set_ylim(bottom=0)
    left.legend()
    rows = [row for row in result.tables["intensity"] if "operator" in row]
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    for position, operator in enumerate(OPERATORS):
        values = [
            next(r["flops_per_byte"] for r in rows if r["phase"] == p and r["operator"] == operator) for p in phases
        ]
        right.bar(
            [x + 0.2 * position for x in range(len(phases))],
            values,
            0.2,
            label=operator,
            edgecolor="#333333",
            linewidth=0.4,
            **GROUP_LOOKS[operator],
        )
    balance = next(row["flops_per_byte"] for row in result.tables["intensity"] if row["phase"] == "gpu balance")
    right.axhline(balance, color="#000000", linewidth=0.8, linestyle="--")
    right.annotate("GPU balance", (1.95, balance), ha="center", va="bottom", fontsize=7)
    log_scale(right, "y")
    right.set_ylim(0.5, 5000)
    right.set_xticks([x + 0.3 for x in range(len(phases))], [phase.replace(", batch ", "\n") for phase in phases])
    right.set_ylabel("FLOPs per byte")
    right.legend(ncols=2, loc="upper right")
    right.grid(axis="x", visible=False)
    return figure
