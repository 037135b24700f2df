"""How far a prediction may be off by one factor for all shapes of an operator: what `replay --runs` repeats.

That is how an operator is off that was not measured itself: norms of another width, mixed batches where each kind was
measured alone, terms that rest on specifications, the host. The factor is log-normal, with the P90 of whatever
held-out error is nearest as the half-width of 90 %. What was measured is off by another error at every structure
instead (`profiler.operators.fitting.error_sizes`, `profiler.operators.drawn_errors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import numpy as np

HALF_WIDTH_SIGMAS = 1.6449
MEASURED = 0.03
SPECIFIED = 0.30
"""Half-widths of operators without held-out errors: measured curves of norms, activations, all-reduces; and terms that
rest on specifications alone."""
HOST = 0.30
"""Half-width of host time, as a level of a whole run: four vLLM logs lie 29 % below to 21 % above one line through all
of them. Single steps scatter as much again, which a run averages out."""

IN_MEMORY = ", in memory"
"""Ends the names of errors that leave out batches whose keys do not fit on the card beside the model that was profiled,
which no engine can run. A profile of one layer measures them all the same."""

GEMM_OPERATORS = ("qkv", "attention_out", "ffn_up", "ffn_down", "head")
_SOURCES = {
    "gemm": ("gemm rows",),
    "composed gemm": ("gemm rows", "gemm widths", "gemm depths"),
    "decode": ("decode batch sizes", "decode contexts"),
    "prefill": ("prefill chunk sizes", "prefill prefixes"),
    "mixed": ("mixed chunk sizes", "mixed prefixes", "mixed batch sizes", "mixed contexts"),
}


def half_widths(
    errors: Mapping[str, Mapping[str, float]], composed: tuple[str, ...], spreads: frozenset[str] = frozenset()
) -> dict[str, float]:
    """Half-widths of 90 % intervals of what is off by one factor for all its shapes, by operator.

    errors: of the fit, as `profiler.judging.holdout.summary` gives them; where batches that an engine can run were
    told apart,
    theirs count. composed: operators that were not measured in this width, as `Region.composed` names them. spreads:
    names of errors that are drawn from shape to shape (`profiler.operators.fitting.error_sizes`); an operator that
    is told by them has no factor besides.
    """

    def widest(kind: str) -> float:
        found = [errors.get(name + IN_MEMORY, errors[name])["p90"] for name in _SOURCES[kind] if name in errors]
        return max(found, default=SPECIFIED)

    lacking = {name.split(" ")[0] for name in composed}
    widths = {name: widest("composed gemm" if name in lacking else "gemm") for name in GEMM_OPERATORS}
    known_mixed = any(name in errors for name in _SOURCES["mixed"])
    widths |= {"decode": widest("decode"), "prefill": widest("prefill")}
    widths["mixed"] = widest("mixed") if known_mixed else max(widths["decode"], widths["prefill"])
    for name in ("norm", "activation", "rotary", "embedding", "final_norm", "sampler", "all_reduce"):
        widths[name] = SPECIFIED if name in lacking else MEASURED
    told = {name.split(" ")[0] for name in spreads}
    between = {"gemm rows", "gemm widths", "gemm depths"} <= spreads
    known = {name for name in GEMM_OPERATORS if "gemm" in told and (between or name not in lacking)}
    if not any(name.startswith("attention ") for name in composed):
        known |= told & {"decode", "prefill", "mixed"}
    widths = {name: width for name, width in widths.items() if name not in known}
    return {**widths, "gather_logits": SPECIFIED, "qk_norm": SPECIFIED, "host": HOST}


def factors(widths: Mapping[str, float], seed: int) -> dict[str, float]:
    """One factor an operator, drawn from `seed` and the operator's name alone."""
    drawn = {}
    for name, width in widths.items():
        normal = np.random.default_rng([seed, crc32(name.encode())]).standard_normal()
        drawn[name] = float(np.exp(np.log1p(width) / HALF_WIDTH_SIGMAS * normal))
    return drawn
