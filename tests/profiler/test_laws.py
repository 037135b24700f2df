"""The laws behind attention: waves of blocks counted by hand, interpolation as polynomials, kernels that differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.attention_cells import Axis, evaluated, polynomials
from profiler.attention_fit import fit_attention
from profiler.attention_law import DecodeLaw, decode_us
from profiler.hardware import load_hardware
from profiler.importers import import_profile
from profiler.prefill_law import PrefillLaw, dealt_steps, fit_prefill_law

DATA = Path(__file__).parents[3] / "shared/data/profiles"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="public profiles are not at ../shared/data/profiles")
LAW = PrefillLaw(launch=2.0, step=3.0, block=0.0, write=0.0, slots=188)


def test_blocks_are_dealt_in_waves() -> None:
    # 4096 cached tokens are 32 steps. 256 tokens of 32 heads are 128 blocks, one wave of 188; the last walks 34 steps.
    assert dealt_steps(32, 256, 4096, LAW) == 34
    # 512 tokens are 256 blocks: 68 of them wait. The shortest end after 33 steps, and the longest walks 36.
    assert 33 + 33 <= dealt_steps(32, 512, 4096, LAW) <= 36 + 36
    assert LAW.us(32, 256, 4096, 256) == pytest.approx(2 + 3 * 34)
    # Blocks of one length: 3 waves of 188 for 400.
    assert dealt_steps(400, 1, 1000, LAW) == 3 * 8


def test_the_law_finds_itself() -> None:
    rng = np.random.default_rng(1)
    tokens, prefix = rng.integers(1, 2048, 60), rng.integers(0, 8192, 60)
    truth = PrefillLaw(launch=5.0, step=2.5, block=0.5, write=4.0, slots=108)
    found = fit_prefill_law(16, tokens, prefix, tokens, truth.us(16, tokens, prefix, tokens), sms=108)
    assert found is not None
    assert (found.slots, found.block, found.rows) == (108, 0.5, 64)
    assert (found.launch, found.step, found.write) == pytest.approx((5.0, 2.5, 4.0), rel=1e-3)


def test_split_contexts_pay_for_a_second_kernel() -> None:
    law = DecodeLaw(combine=3.0, split_below=26)
    plain = DecodeLaw()
    extra = [float(decode_us(law, n, c) - decode_us(plain, n, c)) for n, c in ((8, 512), (8, 64), (32, 512))]
    assert extra == pytest.approx([3.0, 0.0, 0.0])


@needs_data
def test_one_decode_is_a_kernel_of_its_own_and_twins_tell_what_uneven_costs() -> None:
    profile = import_profile("llmservingsim", DATA / "llmservingsim/RTX4090/Llama-3.1-8B")
    fit = fit_attention(profile.rows_of("attention"), load_hardware("rtx4090").sms)
    # attention.csv: one decode of 16 tokens 9.31 us, two 13.6.
    assert fit.decode_us([1, 2], [16, 16]).tolist() == pytest.approx([9.31, 13.59], rel=2e-3)
    # The rows of skew.csv with 32 decodes, one of them long: 26 to 27 ns a token beyond the mean.
    assert 0.018 < fit.uneven_decode_us(32) < 0.027
    assert fit.uneven_decode_us(16) < 0.004


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_polynomials_are_the_interpolation(data: st.DataObject) -> None:
    axes = [Axis([0, 3, 10, 40]), Axis([1, 2, 7])]
    values = np.array(data.draw(st.lists(st.floats(0.1, 1e6), min_size=12, max_size=12))).reshape(4, 3)
    x, y = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 9))
    table = polynomials(values, axes)
    found = evaluated(table, axes[0].of(x).reshape(1) * axes[1].cells + axes[1].of(y), [np.array([x]), np.array([y])])
    i = min(int(np.searchsorted(axes[0].knots, x, "right")) - 1, 2)
    j = min(int(np.searchsorted(axes[1].knots, y, "right")) - 1, 1)
    u = (x - axes[0].knots[i]) / (axes[0].knots[i + 1] - axes[0].knots[i])
    w = (y - axes[1].knots[j]) / (axes[1].knots[j + 1] - axes[1].knots[j])
    low = values[i, j] * (1 - w) + values[i, j + 1] * w
    high = values[i + 1, j] * (1 - w) + values[i + 1, j + 1] * w
    assert found[0] == pytest.approx(low * (1 - u) + high * u, rel=1e-9, abs=1e-3)


def test_cells_of_whole_numbers_are_those_of_arrays() -> None:
    axis = Axis([0, 16, 100, 5000])
    assert axis.starts(7)[:5001] == (axis.of(np.arange(5001)) * 7).tolist()
