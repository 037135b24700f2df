"""A long prompt that comes first makes everybody wait for all of it."""

from __future__ import annotations

from typing import Any

from experiments.chosen_costs import chosen_costs
from experiments.claim import FAILS, HOLDS, Finding, holds_under

CLAIM = (
    "A prompt of 2000 tokens pushes 50 or more decodes from 50 ms to 800 ms between tokens under prefill priority; "
    "chunking prevents it."
)
DECODES, CONTEXT, PROMPT = 50, 256, 2000
ENGINES = (
    ("llama-3.1-8b", "rtx4090", 1), ("llama-3.1-8b", "a6000", 1), ("llama-3.1-8b", "a100", 1),
    ("llama-3.1-8b", "h100", 1), ("llama-13b", "a6000", 1),
    ("llama-13b", "a100", 1), ("llama-33b", "a100", 1), ("yi-34b", "a6000", 2),
    ("yi-34b", "a100-pcie", 2), ("qwen2.5-32b", "a100", 1), ("llama-2-70b", "a100", 4), ("llama-2-70b", "a100", 2),
    ("llama-3.1-70b", "h100", 4),
)  # fmt: skip


def run(quick: bool) -> Finding:
    rows = [row for engine in ENGINES if (row := _gaps(*engine)) is not None]
    near = min(rows, key=lambda row: abs(row["before_ms"] - 50) / 50 + abs(row["prefill_priority_ms"] - 800) / 800)
    reached = abs(near["prefill_priority_ms"] / 800 - 1) <= 0.25 and abs(near["before_ms"] / 50 - 1) <= 0.25
    prevented = near["chunked_ms"] < 0.25 * near["prefill_priority_ms"]
    everywhere = [row["prefill_priority_ms"] / row["before_ms"] for row in rows]
    ours = (
        f"{near['engine']}: {near['before_ms']:.0f} ms before, {near['prefill_priority_ms']:.0f} ms under prefill "
        f"priority, {near['chunked_ms']:.0f} ms in chunks of 128. Over {len(rows)} engines the gap grows "
        f"{min(everywhere):.0f} to {max(everywhere):.0f} times."
    )
    setting = f"{DECODES} decodes with contexts of {CONTEXT}, a prompt of {PROMPT}; the engine with the nearest numbers"
    verdict = (
        holds_under(f"an engine as slow as {near['engine']}")
        if reached and prevented
        else (HOLDS if prevented else FAILS)
    )
    if prevented and not reached:
        verdict = holds_under("other numbers: the stall and its cure are there, no engine of the list has just these")
    return Finding(setting, ours, verdict, [near["cost_model"]], {"engines": rows})


def _gaps(model: str, gpu: str, tp: int) -> dict[str, Any] | None:
    """Milliseconds between tokens before the prompt comes, and the longest gap after it, under two policies."""
    import numpy as np

    from profiler import ProfileError
    from simulator import replay
    from workloads import Trace

    arrivals = np.append(np.zeros(DECODES, np.int64), 3_000_000_000 if model != "llama-2-70b" else 8_000_000_000)
    prompts = np.append(np.full(DECODES, CONTEXT - 100), PROMPT)
    outputs = np.append(np.full(DECODES, 400), 1)
    trace = Trace("50 decodes and a prompt", arrivals, prompts, outputs, outputs)
    longest: dict[str, float] = {}
    try:
        for policy, knobs in (("prefill_priority", {}), ("chunked", {"chunk_size": 128})):
            options: dict[str, Any] = {**knobs, "token_budget": 16384 if policy == "prefill_priority" else None}
            # As many blocks as the claim needs: it says nothing of memory.
            run = replay(
                trace,
                policy=policy,
                model=model,
                gpu=gpu,
                tp=tp,
                num_blocks=4000,
                dtype="float16",
                cost_model=chosen_costs(),
                **options,
            )
            ends, decodes = run.tables.column("iterations", "end_s"), run.tables.column("iterations", "decodes")
            chunks = run.tables.column("iterations", "chunk_tokens")
            late = ends > arrivals[-1] / 1e9
            gaps = np.diff(ends[(decodes > 0)])
            before = float(np.median(gaps[(ends[decodes > 0][1:] < arrivals[-1] / 1e9)]))
            if not (late & (chunks > 0)).any():
                return None
            longest[policy] = float(gaps[ends[decodes > 0][1:] > arrivals[-1] / 1e9].max())
    except ProfileError:
        return None
    return {
        "engine": f"{model} on {f'{tp} x ' if tp > 1 else ''}{gpu}", "before_ms": 1e3 * before,
        "prefill_priority_ms": 1e3 * longest["prefill_priority"], "chunked_ms": 1e3 * longest["chunked"],
        "cost_model": run.config["cost_model"],
    }  # fmt: skip
