"""Bubbles of a deep pipeline with whole prompts and with chunks."""

from __future__ import annotations

from experiments.claim import FAILS, Finding, holds_under

CLAIM = "Bubbles of an 8-stage pipeline of A100s fall from 38 % to under 5 %."


def run(quick: bool) -> Finding:
    from experiments.sarathi_pipeline import bubble_survey

    rows = bubble_survey(100 if quick else 300, pds=(5, 20) if quick else (2, 5, 10, 15, 20, 50))
    chunking = ("decode_maximal 256", "chunked 512")
    best = {id(row): min(chunking, key=lambda name, row=row: row[name]) for row in rows}
    good = [row for row in rows if row["orca"] >= 0.33 and row[best[id(row)]] < 0.05]
    low = [row["orca"] for row in rows]
    ours = f"whole prompts (orca) {min(low):.0%} to {max(low):.0%}; "
    if good:
        near = min(good, key=lambda row: abs(row["orca"] - 0.38))
        ours += (
            f"nearest to the claim: {near['lengths']}, P:D {near['pd']:g}: orca {near['orca']:.1%}, prefill_priority "
            f"{near['prefill_priority']:.1%}, decode_maximal {near['decode_maximal 256']:.1%}, "
            f"chunked {near['chunked 512']:.1%}"
        )
        spreads = sorted({str(row["lengths"]) for row in good})
        pds = [row["pd"] for row in good]
        verdict = holds_under(
            f"lengths {' or '.join(spreads)} and P:D from {min(pds):g} to {max(pds):g}, NVLink between stages"
        )
    else:
        ours += f"with chunks at best {min(row[best[id(row)]] for row in rows):.1%}"
        verdict = FAILS
    setting = "GPT-3 175B, TP8 PP8 on A100s, all requests waiting; share of in-flight stage time, over P:D and lengths"
    return Finding(setting, ours, verdict, ["roofline gpt-3-175b a100 tp8 pp8 float16"], {"survey": rows})
