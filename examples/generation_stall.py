"""The two effects that this project is about, in one figure (docs/figures/generation_stall.png).

Left: 32 requests decode; at 0.5 s a prompt of 2,000 tokens arrives. Prefill priority makes every decode wait for all of
it, chunked prefill bounds the gap between two tokens by its token budget.
Right: what one more decode costs in a decode-only batch and beside a prefill chunk (SARATHI's decode-maximal batch).

    python examples/generation_stall.py [OUT.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from metrics.drawing.figure_style import DOUBLE_COLUMN_IN, POLICY_STYLES, house_style, new_figure
from metrics.drawing.log_axis import log_scale
from metrics.measures.token_times import TokenTimes
from policies import BatchShape
from profiler import load_cost_model
from simulator import replay
from workloads import Trace

DECODES, PROMPT, ARRIVES_S = 32, 2000, 0.5


def stall_trace() -> Trace:
    """32 requests in the middle of their answers, and one long prompt at 0.5 s."""
    return Trace(
        "generation stall",
        arrival_ns=np.array([0] * DECODES + [int(ARRIVES_S * 1e9)]),
        prompt_tokens=np.array([64] * DECODES + [PROMPT]),
        output_tokens=np.array([160] * DECODES + [8]),
        max_output_tokens=np.array([160] * DECODES + [8]),
    )


def gaps(policy: str, **knobs: object) -> tuple[np.ndarray, np.ndarray]:
    """Token times and gaps between tokens (seconds) of the first request."""
    run = replay(stall_trace(), policy=policy, model="llama-3.1-8b", gpu="a100", cost_model="roofline", **knobs)
    times = TokenTimes(run.tables).of_request(int(np.argmin(run.tables.column("requests", "request")))) / 1e9
    return times[1:], np.diff(times)


def marginal_decode_ms(chunk: int, batch: int, context: int = 1024) -> float:
    """Milliseconds per decode: the whole batch's without a chunk, what the decodes add to it with one."""
    cost = load_cost_model("llama-13b", "a6000", cost_model="roofline", dtype="float16")
    decodes = BatchShape((), batch, batch * context, context, 0, batch)
    if not chunk:
        return cost.stage_ns(decodes) / batch / 1e6
    alone = BatchShape(((chunk + batch, 0),))
    mixed = decodes._replace(chunks=((chunk, 0),))
    return (cost.stage_ns(mixed) - cost.stage_ns(alone)) / batch / 1e6


def draw(path: Path) -> None:
    """Both panels into one PNG or PDF."""
    with house_style():
        figure, axes = new_figure(DOUBLE_COLUMN_IN, 2.4, 1, 2)
        left, right = axes[0]
        for policy, knobs in (("prefill_priority", {}), ("chunked", {"chunk_size": 256})):
            at, gap = gaps(policy, **knobs)
            left.step(at, gap * 1e3, where="post", label=policy, **POLICY_STYLES[policy].line())
        left.axvline(ARRIVES_S, color="0.5", linewidth=0.8, linestyle=":")
        words = f"{PROMPT:,}-token\nprompt arrives at {ARRIVES_S} s"
        left.text(
            ARRIVES_S + 0.25,
            0.6,
            words,
            fontsize=7,
            color="0.35",
            ha="left",
            va="top",
            transform=left.get_xaxis_transform(),
        )
        left.set(xlabel="time (s)", ylabel="time between tokens (ms)", ylim=(0, None))
        left.legend(loc="upper right")
        batches = [1, 2, 4, 8, 12, 16]
        right.plot(batches, [marginal_decode_ms(0, n) for n in batches], "o--", color="0.35", label="decode-only batch")
        style = POLICY_STYLES["decode_maximal"]
        right.plot(
            batches,
            [marginal_decode_ms(256 - n, n) for n in batches],
            marker=style.marker,
            label="beside a prefill chunk",
            **style.line(),
        )
        right.set(xlabel="decodes in the batch", ylabel="ms per decode", xticks=batches)
        log_scale(right, "y")
        right.legend(loc="upper right")
        figure.savefig(path, dpi=160)


if __name__ == "__main__":
    words = argparse.ArgumentParser(description="Draw what a long prompt does to decodes under two policies.")
    words.add_argument("out", nargs="?", type=Path, default=Path("docs/figures/generation_stall.png"))
    draw(words.parse_args().out)
