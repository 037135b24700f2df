"""Where a small chunk loses its time, and what gets it back."""

from __future__ import annotations

from experiments.papers.chosen_costs import chosen_costs, cost_of
from experiments.papers.claim import FAILS, HOLDS, Finding, holds_under
from experiments.papers.step_costs import iteration_ms, layers_ms, prefill

CLAIM = (
    "A chunk of 128 loses throughput because its GEMMs are not filled and launches cost their share; merging small "
    "chunks and CUDA graphs are the cure."
)
LAUNCH_US = 10.0
"""A kernel launched from Python without a graph: what lies between two kernels of an eager engine, about 5 to 20 us."""
KERNELS_PER_LAYER = 12


def run(quick: bool) -> Finding:
    from profiler import load_model_spec
    from simulator import replay
    from workloads import generate

    parts, numbers, shares, costs = [], {}, {}, []
    for model, gpu in (("llama-13b", "a6000"), ("llama-3.1-8b", "h100"), ("llama-3.2-1b", "h100")):
        cost = cost_of(model, gpu)
        costs.append(cost.name)
        per_token = {chunk: iteration_ms(cost, prefill(chunk, 512)) / chunk for chunk in (128, 256, 1024)}
        launches_ms = LAUNCH_US * KERNELS_PER_LAYER * load_model_spec(model).layers / 1e3
        step_ms = sum(layers_ms(cost, prefill(128, 512)).values())
        # Launches run ahead of the GPU: they cost what they take beyond the kernels themselves.
        shares[model] = max(0.0, launches_ms - step_ms) / max(launches_ms, step_ms)
        unfilled = per_token[128] / per_token[1024] - 1
        numbers[f"{model} on {gpu}"] = {
            "ms_per_token": per_token,
            "launches_ms": launches_ms,
            "step_ms": step_ms,
            "launch_share": shares[model],
            "unfilled": unfilled,
        }
        parts.append(
            f"{model} on {gpu}: a token of a 128-chunk costs {unfilled:+.0%} against one of 1024, eager "
            f"launches would take {shares[model]:.0%} of its step"
        )
    short = generate(requests=80 if quick else 400, arrivals="burst", prompt="uniform:20,100", output="fixed:2", seed=8)
    speeds = {}
    for merge in (False, True):
        merged = replay(
            short,
            policy="dynamic_chunk",
            large=128,
            middle=128,
            small=128,
            merge=merge,
            model="llama-13b",
            gpu="a6000",
            max_num_seqs=18,
            num_blocks=18 * 8,
            cost_model=chosen_costs(),
        )
        speeds[merge] = merged.summary["requests_per_s"]
    gain = speeds[True] / speeds[False] - 1
    parts.append(
        f"merging prompts of 20 to 100 tokens (answers of 2) into chunks of 128: {gain:+.0%} requests/s on llama-13b"
    )
    numbers["merging"] = {"without": speeds[False], "with": speeds[True]}
    filled = all(row["unfilled"] > 0.15 for name, row in numbers.items() if name != "merging")
    launched = [model for model, share in shares.items() if share > 0.05]
    if filled and gain > 0.1 and len(launched) == len(shares):
        verdict = HOLDS
    elif filled and gain > 0.1:
        where = f"are felt with {' and '.join(launched)} alone" if launched else "are felt with none of these engines"
        verdict = holds_under(
            f"GEMMs that are not filled, and short prompts to merge; launches {where}: elsewhere they hide behind the "
            "kernels"
        )
    else:
        verdict = FAILS
    setting = f"a chunk after 512 tokens of prefix; eager launches of {LAUNCH_US:g} us, {KERNELS_PER_LAYER} a layer"
    return Finding(setting, "; ".join(parts), verdict, list(dict.fromkeys(costs)), numbers)
