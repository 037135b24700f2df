"""Importers read public profiles with their units and traps right."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from policies.work.batch import BatchShape
from profiler.errors import ProfileError
from profiler.measurements.facts import carried_profile, carried_profiles
from profiler.measurements.importers import import_profile
from profiler.measurements.profile import Profile
from profiler.operators.compose import compose
from profiler.operators.fitting.device_fit import fit_device
from profiler.specs.hardware import load_hardware
from profiler.specs.model_config import load_model_spec
from tests.shared_data import ORIGINALS, shared

DATA = ORIGINALS / "profiles"


def seconds(profile: Profile, **values: object) -> float:
    times = profile.only(**values).table["median_s"]
    assert len(times) >= 1
    assert times.max() < 1.02 * times.min()
    return float(times.iloc[0])


def test_llmservingsim_times_are_microseconds_and_skew_covers_three_runs() -> None:
    profile = import_profile("llmservingsim", DATA / "llmservingsim/RTX4090/Llama-3.1-8B")
    assert seconds(profile, operator="ffn_up", rows=16) == pytest.approx(253.327e-6)
    assert profile.rows_of("ffn_up")["n"].unique().tolist() == [28672]
    mixed = profile.only(operator="attention", chunks="512:2048", decodes=16)
    assert seconds(mixed, decode_context_total=16384, decode_context_max=1024) == pytest.approx(353.3e-6, rel=1e-3)
    # skew.csv: 2 decodes of 128 and 512 tokens, 53.343 us for three runs in a row.
    uneven = profile.only(operator="attention", chunks="", decodes=2)
    assert seconds(uneven, decode_context_total=640, decode_context_max=512) == pytest.approx(53.343e-6 / 3)


def test_newer_llmservingsim_tables_say_the_same(tmp_path: Path) -> None:
    """prefill_key = kv_prefill + prefill_chunk / 2; kernels by name; uneven batches listed; a variant's folder."""
    old = DATA / "llmservingsim/RTX4090/Llama-3.1-8B"
    new = tmp_path / "RTX4090/meta-llama/Llama-3.1-8B"
    (new / "bf16/tp1").mkdir(parents=True)
    shutil.copy(old / "meta.yaml", new / "bf16/meta.yaml")
    for name in ("dense.csv", "per_sequence.csv"):
        shutil.copy(old / "tp1" / name, new / "bf16/tp1" / name)
    grid = pd.read_csv(old / "tp1/attention.csv")
    grid["prefill_key"] = (grid["kv_prefill"] + grid["prefill_chunk"] / 2).where(grid["prefill_chunk"] > 0, 0)
    grid = grid.drop(columns="kv_prefill").assign(layer="attention", decode_q_len=1)
    verify = grid[grid["n_decode"] > 0].head(3).assign(decode_q_len=4, time_us=1e6)
    pd.concat([grid, verify]).to_csv(new / "bf16/tp1/attention.csv", index=False)
    pairs = "[[128, 512], [1, 300], [1, 1000]]"
    (new / "bf16/tp1/skew.csv").write_text(f'layer,requests_json,t_skew_us\nattention,"{pairs}",42.5\n')
    table = import_profile("llmservingsim", new).rows_of("attention")
    same = import_profile("llmservingsim", old).rows_of("attention").head(len(grid))
    shape = ["chunks", "decodes", "decode_context_total", "median_s"]
    assert table[shape].head(len(grid)).values.tolist() == same[shape].values.tolist()
    assert table[shape].iloc[-1].tolist() == ["128:512", 2, 1300, pytest.approx(42.5e-6)]
    (new / "bf16/tp1/skew.csv").write_text("layer,requests_json,t_skew_us\nattention,oops,1\n")
    with pytest.raises(ProfileError, match=r"skew.csv: row 2, requests_json: found 'oops'"):
        import_profile("llmservingsim", new)


