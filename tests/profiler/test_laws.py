"""The laws behind attention: waves of blocks counted by hand, interpolation as polynomials, kernels that differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.measurements.facts import carried_profile
from profiler.operators.attention_cells import Axis, evaluated, polynomials
from profiler.operators.fitting.attention_fit import AttentionFit, fit_attention
from profiler.operators.fitting.tabled_mixed import tabled
from profiler.operators.laws.decode_law import DecodeLaw, fit_decode_law, split_by
from profiler.operators.laws.lattice import Lattice
from profiler.operators.laws.mixed_law import MixedLaw, dealt
from profiler.operators.laws.prefill_law import PrefillLaw, dealt_steps, fit_prefill_law
from profiler.operators.laws.smooth_batch_law import BatchLaw
from profiler.specs.hardware import load_hardware

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


def test_a_block_that_has_a_processor_to_itself_is_faster() -> None:
    law = PrefillLaw(launch=0.0, step=1.0, block=0.0, write=0.0, slots=8, alone=0.5)
    # Four blocks of 1, 1, 2, 2 steps on four processors: the longest alone. A fifth (of 3) shares with the first: one
    # step beside it, two alone.
    assert dealt_steps(1, 256, 0, law) == pytest.approx(2 * 0.5)
    assert dealt_steps(1, 320, 0, law) == pytest.approx(1 + 2 * 0.5)
    # Sixteen blocks of one length fill all slots twice.
    assert dealt_steps(16, 1, 100, law) == pytest.approx(2.0)


def test_finding_a_block_among_many_decodes_takes_time_until_the_host_plans() -> None:
    law = DecodeLaw(launch=10.0, wave=0.0, step=0.0, stream=0.0, seek=5.0, seek_many=2.0, streams=1, even=True)
    assert law.us([1, 992, 993], [64, 64, 64]).tolist() == pytest.approx([10.005, 14.96, 11.986], abs=1e-6)


def test_streams_shared_out_evenly_are_split_from_the_second_step_on_while_they_are_few() -> None:
    law = DecodeLaw(launch=10.0, combine=2.0, wave=0.0, step=0.0, stream=0.0, streams=8, slots=132, even=True)
    assert law.us([8, 8, 14], [100, 300, 300]).tolist() == pytest.approx([10.0, 12.0, 10.0], abs=1e-6)


def test_a_known_cache_is_not_fitted() -> None:
    from profiler.operators.laws.decode_law import fit_decode_law

    decodes, context = (axis.ravel() for axis in np.meshgrid(2.0 ** np.arange(8), 2.0 ** np.arange(4, 15) - 1))
    truth = DecodeLaw(launch=10.0, wave=1.0, step=1.0, stream=0.15, warm=0.2, cache=97.0, slots=132, even=True)
    us, heads = truth.us(decodes, context, heads=np.full(len(decodes), 4.0)), np.full(len(decodes), 4.0)
    law = fit_decode_law(decodes, context, us, sms=132, heads=heads, kernel="fa3", cache=97.0)
    assert law.cache == 97.0
    assert np.abs(law.us(decodes, context, heads=heads) / us - 1).max() < 0.05


def test_split_contexts_pay_for_a_second_kernel() -> None:
    law = DecodeLaw(combine=3.0, wave=0.0, step=0.0, stream=0.0, streams=8, slots=128, splits=128)
    # 26 x 8 streams are beyond 0.8 of two blocks on each of 128 processors; 64 tokens fill one step only.
    assert law.us([8, 8, 26], [512, 64, 512]).tolist() == pytest.approx([13.0, 10.0, 10.0], abs=1e-6)


def test_streams_are_split_as_flash_attention_does() -> None:
    # 64 streams of 9 steps on 2 x 128 slots: 1, 2, 3, 5 and 9 parts shorten them and fill 0.25, 0.5, 0.75, 0.63 and 0.75
    # of their waves; 3 is the first within 0.85 of the best. From 205 streams (0.8 of the slots) on none is split.
    assert split_by([64, 128, 205, 8], [9, 3, 9, 1], 128).tolist() == [3, 2, 1, 1]


def test_decodes_run_in_waves_until_memory_is_too_slow() -> None:
    law = DecodeLaw(launch=8.0, wave=1.0, step=2.0, stream=0.0, streams=8, slots=128)
    # 16 decodes are one wave, 17 are two; 127 tokens and the new one are one step.
    assert law.us([16, 17, 32], [127, 127, 127]).tolist() == pytest.approx([11.0, 14.0, 14.0])
    warm = DecodeLaw(launch=8.0, wave=0.0, step=0.0, stream=0.1, warm=0.5, cache=100.0, streams=8, even=True)
    # 8 decodes of 1,000 are 64 thousand tokens of a stream: in a cache of 100; of 3,000: beyond it.
    assert warm.us([8, 8], [1000, 3000]).tolist() == pytest.approx([8 + 3.2, 8 + 19.2])


MIXED = MixedLaw(
    launch=4.0,
    step=4.0,
    block=0.0,
    decode_block=0.0,
    empty=0.0,
    write=0.0,
    read=0.5,
    cache=165.0,
    apart=0.0,
    beside=0.0,
    slots=128,
    rows=64,
    stride=128,
    sharing=4,
)


def test_kernels_that_split_nothing_step_by_their_own_stride_and_an_odd_wave_costs_more() -> None:
    law = DecodeLaw(launch=2.0, wave=0.5, step=1.5, stream=0.0, solo=0.2, streams=32, slots=84, stride=32)
    # 32 blocks are one wave, 96 two, 192 three; 31 tokens and their own are one step of 32, 32 two.
    assert law.us([1, 3, 6], 31).tolist() == pytest.approx([2 + 1.2 * 2.0, 2 + 2 * 2.0, 2 + 3.2 * 2.0])
    assert law.us([1, 3, 6], 32).tolist() == pytest.approx([2 + 1.2 * 3.5, 2 + 2 * 3.5, 2 + 3.2 * 3.5])


def test_the_stride_of_such_a_kernel_shows_in_its_times() -> None:
    rng = np.random.default_rng(2)
    decodes, context = rng.integers(1, 64, 300), rng.integers(1, 2000, 300)
    truth = DecodeLaw(launch=2.0, wave=0.5, step=1.5, stream=0.05, join=4.0, solo=0.2, streams=32, slots=84, stride=64)
    found = fit_decode_law(decodes, context, truth.us(decodes, context), sms=84, heads=32, kernel="fa2 whole")
    assert found.stride == 64
    assert found.resized(32).us(decodes, context) == pytest.approx(truth.us(decodes, context), rel=0.05)


def test_contexts_of_one_decode_alone_are_told_by_prices_of_its_own() -> None:
    profile = carried_profile("rtx4090_llama-3.1-8b")
    table = profile.rows_of("attention")
    alone = table[(table["chunks"] == "") & ~table["backend"].str.contains("twin")]
    kept = alone[~alone["decode_context_max"].isin([64, 128])]
    fit = fit_attention(kept, load_hardware("rtx4090").sms)
    # attention.csv: 9.43 us at 64 tokens, 12.98 at 128, where a second kernel puts two parts together.
    assert fit.decode_us([1, 1], [64, 128]).tolist() == pytest.approx([9.43, 12.98], rel=0.03)


def test_decodes_beside_a_chunk_are_dealt_between_its_blocks() -> None:
    # 64 tokens on 960 are 8 steps, three decodes of 1,000 the same: 4 blocks a head, 32 heads, one wave of 128.
    assert dealt(32, np.array([[64.0, 960.0, 3.0, 1000.0]]), MIXED).tolist() == [8.0]
    # One decode more makes 160 blocks: a second wave.
    assert dealt(32, np.array([[64.0, 960.0, 4.0, 1000.0]]), MIXED).tolist() == [16.0]
    # Many heads are dealt from the last waves on and the rest spread evenly; all blocks alike show no difference.
    assert dealt(32, np.array([[64.0, 960.0, 127.0, 1000.0]]), MIXED)[0] == pytest.approx(32 * 8)


def test_a_cache_that_overflows_makes_every_head_wait_for_memory() -> None:
    # 128 decodes fill all processors, so the four heads of a KV head run one after another: 32 x 9 steps of 4 us.
    fits, overflows = MIXED.us(32, 16, 0, 128, [1024, 4096])
    steps = dealt(32, np.array([[16.0, 0.0, 128.0, 1024.0], [16.0, 0.0, 128.0, 4096.0]]), MIXED)
    # 131 thousand tokens fit, so one head of four waits for its 65 us of reading; 524 thousand do not: all four wait.
    assert fits == pytest.approx(4 + 4 * steps[0] + 8 * (0.5 * 131.072 - 4 * steps[0] / 32))
    assert overflows == pytest.approx(4 + 4 * steps[1] + 32 * (0.5 * 524.288 - 4 * steps[1] / 32))


def test_the_cache_of_a_card_shows_in_its_mixed_batches() -> None:
    profile = carried_profile("rtx4090_llama-3.1-8b")
    rows = profile.rows_of("attention")
    short = rows["chunks"].isin([f"{tokens}:{prefix}" for tokens in (16, 256) for prefix in (0, 4096)])
    fit = fit_attention(rows[(rows["decodes"] == 0) | short & rows["decodes"].isin((8, 64, 128))], 128)
    assert fit.mixed_law is not None
    # 72 MB and 1,008 GB/s on the datasheet; 512 bytes a token of one KV head.
    assert 60e6 < fit.mixed_law.cache * 512e3 < 100e6
    assert 0.85 < 512e3 / (fit.mixed_law.read * 1e-6) / 1008e9 < 1.0
    # A batch size between the measured ones, by the law itself and from the tables that ship.
    between = ([16, 256], [0, 4096], 36, 1024)
    assert tabled(fit).batch_us(*between) == pytest.approx(fit.batch_us(*between), rel=0.05)


def test_one_decode_is_a_kernel_of_its_own_and_twins_tell_what_uneven_costs() -> None:
    profile = carried_profile("rtx4090_llama-3.1-8b")
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


def test_between_measured_batch_sizes_law_and_line_meet_halfway() -> None:
    decodes, context = (axis.ravel() for axis in np.meshgrid([2.0, 8.0, 32.0], [128.0, 1024.0], indexing="ij"))
    law = DecodeLaw(streams=8.0)
    grid = Lattice.from_points([decodes, context], np.full(6, 0.1))
    fit = AttentionFit(32, 8, 128, 128, BatchLaw(), law, {"decode": grid}, straight=0.5)
    measured = law.us(decodes, context) * np.exp(0.1)
    assert fit.decode_us(decodes, context) == pytest.approx(measured)
    ends = fit.decode_us([8.0, 32.0], 1024.0)
    line = ends[0] + (ends[1] - ends[0]) * 4.0 / 24.0
    assert fit.decode_us(12.0, 1024.0) == pytest.approx(np.sqrt(line * law.us(12.0, 1024.0) * np.exp(0.1)))
