"""Importers read public profiles with their units and traps right."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.errors import ProfileError
from profiler.importers import import_profile
from profiler.profile import Profile

DATA = Path(__file__).parents[3] / "shared/data/profiles"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="public profiles are not at ../shared/data/profiles")


def seconds(profile: Profile, **values: object) -> float:
    times = profile.only(**values).table["median_s"]
    assert len(times) >= 1
    assert times.max() < 1.02 * times.min()
    return float(times.iloc[0])


@needs_data
def test_llmservingsim_times_are_microseconds_and_skew_covers_three_runs() -> None:
    profile = import_profile("llmservingsim", DATA / "llmservingsim/RTX4090/Llama-3.1-8B")
    assert seconds(profile, operator="ffn_up", rows=16) == pytest.approx(253.327e-6)
    assert profile.rows_of("ffn_up")["n"].unique().tolist() == [28672]
    mixed = profile.only(operator="attention", chunks="512:2048", decodes=16)
    assert seconds(mixed, decode_context_total=16384, decode_context_max=1024) == pytest.approx(353.3e-6, rel=1e-3)
    # skew.csv: 2 decodes of 128 and 512 tokens, 53.343 us for three runs in a row.
    uneven = profile.only(operator="attention", chunks="", decodes=2)
    assert seconds(uneven, decode_context_total=640, decode_context_max=512) == pytest.approx(53.343e-6 / 3)


@needs_data
def test_llmservingsim_degrees_are_told_apart() -> None:
    profile = import_profile("llmservingsim", DATA / "llmservingsim/RTXPRO6000/Llama-3.1-8B")
    heads = profile.rows_of("attention")[["tensor_parallel", "heads", "kv_heads"]].drop_duplicates()
    assert heads.to_numpy().tolist() == [[1, 32, 8], [2, 16, 4]]
    one = import_profile("llmservingsim", DATA / "llmservingsim/RTXPRO6000/Llama-3.1-8B/tp2")
    assert one.table["tensor_parallel"].unique().tolist() == [2]


@needs_data
def test_the_first_form_mixes_nanoseconds_and_milliseconds_and_counts_the_whole_batch() -> None:
    profile = import_profile("llmservingsim-v0", DATA / "llmservingsim/v0/A6000/meta-llama/Llama-3.1-8B")
    assert seconds(profile, operator="ffn_down", rows=128) == pytest.approx(177.0e-6, rel=1e-3)
    assert seconds(profile, operator="attention", chunks="32:0") == pytest.approx(4.352e-6)
    pair = seconds(profile, operator="attention", decodes=2, decode_context_total=1024, decode_context_max=512)
    single = seconds(profile, operator="attention", decodes=1, decode_context_total=512, decode_context_max=512)
    assert pair == pytest.approx(single, rel=0.05)


def test_an_unknown_kind_and_an_empty_folder_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="expected one of llmservingsim"):
        import_profile("nsight", tmp_path)
    with pytest.raises(ProfileError, match="no tpN folder"):
        import_profile("llmservingsim", tmp_path)


def test_a_broken_cell_is_named_by_file_row_and_column(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3.1-8B/tp1"
    folder.mkdir(parents=True)
    (folder / "dense.csv").write_text("layer,tokens,time_us\nqkv_proj,1,10\nqkv_proj,two,10\n")
    with pytest.raises(ProfileError, match=r"dense.csv: row 3, tokens: found 'two', expected a number"):
        import_profile("llmservingsim", tmp_path / "Llama-3.1-8B")
