"""Intervals held against the truth: which structures are left out, and what is said about them."""

from __future__ import annotations

import pandas as pd
import pytest

from experiments.coverage import Covered, by_axis, left_out_halves
from profiler.profile import Profile, make_profile


def gemms_and_decodes() -> Profile:
    rows = [128, 256, 1024, 4096, 8192, 16384]
    gemms = [{"operator": "qkv", "rows": count, "n": 64, "k": 64} for count in rows]
    attention = [
        {"operator": "attention", "decodes": decodes, "decode_context_total": decodes * context,
         "decode_context_max": context, "chunks": chunk}
        for decodes in (1, 20, 40, 80)
        for context in (1024, 4096, 16384, 32768, 65536, 131072)
        for chunk in ("", "64:0", "512:0", "2048:0", "4096:0")
    ]  # fmt: skip
    return make_profile(pd.DataFrame(gemms + attention).assign(device="a gpu", median_s=1e-3), {})


def test_long_contexts_are_left_out_too_but_gemms_only_to_the_rows_that_batches_have() -> None:
    profile = gemms_and_decodes()
    left_out: dict[str, set[float]] = {"rows": set(), "context": set()}
    for axis, _, part in left_out_halves(profile):
        if axis == "rows":
            left_out[axis] |= set(profile.rows_of("qkv")["rows"]) - set(part.rows_of("qkv")["rows"])
        if axis == "context":
            both = [
                p.rows_of("attention").pipe(lambda t: t["decode_context_total"] / t["decodes"]) for p in (profile, part)
            ]
            left_out[axis] |= set(both[0]) - set(both[1])
    assert left_out == {"rows": {256, 1024, 4096, 8192}, "context": {4096, 16384, 32768, 65536}}


def test_an_even_number_of_statistics_has_its_median_between_the_middle_two() -> None:
    found = [Covered("rows", 0, "a trace", "e2e_s_mean", 1 - w, 1 + w, 1.0, truth) for w, truth in ((0.1, 1.0), (0.3, 2.0))]
    row = by_axis(found)[0]
    assert (row.held, row.count) == (1, 2)
    assert (row.mean_width, row.median_error, row.worst_error) == pytest.approx((0.2, 0.25, 0.5))
