"""Fits and what they claim: laws that behave like kernels, and errors on structures left out."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from profiler.__main__ import build
from profiler.judging.holdout import held_out, summary
from profiler.measurements.facts import STEP_LOGS, carried_profile
from profiler.measurements.profile import Profile
from profiler.operators.fitting.error_factors import factors, half_widths
from profiler.operators.fitting.folds import folds
from profiler.operators.laws.decode_law import DecodeLaw
from profiler.operators.laws.gemm_law import GemmLaw, curve_us, fit_gemm_law
from profiler.operators.laws.lattice import Lattice
from profiler.operators.laws.row_curves import RowCurve
from profiler.operators.laws.smooth_batch_law import BatchLaw, batch_us, chunk_share_us, context_steps
from profiler.specs.hardware import load_hardware
from tests.shared_data import ORIGINALS

LAW = GemmLaw((0.8,) * 8, memory=0.8, launch_us=3.0, tile_us=0.0, sms=100, flops_per_us=300e6, bytes_per_us=2e6)


def test_a_gemm_of_few_rows_streams_its_weights_and_of_many_rows_is_flops() -> None:
    assert LAW.us(1, 16384, 4096) == pytest.approx(3 + 2 * 16384 * 4097 / 1.6e6, rel=0.02)
    assert LAW.us(16384, 16384, 4096) == pytest.approx(2 * 16384**2 * 4096 / 240e6, rel=0.05)


def test_a_law_knows_steps_between_measured_row_counts() -> None:
    rows = np.array([128.0, 256.0, 512.0])
    curve = RowCurve("gemm", 12800, 4096, rows, 1.1 * LAW.us(rows, 12800, 4096))
    assert curve_us(LAW, curve, 300) == pytest.approx(1.1 * LAW.us(300, 12800, 4096))
    assert curve_us(LAW, curve, 257) > 1.1 * curve_us(LAW, curve, 256)


def test_a_law_is_found_again_from_its_own_times() -> None:
    rows = 2.0 ** np.arange(0, 13)
    curves = tuple(RowCurve("gemm", n, k, rows, LAW.us(rows, n, k)) for n in (1024, 4096, 8192) for k in (1024, 4096))
    found = fit_gemm_law(curves, load_hardware("a100"))
    assert found is not None
    error = np.concatenate([found.us(rows, c.n, c.k) / c.us - 1 for c in curves])
    assert np.median(np.abs(error)) < 0.03


def test_while_every_block_has_a_processor_only_the_longest_counts() -> None:
    law = BatchLaw(write=0.0, join=8.0)
    one, two = (batch_us(law, 32, 128, tokens, 4096, 0, 0) for tokens in (64, 128))
    assert two == pytest.approx(one, rel=0.05)  # 32 and 64 blocks on 128 processors
    eight = batch_us(law, 32, 128, 512, 4096, 0, 0)
    assert eight < batch_us(law, 32, 128, 1024, 4096, 0, 0) < 3 * eight


def test_a_further_chunk_adds_its_share_of_the_machine() -> None:
    law = BatchLaw()
    alone = batch_us(law, 32, 128, 64, 8192, 0, 0)
    assert chunk_share_us(law, 32, 128, 64, 8192) == pytest.approx((alone - law.launch) / 4, rel=0.1)


def test_contexts_in_use_lie_half_a_step_above_their_tokens() -> None:
    contexts = np.arange(1000, 3000)
    assert context_steps(contexts).mean() == pytest.approx(context_steps(contexts, typical=True).mean(), rel=1e-3)
    assert context_steps(1024) == 9
    assert DecodeLaw().us(32, 1024, typical=True) < DecodeLaw().us(32, 1024)


def test_a_lattice_repeats_its_points_fills_holes_and_keeps_to_its_edges() -> None:
    grid = Lattice.from_points([[1, 1, 8, 8, 64], [0, 100, 0, 100, 0]], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert grid([1, 8, 64], [100, 0, 0]).tolist() == [2.0, 3.0, 5.0]
    assert grid(64, 100) == pytest.approx(4.0)  # filled along its own line: nothing else is known at 100 beyond 8
    assert grid(1000, 0) == 5.0
    scattered = Lattice.from_scatter([[0, 10, 100]], [[0, 0, 10, 100]], [1.0, 3.0, 4.0, 5.0])
    assert scattered([0, 10, 100]).tolist() == [2.0, 4.0, 5.0]


def test_folds_leave_out_whole_values_and_never_a_twin() -> None:
    one, two = folds(np.array([1, 2, 64, 128, 129, 256, 257, 512]))
    assert set(one) | set(two) == {2, 64, 128, 129, 256, 257}
    assert {128, 129} <= set(one) or {128, 129} <= set(two)


def test_structures_left_out_are_predicted_within_the_aims_where_the_grid_allows() -> None:
    profile = carried_profile("rtx4090_llama-3.1-8b")
    mixed = (profile.table["chunks"] != "") & (profile.table["decodes"] > 0)
    alone = Profile(profile.table[~mixed].reset_index(drop=True), {})
    errors = summary(held_out(alone, load_hardware("rtx4090"), iterations=False))
    for name in ("gemm rows", "prefill prefixes", "decode contexts"):
        assert errors[name]["median"] < 0.02, name
        assert errors[name]["p95"] < 0.1, name
    for name, error in errors.items():
        assert 0.8 <= error["coverage"] <= 0.99, (name, error)


def test_the_first_form_is_told_by_its_kernels_own_tiles() -> None:
    profile = carried_profile("a6000_llama-3.1-8b")
    attention = Profile(profile.rows_of("attention").reset_index(drop=True), {})
    errors = summary(held_out(attention, load_hardware("a6000"), iterations=False))
    assert set(errors) == {f"decode {axis}" for axis in ("batch sizes", "contexts")} | {
        f"prefill {axis}" for axis in ("chunk sizes", "prefixes")
    }
    for name, error in errors.items():
        assert error["median"] < 0.02, name
        assert error["p95"] < 0.08, name


def test_batches_that_no_engine_can_run_are_told_apart() -> None:
    """Llama-3.1-8B leaves an RTX 4090 room for some 40,000 tokens; its profile goes on to 256 decodes of 16,384."""
    profile = carried_profile("rtx4090_llama-3.1-8b")
    table = profile.rows_of("attention")
    decodes = Profile(table[table["chunks"] == ""].reset_index(drop=True), {})
    tables = held_out(decodes, load_hardware("rtx4090"), iterations=False)
    whole, fitting = tables["decode batch sizes"], tables["decode batch sizes, in memory"]
    assert whole["decode_context_total"].max() == 128 * 16384
    assert fitting["decode_context_total"].max() == 32768
    assert len(fitting) == (whole["decode_context_total"] <= 32768).sum()


def test_intervals_are_wider_where_nothing_was_measured() -> None:
    errors = {"gemm rows": {"p90": 0.03}, "gemm widths": {"p90": 0.1}, "decode contexts": {"p90": 0.05}}
    measured, composed = half_widths(errors, ()), half_widths(errors, ("ffn_up 28672x4096", "norm"))
    assert (measured["ffn_up"], composed["ffn_up"], composed["ffn_down"]) == (0.03, 0.1, 0.03)
    assert measured["norm"] < composed["norm"]
    assert measured["mixed"] == measured["prefill"] > measured["decode"]
    assert factors(measured, 1) == factors(measured, 1) != factors(measured, 2)


def test_import_and_fit_from_the_command_line(tmp_path: Path) -> None:
    run = CliRunner().invoke
    source = str(ORIGINALS / "profiles/llmservingsim/RTX4090/Llama-3.1-8B")
    made = run(build(), ["import", "llmservingsim", source, "--out", str(tmp_path / "p.parquet")])
    assert made.exit_code == 0, made.output
    fitted = run(build(), ["fit", str(tmp_path / "p.parquet"), "--out", str(tmp_path / "m.json"), "--no-check"])
    assert fitted.exit_code == 0, fitted.output
    assert "rtx4090, 11 operators" in fitted.output


def test_a_step_log_of_vllm_calibrates_what_no_kernel_profile_knows(tmp_path: Path) -> None:
    run = CliRunner().invoke
    log = STEP_LOGS / "steps_fp32_t2q_512.parquet"
    done = run(build(), ["refine", "rtx4090", "--run", str(log), "--model", "tiny", "--out", str(tmp_path / "m.json")])
    assert done.exit_code == 0, done.output
    shown = run(build(), ["report", str(tmp_path / "m.json")])
    assert "CALIBRATED on log steps_fp32_t2q_512.parquet" in shown.output
    assert "host_before_us" in shown.output


def test_a_report_names_errors_region_noise_and_worst_cases(tmp_path: Path) -> None:
    shown = CliRunner().invoke(build(), ["report", "h100", "--figures", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    for part in ("Apache-2.0", "errors on structures left out", "noise floor", "worst cases", "gemm widths"):
        assert part in shown.output
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".pdf", ".pdf", ".png", ".png"]


def test_a_fit_of_whole_iterations_has_a_report_too(tmp_path: Path) -> None:
    from profiler.iterations.iteration_file import write_fit
    from profiler.iterations.iteration_model import AMOUNTS, HOST_AMOUNTS, ROW_TERMS, Bounds, IterationFit

    file = tmp_path / "cpu.json"
    bounds = Bounds(rows=64, sampled=8, chunks=1, tokens=64, prefix=0, decodes=8, context=128, context_total=1024)
    errors = {"shapes": 70.0, "held_out_median": 0.021, "held_out_p95": math.nan}  # too few shapes for a P95
    prices = ((1.0,) * len(ROW_TERMS), (1.0,) * len(AMOUNTS), (1.0,) * len(HOST_AMOUNTS), (1.0, 1.0))
    write_fit(IterationFit("a cpu", "tiny", "float32", "eager", *prices, bounds, errors=errors), file)
    shown = CliRunner().invoke(build(), ["report", str(file)])
    assert shown.exit_code == 0, shown.output
    for part in ("tiny on a cpu", "128 context", "errors over 70 shapes: held out median 2.1%"):
        assert part in shown.output
    assert "p95" not in shown.output
