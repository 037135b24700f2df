"""Workloads of papers as settings, and the closed batches of SARATHI's throughput experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.simulation import Run
    from workloads import Trace

CHAT: dict[str, str] = {
    "prompt": "quantiles:0=1,1=12,5=29,10=74,25=580,50=1730,75=3734,90=5696,95=6563,99=7434,100=8141",
    "output": "quantiles:0=2,1=6,5=44,10=84,25=228,50=415,75=628,90=834,95=920,99=998,100=1024",
}
"""openchat_sharegpt4: quantiles of the length file that Sarathi-Serve publishes (30,731 requests of up to 8192 tokens;
median and P90 are those of the paper's Table 2). Prompt and output are all but uncorrelated there (0.04)."""

ARXIV: dict[str, str] = {
    "prompt": "quantiles:0=1000,50=7059,90=12985,100=16000",
    "output": "quantiles:0=20,50=208,90=371,100=900",
}
"""arxiv_summarization up to 16384 tokens: median and P90 of Sarathi-Serve's Table 2; the ends are ours."""

BLOCK = 16


def closed_batches(prompt: int, decodes: int, count: int, first_outputs: Sequence[int] = ()) -> Trace:
    """`count` equal requests that all wait from the start: a prompt, and `decodes` decode iterations after it.

    The first token comes out of the prefill, so a request has decodes + 1 output tokens. first_outputs: decode
    iterations of the first requests, which then end one after another instead of together.
    """
    import numpy as np

    from workloads import Trace

    outputs = np.full(count, decodes + 1)
    outputs[: len(first_outputs)] = np.asarray(first_outputs, np.int64) + 1
    return Trace(
        f"{count} x ({prompt} + {decodes})",
        np.zeros(count, np.int64),
        np.full(count, prompt),
        outputs,
        np.full(count, decodes + 1),
    )


def split_by_ratio(length: int, ratio: float) -> tuple[int, int]:
    """Prefill and decode tokens of a sequence of `length` tokens with prefill : decode = `ratio`."""
    decodes = max(1, round(length / (1 + ratio)))
    return length - decodes, decodes


def closed_run(trace: Trace, slots: int, policy: str, cost: Any, **options: Any) -> Run:
    """Replay closed batches with room for exactly `slots` requests of the longest length."""
    from simulator import replay

    blocks = slots * -(-trace.longest // BLOCK)
    options = {"max_model_len": trace.longest, **options}  # the paper's models had fewer positions than its lengths
    if policy in ("request_level", "orca"):
        options = {"max_batch_size": slots, **options}
    else:
        options = {"max_num_seqs": slots, **options}
    return replay(trace, policy=policy, cost=cost, num_blocks=blocks, block_size=BLOCK, watermark=0.0, **options)


def tokens_per_s(run: Run) -> float:
    """Prefill and decode tokens of all requests over the time that they took."""
    requests = run.tables
    tokens = requests.column("requests", "prompt_tokens").sum() + requests.column("requests", "output_tokens").sum()
    return float(tokens) / float(run.summary["duration_s"])
