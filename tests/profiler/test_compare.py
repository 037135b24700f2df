"""Ways of predicting beside each other: the learners, and a nested choice that never sees the answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from profiler.errors import ProfileError
from profiler.judging.compare_learners import Structure, _compared, text
from profiler.judging.left_out_gemms import STRUCTURE, scattered
from profiler.judging.left_out_gemms import text as singles_text
from profiler.measurements.profile import Profile, make_profile, write_profile
from profiler.operators.fitting.learners import GaussianProcess
from profiler.operators.laws.gemm_law import GemmLaw
from profiler.specs.hardware import load_hardware
from tests.hardening.command_line import run

WIDE = [512, 1024, 1536, 2048, 3072, 4096, 6144, 8192]


def test_a_gaussian_process_carries_a_smooth_miss_between_its_points() -> None:
    rng = np.random.default_rng(2)
    points = rng.uniform(0, 6, (200, 2))
    wave = 0.2 * np.sin(points[:, 0]) + 0.05 * points[:, 1]
    learnt = GaussianProcess().fit(points[:150], wave[:150])
    assert learnt(points[150:]) == pytest.approx(wave[150:], abs=0.03)


def test_a_nested_choice_takes_the_law_where_the_law_is_right() -> None:
    decodes, context = (axis.ravel() for axis in np.meshgrid(2.0 ** np.arange(8), [16.0, 128.0, 1024.0, 4096.0]))
    us = 10 + decodes * context / 1000
    shape = Structure(
        "decode batch sizes",
        decodes,
        us,
        np.log2(np.stack([decodes, context], axis=1)),
        np.full(len(us), True),
        lambda known: (us, us * 1.1),
    )
    found = {row.method: row for row in _compared("decode batch sizes", [shape])}
    assert found["law"].p95 == 0.0
    assert found["law + table"].median == pytest.approx(0.1)
    assert found["nested"].chosen == ("law", "law")
    assert found["nested"].p95 == 0.0
    assert found["forest, no law"].median > 0.02
    assert "chosen inside: law, law" in text(list(found.values()))


def kernel_table(seed: int, shared: float, own: float) -> Profile:
    """GEMMs of a law; noise of `shared` that any card repeats, of `own` that none does."""
    law = GemmLaw((0.8,) * 8, 0.9, 4.0, 1.0, 132, 989e6, 3.35e6)
    m, n, k = (axis.ravel() for axis in np.meshgrid([8, 64, 256, 512, 1024, 2048], WIDE, WIDE, indexing="ij"))
    miss = np.random.default_rng(0).normal(0, shared, len(m)) + np.random.default_rng(seed).normal(0, own, len(m))
    table = {"operator": "gemm", "device": "NVIDIA H100", "dtype": "bfloat16", "rows": m, "n": n, "k": k}
    return make_profile(pd.DataFrame({**table, "median_s": law.us(m, n, k) * np.exp(miss) * 1e-6}), {})


def test_what_single_shapes_are_missed_by_is_noise_unless_another_card_repeats_it() -> None:
    hardware = load_hardware("h100")
    own = scattered(kernel_table(1, 0.0, 0.05), hardware, kernel_table(2, 0.0, 0.05))
    found = {row.method: row for row in own if row.structure == STRUCTURE}
    # Normal noise of 5 %: its median is 0.674 of that, and no learner gets below it.
    assert min(row.median for row in found.values()) > 0.02
    assert found["law"].median < 0.08
    assert found["the other card's time"].median > 0.03
    repeated = scattered(kernel_table(1, 0.05, 0.0), hardware, kernel_table(2, 0.05, 0.0))
    found = {row.method: row for row in repeated if row.structure == STRUCTURE}
    assert found["the other card's time"].p95 < 1e-6
    assert found["trees"].median > 0.02
    assert found["boosting, shown that time"].median < found["boosting"].median / 2
    assert "the other card's time" in singles_text(repeated)


def test_the_command_leaves_single_shapes_out_and_refuses_what_it_would_ignore(tmp_path: Path) -> None:
    one, other = tmp_path / "one.parquet", tmp_path / "other.parquet"
    write_profile(kernel_table(1, 0.05, 0.0), one)
    write_profile(kernel_table(2, 0.05, 0.0), other)
    ended = run("profiler", "compare", one, "--scattered", "--beside", other, "--json")
    rows = json.loads(ended.out)
    assert ended.code == 0
    assert {row["structure"] for row in rows} >= {STRUCTURE, "16 to 128 rows"}
    assert max(row["p95"] for row in rows if row["method"] == "the other card's time") < 1e-3
    for arguments in (["--beside", other], ["--scattered", "--only", "gemm"]):
        refused = run("profiler", "compare", one, *arguments)
        assert refused.code == 2
        assert "--scattered" in refused.err


def test_single_shapes_are_left_out_of_grids_only() -> None:
    table = kernel_table(1, 0.0, 0.05).table
    few = make_profile(table[(table["n"] < 1100) & (table["k"] < 1100)], {})
    with pytest.raises(ProfileError, match="no grid"):
        scattered(few, load_hardware("h100"))
