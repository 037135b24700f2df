"""A long prompt that comes first makes everybody wait for all of it."""

from __future__ import annotations

from typing import Any

from experiments.papers.chosen_costs import chosen_costs
from experiments.papers.claim import FAILS, Finding, holds_under

CLAIM = (
    "A prompt of 2000 tokens pushes 50 or more decodes from 50 ms to 800 ms between tokens under prefill priority; "
    "chunking prevents it."
)
DECODES, CONTEXT, PROMPT, CHUNK = 50, 256, 2000, 128
ENGINES = (
    ("llama-3.1-8b", "rtx4090", 1),
    ("llama-3.1-8b", "a6000", 1),
    ("llama-3.1-8b", "a100", 1),
    ("llama-3.1-8b", "h100", 1),
    ("llama-13b", "a6000", 1),
    ("llama-13b", "a100", 1),
    ("llama-33b", "a100", 1),
    ("yi-34b", "a6000", 2),
    ("yi-34b", "a100-pcie", 2),
    ("qwen2.5-32b", "a100", 1),
    ("llama-2-70b", "a100", 4),
    ("llama-2-70b", "a100", 2),
    ("llama-3.1-70b", "h100", 4),
)


def run(quick: bool) -> Finding:
    rows = [row for engine in ENGINES if (row := _gaps(*engine)) is not None]
    near = min(rows, key=lambda row: abs(row["before_ms"] - 50) / 50 + abs(row["prefill_priority_ms"] - 800) / 800)
    reached = abs(near["prefill_priority_ms"] / 800 - 1) <= 0.25 and abs(near["before_ms"] / 50 - 1) <= 0.25
    prevented = near["chunked_ms"] < 0.25 * near["prefill_priority_ms"]
    everywhere = [row["prefill_priority_ms"] / row["before_ms"] for row in rows]
    ours = (
        f"{near['engine']}: {near['before_ms']:.0f} ms before, {near['prefill_priority_ms']:.0f} ms under prefill "
        f"priority, {near['chunked_ms']:.0f} ms in chunks of {CHUNK}. Over {len(rows)} engines the gap grows "
        f"{min(everywhere):.0f} to {max(everywhere):.0f} times."
    )
    setting = (
        f"{DECODES} decodes with contexts of {CONTEXT} tokens on average when a prompt of {PROMPT} comes; the engine "
        "with the nearest numbers"
    )
    if not prevented:
        verdict = FAILS
    elif reached:
        verdict = holds_under(f"an engine as slow as {near['engine']}")
    else:
        verdict = holds_under("other numbers: the stall and its cure are there, no engine of the list has just these")
    return Finding(setting, ours, verdict, [near["cost_model"]], {"engines": rows})


def _gaps(model: str, gpu: str, tp: int) -> dict[str, Any] | None:
    """Milliseconds between tokens before the prompt comes, and the longest gap after it, under two policies; None where
    the model does not fit."""
    import numpy as np

    from profiler import ProfileError
    from simulator import replay
    from workloads import Trace

    def decodes_and(*prompts: tuple[int, int]) -> Trace:
        arrivals = np.array([0] * DECODES + [at_ns for at_ns, _ in prompts], np.int64)
        lengths = np.array([CONTEXT - 100] * DECODES + [tokens for _, tokens in prompts])
        outputs = np.array([400] * DECODES + [1] * len(prompts))
        return Trace("decodes and a prompt", arrivals, lengths, outputs, outputs)

    before: dict[str, float] = {}
    longest: dict[str, float] = {}
    for policy, knobs in (("prefill_priority", {}), ("chunked", {"chunk_size": CHUNK})):
        options: dict[str, Any] = {
            "policy": policy,
            "knobs": knobs,
            "model": model,
            "gpu": gpu,
            "tp": tp,
            "dtype": "float16",
            "token_budget": 16384 if policy == "prefill_priority" else None,
            "cost_model": chosen_costs(),
            "max_model_len": decodes_and((0, PROMPT)).longest,
            "num_blocks": 4000,  # as many as the claim needs: it says nothing of memory
        }
        try:
            ends, _ = _decoding(replay(decodes_and(), **options), CONTEXT)
            arrival_ns = round(ends[0] * 1e9)
            run = replay(decodes_and((arrival_ns, PROMPT)), **options)
        except ProfileError:
            return None
        ends, gaps = _decoding(run, 0)
        # The gap that the arrival falls into is the last one that the prompt has no part in.
        came = int(np.searchsorted(ends, arrival_ns / 1e9, side="right"))
        before[policy] = float(np.median(gaps[came - 20 : came]))
        longest[policy] = float(gaps[came:].max())
    return {
        "engine": f"{model} on {f'{tp} x ' if tp > 1 else ''}{gpu}",
        "before_ms": 1e3 * before["prefill_priority"],
        "before_chunked_ms": 1e3 * before["chunked"],
        "prefill_priority_ms": 1e3 * longest["prefill_priority"],
        "chunked_ms": 1e3 * longest["chunked"],
        "cost_model": run.config["cost_model"],
    }


def _decoding(run: Any, context: float) -> tuple[Any, Any]:
    """Ends of the iterations in which all decodes take part, from the first on whose mean context is `context`, and the
    time since the iteration with decodes before each."""
    import numpy as np

    ends, decodes, total = (
        run.tables.column("iterations", name) for name in ("end_s", "decodes", "decode_context_total")
    )
    tokens = decodes > 0
    ends, decodes, total = ends[tokens], decodes[tokens], total[tokens]
    wanted = (decodes == DECODES) & (total >= context * DECODES)
    gaps = np.diff(ends, prepend=np.nan)
    return ends[wanted], gaps[wanted]
