"""Bubbles of a deep pipeline with whole prompts and with chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.papers.claim import FAILS, Finding, holds_under

CLAIM = "Bubbles of an 8-stage pipeline of A100s fall from 38 % to under 5 %."


def run(quick: bool) -> Finding:
    from experiments.papers.sarathi_pipeline import GPU, MODEL, bubble_survey
    from profiler import load_cost_model

    rows = bubble_survey(100 if quick else 300, pds=(5, 20) if quick else (2, 5, 10, 15, 20, 50))
    whole = [row["orca"] for row in rows]
    good = [row for row in rows if row["orca"] >= 0.33 and _chunked(row) < 0.05]
    ours = f"whole prompts (orca) {min(whole):.0%} to {max(whole):.0%}; "
    if good:
        near = min(good, key=lambda row: abs(row["orca"] - 0.38))
        ours += (
            f"nearest to the claim: {near['lengths']}, P:D {near['pd']:g}: orca {near['orca']:.1%}, prefill_priority "
            f"{near['prefill_priority']:.1%}, decode_maximal {near['decode_maximal 256']:.1%}, "
            f"chunked {near['chunked 512']:.1%}"
        )
        where = [
            f"{lengths} at P:D {', '.join(format(row['pd'], 'g') for row in good if row['lengths'] == lengths)}"
            for lengths in dict.fromkeys(row["lengths"] for row in good)
        ]
        verdict = holds_under(f"{' and '.join(where)} ({len(good)} of {len(rows)} settings), NVLink between stages")
    else:
        ours += f"with chunks at best {min(map(_chunked, rows)):.1%}"
        verdict = FAILS
    setting = "GPT-3 175B, TP8 PP8 on A100s, all requests waiting; share of in-flight stage time, over P:D and lengths"
    cost = load_cost_model(MODEL, GPU, cost_model="roofline", tp=8, pp=8)
    return Finding(setting, ours, verdict, [cost.name], {"survey": rows})


def _chunked(row: Mapping[str, Any]) -> float:
    """Bubbles of the better policy that chunks."""
    return float(min(row["decode_maximal 256"], row["chunked 512"]))