def test_llmservingsim_all_reduces_lie_beside_the_models_of_a_card(tmp_path: Path) -> None:
    old, card = DATA / "llmservingsim/RTXPRO6000/Llama-3.1-8B", tmp_path / "RTXPRO6000"
    shutil.copytree(old, card / "meta-llama/Llama-3.1-8B/bf16")
    sizes = [(size, 13.0 + size / 40e3) for size in (4096, 524288, 1048576)]
    lines = ["measured:", "  interconnect:", "    npus: 2", "    samples:"]
    for kind, factor in (("all_gather", 7.0), ("all_reduce", 1.0)):
        for size, us in sizes:
            lines += [f"    - collective: {kind}", f"      bytes: {size}", f"      us: {us * factor}"]
    (card / "hardware.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    profile = import_profile("llmservingsim", card / "meta-llama/Llama-3.1-8B/bf16", tensor_parallel=1)
    rows = profile.rows_of("all_reduce")
    assert list(rows["bytes"]) == [4096, 524288, 1048576]
    assert set(rows["tensor_parallel"]) == {2}
    assert list(rows["median_s"]) == pytest.approx([us * 1e-6 for _, us in sizes])
    fit = fit_device(profile, load_hardware("rtxpro6000"))
    assert fit.profiled == (("llama-3.1-8b", 1),), "no model was profiled on two cards"
    two = compose(fit, load_model_spec("qwen3-32b"), load_hardware("rtxpro6000"), tp=2)
    other = compose(replace(fit, collectives=()), load_model_spec("qwen3-32b"), load_hardware("rtxpro6000"), tp=2)
    shape = BatchShape(((2048, 0),), 0, 0, 0, 0, 1)
    per_layer = 2 * (13e3 + 2048 * 5120 * 2 / 40e3 * 1e3)
    assert two.breakdown(shape)["all_reduce"] == pytest.approx(64.5 * per_layer, rel=0.01)  # one for the embedding
    assert other.breakdown(shape)["all_reduce"] == pytest.approx(129 * (13.5e3 + 2048 * 10240 / (0.57 * 64)), rel=0.01)


def test_llmservingsim_degrees_are_told_apart() -> None:
    profile = import_profile("llmservingsim", DATA / "llmservingsim/RTXPRO6000/Llama-3.1-8B")
    heads = profile.rows_of("attention")[["tensor_parallel", "heads", "kv_heads"]].drop_duplicates()
    assert heads.to_numpy().tolist() == [[1, 32, 8], [2, 16, 4]]
    one = import_profile("llmservingsim", DATA / "llmservingsim/RTXPRO6000/Llama-3.1-8B/tp2")
    assert one.table["tensor_parallel"].unique().tolist() == [2]


def test_the_first_form_mixes_nanoseconds_and_milliseconds_and_counts_the_whole_batch() -> None:
    profile = import_profile("llmservingsim-v0", DATA / "llmservingsim/v0/A6000/meta-llama/Llama-3.1-8B")
    assert seconds(profile, operator="ffn_down", rows=128) == pytest.approx(177.0e-6, rel=1e-3)
    assert seconds(profile, operator="attention", chunks="32:0") == pytest.approx(4.352e-6)
    pair = seconds(profile, operator="attention", decodes=2, decode_context_total=2 * 511, decode_context_max=511)
    single = seconds(profile, operator="attention", decodes=1, decode_context_total=511, decode_context_max=511)
    assert pair == pytest.approx(single, rel=0.05)
    # 3072 tokens are 33 keys for each of 93 decodes and 32 for each of 94: a step of 32 more, or none.
    more = seconds(profile, operator="attention", decodes=93, decode_context_max=32)
    fewer = seconds(profile, operator="attention", decodes=94, decode_context_total=94 * 31, decode_context_max=31)
    assert more > 1.4 * fewer


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


def test_aiconfigurator_counts_all_reduce_messages_in_elements_and_contexts_without_the_new_token() -> None:
    profile = import_profile("aiconfigurator", DATA / "aiconfigurator/a100_sxm")
    assert seconds(profile, operator="gemm", rows=8192, n=65536, k=4096) == pytest.approx(15.28754e-3)
    pair = profile.only(operator="all_reduce", tensor_parallel=2)
    assert seconds(pair, bytes=2 * 4194304) == pytest.approx(89.675e-6, rel=1e-4)  # inside a CUDA graph, not eager
    heads = profile.only(operator="attention", heads=32, kv_heads=8)
    assert seconds(heads, chunks="16384:0x4") > 3.5 * seconds(heads, chunks="16384:0")
    assert set(heads.table["decode_context_max"]) >= {1, 1023, 16383}
    assert profile.provenance["licence"].startswith("Apache-2.0")


def vidur_row(operators: dict[str, float], **shape: object) -> dict[str, object]:
    row: dict[str, object] = dict(shape)
    for name, median in operators.items():
        row |= {f"time_stats.{name}.{stat}": median for stat in ("min", "max", "mean", "median")}
        row[f"time_stats.{name}.std"] = 0.0
    return row


def test_vidur_folders_have_milliseconds_and_contexts_of_one_request(tmp_path: Path) -> None:
    import pandas as pd

    folder = tmp_path / "a100/meta-llama/Llama-2-7b-hf"
    folder.mkdir(parents=True)
    linear = {"attn_pre_proj": 0.2, "mlp_up_proj": 0.4, "input_layernorm": 0.01}
    pd.DataFrame([vidur_row(linear, num_tokens=64, num_tensor_parallel_workers=2)]).to_csv(
        folder / "mlp.csv", index=False
    )
    shape = {"num_tensor_parallel_workers": 2, "batch_size": 4, "kv_cache_size": 1000}
    decode = vidur_row(
        {"attn_decode": 0.05, "attn_kv_cache_save": 0.01}, prefill_chunk_size=0, is_prefill=False, **shape
    )
    chunk = vidur_row(
        {"attn_prefill": 0.3, "attn_kv_cache_save": 0.02}, prefill_chunk_size=512, is_prefill=True, **shape
    )
    pd.DataFrame([decode, chunk]).to_csv(folder / "attention.csv", index=False)
    pd.DataFrame([vidur_row({"all_reduce": 0.07}, num_workers=2, size=8192)]).to_csv(
        folder / "all_reduce.csv", index=False
    )
    profile = import_profile("vidur", folder)
    assert seconds(profile, operator="ffn_up", rows=64, n=11008) == pytest.approx(0.4e-3)  # gate and up, half a model
    decodes = profile.only(operator="attention", decodes=4)
    assert seconds(decodes, decode_context_total=4000, decode_context_max=1000) == pytest.approx(0.06e-3)
    assert seconds(profile, operator="attention", chunks="512:1000x4") == pytest.approx(0.32e-3)
    assert seconds(profile, operator="all_reduce", bytes=8192) == pytest.approx(0.07e-3)


TRUTH = DATA.parent / "groundtruth"


def test_splitwise_repeats_tell_the_noise_and_distserve_fits_become_iterations() -> None:
    splitwise = import_profile("splitwise", TRUTH / "splitwise_a100_repeats.csv", model="llama2-70b", tensor_parallel=2)
    prompt = splitwise.only(chunks="512:0", repeats=5).table
    assert len(prompt)
    assert prompt["median_s"].between(0.19, 0.2).any()
    assert (prompt["max_s"] > prompt["min_s"]).all()
    fits = import_profile(
        "distserve", TRUTH / "distserve_profile_fits.csv", system="vLLM 0.2.3-based", tensor_parallel=1
    )
    ms = 22.052204789310185 + 0.14050923870128956 * 512 + 8.076584822611088e-06 * 512**2
    assert seconds(fits.only(model="opt-13b"), chunks="512:0") == pytest.approx(ms * 1e-3)


ORIGINAL = {
    "a6000_llama-3.1-8b": ("llmservingsim-v0", "llmservingsim/v0/A6000/meta-llama/Llama-3.1-8B"),
    "a100": ("aiconfigurator", "aiconfigurator/a100_sxm"),
    "rtx4090_llama-3.1-8b": ("llmservingsim", "llmservingsim/RTX4090/Llama-3.1-8B"),
    "rtxpro6000_llama-3.1-8b": ("llmservingsim", "llmservingsim/RTXPRO6000/Llama-3.1-8B"),
}


@pytest.mark.parametrize("name", ORIGINAL)
def test_rows_of_an_original_are_rows_of_the_carried_profile(name: str) -> None:
    kind, folder = ORIGINAL[name]
    some, whole = import_profile(kind, DATA / folder).table, carried_profile(name).table
    keys = [column for column in some if column not in ("min_s", "max_s")]
    both = some[keys].drop_duplicates().merge(whole[keys].drop_duplicates(), how="left", indicator=True)
    assert len(some) > 100
    assert (both["_merge"] == "both").all(), both[both["_merge"] != "both"].head()


@pytest.mark.originals
@pytest.mark.parametrize("name", ORIGINAL)
def test_whole_originals_are_the_carried_profiles(name: str) -> None:
    kind, folder = ORIGINAL[name]
    pd.testing.assert_frame_equal(import_profile(kind, shared(f"profiles/{folder}")).table, carried_profile(name).table)


def test_an_unknown_carried_profile_is_one_clear_line() -> None:
    assert "h100" in carried_profiles()
    with pytest.raises(ProfileError, match=r"profile 'h999': not carried, expected one of a100, a6000_llama"):
        carried_profile("h999")
