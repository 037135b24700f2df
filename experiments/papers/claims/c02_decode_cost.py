"""What a decode costs once a chunk has paid for the weights."""

from __future__ import annotations

from experiments.papers.chosen_costs import cost_of
from experiments.papers.claim import FAILS, HOLDS, Finding, holds_under
from experiments.papers.step_costs import decode, hybrid, linear_and_attention_ms, prefill

CLAIM = "Decode time per token falls from 15 ms to 1.2 ms, 12 times (the paper: from 12.49 ms to 1.2 ms, 10.4 times)."
MODEL, GPU, CONTEXT = "llama-13b", "a6000", 1024


def run(quick: bool) -> Finding:
    cost = cost_of(MODEL, GPU, dtype="float16")
    times = {}
    for batch in (2, 3, 4, 6, 10):
        alone = linear_and_attention_ms(cost, decode(batch, CONTEXT)) / batch
        with_decodes = linear_and_attention_ms(cost, hybrid(1024 - (batch - 1), 0, batch - 1, CONTEXT))
        riding = (with_decodes - linear_and_attention_ms(cost, prefill(1024))) / (batch - 1)
        times[batch] = (alone, riding, alone / riding)
    alone, riding, factor = times[4]
    reaching = [batch for batch, (_, _, f) in times.items() if f >= 12]
    ours = f"from {alone:.1f} to {riding:.2f} ms, {factor:.1f} times, in the paper's batch of 4; " + ", ".join(
        f"batch {batch}: {f:.1f} times" for batch, (_, _, f) in times.items() if batch != 4
    )
    if factor >= 0.9 * 10.4:
        verdict = HOLDS
    elif reaching:
        verdict = holds_under(f"batches of at most {max(reaching)}; in the paper's batch of 4 it is {factor:.1f} times")
    else:
        verdict = FAILS
    setting = (
        f"{MODEL} on {GPU}, contexts of {CONTEXT}, a chunk that makes 1024 rows with the decodes; linear layers and "
        "attention"
    )
    numbers = {str(batch): {"alone_ms": a, "riding_ms": r, "times": f} for batch, (a, r, f) in times.items()}
    return Finding(setting, ours, verdict, [cost.name], numbers)
