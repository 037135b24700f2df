"""The fitted cost model: measured points come back, paths agree, files from strangers do no harm."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.work.batch import BatchShape
from profiler.cost_model import CostModel
from profiler.errors import ProfileError
from profiler.load import load_cost_model
from profiler.measurements.facts import carried_profile
from profiler.operators.compose import compose
from profiler.operators.engine_terms import EngineTerms
from profiler.operators.fitted_model import FittedModel, find_fitted
from profiler.operators.fitting.device_fit import DeviceFit, fit_device
from profiler.operators.fitting.model_file import read_model, write_model
from profiler.operators.laws.gemm_law import curve_us
from profiler.operators.laws.row_curves import RowCurve
from profiler.specs.hardware import load_hardware
from profiler.specs.model_config import load_model_spec
from profiler.specs.shape_columns import ShapeColumns

PLAIN = EngineTerms(graph_padding=False, uneven_contexts=False, compiled=False)


@cache
def shipped(gpu: str = "rtx4090") -> DeviceFit:
    path = find_fitted(gpu)
    assert path is not None
    return read_model(path)


@cache
def model(gpu: str = "rtx4090", terms: EngineTerms | None = None, pp: int = 1) -> FittedModel:
    return compose(shipped(gpu), load_model_spec("llama-3.1-8b"), load_hardware(gpu), terms=terms, pp=pp)


@st.composite
def shapes(draw: st.DrawFn) -> BatchShape:
    chunks = draw(st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 200_000)), max_size=4))
    contexts = draw(st.lists(st.integers(0, 150_000), max_size=5))
    times = draw(st.integers(1, 400)) if contexts else 1
    decodes = len(contexts) * times
    return BatchShape(
        tuple(chunks),
        decodes,
        sum(contexts) * times,
        max(contexts, default=0),
        draw(st.integers(0, 300)),
        draw(st.integers(0, 2000)),
        draw(st.sampled_from([0, 64, 512])),
    )


def test_it_is_a_cost_model_and_says_what_it_rests_on() -> None:
    fitted = load_cost_model("llama-3.1-8b", "rtx4090")
    assert isinstance(fitted, CostModel)
    assert (fitted.kind, fitted.calibrated, fitted.name) == ("fitted", True, "fitted llama-3.1-8b rtx4090 tp1 bfloat16")
    provenance = json.loads(json.dumps(fitted.provenance()))
    assert provenance["device_fit"]["licence"].startswith("MIT")


@settings(max_examples=60, deadline=None)
@given(st.lists(shapes(), min_size=1, max_size=6), st.sampled_from([1, 3]))
def test_scalar_vector_and_repeated_forms_give_equal_integers(batch: list[BatchShape], pp: int) -> None:
    fitted = model(pp=pp)
    for stage in range(pp):
        scalar = [fitted.stage_ns(shape, stage) for shape in batch]
        assert fitted.predict_ns(batch, stage).tolist() == scalar
        assert fitted.predict_ns(ShapeColumns.of(batch), stage).tolist() == scalar
        shape = batch[0]
        later = [
            shape._replace(
                decode_context_total=shape.decode_context_total + step * shape.decodes,
                decode_context_max=shape.decode_context_max + step * (shape.decodes > 0),
            )
            for step in range(3)
        ]
        assert fitted.repeat_ns(shape, 3, stage).tolist() == [fitted.stage_ns(one, stage) for one in later]
        # Short and long repeats go different ways.
        assert fitted.repeat_ns(shape, 200, stage)[:90].tolist() == fitted.repeat_ns(shape, 90, stage).tolist()


@pytest.mark.parametrize("gpu", ["rtx4090", "rtxpro6000", "a6000", "a100", "h100", "h200"])
def test_columns_find_the_main_chunk_that_scalars_find(gpu: str) -> None:
    fitted = model(gpu)
    usual = [(512, 4000), (300, 100), (37, 9000), (64, 0)]
    batches = {
        "several sizes": [usual[: 1 + at % 4] for at in range(9)],
        "equal chunks": [usual, [(100, 700)] * 3, [(64, 128), (128, 0), (64, 128)]],
        "chunks longer than the table": [usual, [(20_000, 5), (30_000, 0)]],
        "chunks of no token": [usual, [(0, 900), (0, 800)], [(0, 5), (7, 5)]],
        "shares that an integer cannot hold": [usual, [(16_000, 2_000_000)] * 60],
    }
    for name, chunks in batches.items():
        for decodes, context, longest in ((0, 0, 0), (3, 3000, 1500), (40, 80_000, 12_000)):
            mixture = [BatchShape(tuple(each), decodes, context, longest, 0, 1) for each in chunks]
            mixture += [BatchShape((), 5, 5000, 1200, 0, 5), BatchShape((), 0, 0, 0, 8, 0)]
            mixture = [shape for pair in zip(mixture, mixture[::-1], strict=True) for shape in pair]
            assert fitted.predict_ns(mixture).tolist() == [fitted.stage_ns(shape) for shape in mixture], name


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_one_call_for_an_iteration_gives_the_same_numbers(shape: BatchShape) -> None:
    fitted, staged = model(), model(pp=3)
    plain = (*fitted.host_ns(shape), fitted.stage_ns(shape), fitted.inside(shape))
    assert fitted.iteration_ns(shape) == plain
    assert staged.stages_ns(shape) == [(staged.stage_ns(shape, s), staged.send_ns(shape, s)) for s in range(3)]


@settings(max_examples=40, deadline=None)
@given(shapes(), st.sampled_from([1, 3]))
def test_a_breakdown_sums_exactly(shape: BatchShape, pp: int) -> None:
    fitted = model(pp=pp)
    whole = sum(fitted.host_ns(shape))
    whole += sum(fitted.stage_ns(shape, stage) + fitted.send_ns(shape, stage) for stage in range(pp))
    assert sum(fitted.breakdown(shape).values()) == whole


def test_measured_points_come_back() -> None:
    profile = carried_profile("rtx4090_llama-3.1-8b")
    fitted = compose(
        fit_device(profile, load_hardware("rtx4090")),
        load_model_spec("llama-3.1-8b"),
        load_hardware("rtx4090"),
        terms=PLAIN,
    )
    parts = fitted.breakdown(BatchShape(((512, 2048),), 16, 16384, 1024, 0, 17))
    # attention.csv: 512,2048,16,1024 -> 353.3 us, where each decode has just begun a ninth step of 128 tokens: contexts
    # near 1024 begin 8.5 on average. dense.csv: 528 tokens -> 954.693 us.
    assert 0.96 * 32 * 353.3e3 < parts["mixed_attention"] < 32 * 353.3e3
    assert parts["ffn_up"] == pytest.approx(32 * 954.693e3, rel=1e-5)
    assert parts["sampler"] == pytest.approx(32.9803e3 - 3 * (32.9803e3 - 31.519e3) / 4, rel=1e-4)
    alone = fitted.breakdown(BatchShape((), 64, 64 * 1024, 1024, 0, 64))
    assert 0.95 * 32 * 333.3e3 < alone["attention"] < 32 * 333.3e3
    chunk = fitted.breakdown(BatchShape(((512, 2048),), 0, 0, 0, 0, 1))
    assert chunk["attention"] == pytest.approx(32 * 165.9e3, rel=1e-3)


def test_a_profile_twice_as_slow_predicts_twice_the_time() -> None:
    profile = carried_profile("rtx4090_llama-3.1-8b")
    hardware, spec = load_hardware("rtx4090"), load_model_spec("llama-3.1-8b")
    terms = EngineTerms(compiled=False)
    batch = [BatchShape(((300, 0), (200, 900)), 40, 40_000, 3000, 0, 42), BatchShape((), 7, 7000, 1800, 0, 7)]
    one, two = (
        compose(fit_device(table, hardware), spec, hardware, terms=terms).predict_ns(batch)
        for table in (profile, profile.scaled(2.0))
    )
    # The laws are refitted, so equality holds to the precision of the fit's own optimiser.
    assert two / one == pytest.approx([2.0, 2.0], rel=2e-3)


def test_steps_of_gemms_are_kept_and_graphs_pad_to_captured_sizes() -> None:
    plain, padded = model(terms=PLAIN), model(terms=EngineTerms(uneven_contexts=False))

    def linear(fitted: FittedModel, rows: int) -> int:
        return fitted.breakdown(BatchShape((), 0, 0, 0, rows, 0))["ffn_up"]

    assert linear(plain, 257) > 1.5 * linear(plain, 256)
    assert linear(plain, 257) == pytest.approx(linear(plain, 272), rel=0.03)
    assert linear(padded, 33) == linear(padded, 40) == linear(plain, 40)
    sizes = EngineTerms().padded(np.array([1, 3, 5, 9, 255, 257, 500, 512, 513]))
    assert sizes.tolist() == [1, 4, 8, 16, 256, 272, 512, 512, 513]


def test_a_chunk_beside_decodes_is_not_the_sum_of_both() -> None:
    fitted = model(terms=PLAIN)
    both = fitted.breakdown(BatchShape(((2048, 4096),), 16, 16 * 2048, 2048, 0, 17))["mixed_attention"]
    chunk = fitted.breakdown(BatchShape(((2048, 4096),), 0, 0, 0, 0, 1))["attention"]
    decodes = fitted.breakdown(BatchShape((), 16, 16 * 2048, 2048, 0, 16))["attention"]
    assert both != pytest.approx(chunk + decodes, rel=0.02)


def test_uneven_contexts_cost_more_once_a_kernel_no_longer_splits_them() -> None:
    fitted = model()
    even, uneven = (
        fitted.stage_ns(BatchShape((), 48, 48 * 1000, largest, 0, 48))
        - fitted.stage_ns(BatchShape((), 0, 0, 0, 48, 48))
        for largest in (1000, 4000)
    )
    assert uneven > 1.1 * even
    few = [fitted.stage_ns(BatchShape((), 16, 16 * 1000, largest, 0, 16)) for largest in (1000, 4000)]
    assert few[1] < 1.02 * few[0]


def test_inside_means_every_number_was_reached_by_the_measurement() -> None:
    fitted = model()
    assert fitted.inside(BatchShape(((512, 4096),), 100, 100 * 1000, 4000, 0, 101))
    assert not fitted.inside(BatchShape((), 300, 300 * 100, 100, 0, 300))
    assert not fitted.inside(BatchShape(((3000, 0),), 0, 0, 0, 0, 1))
    assert not fitted.inside(BatchShape((), 1, 20_000, 20_000, 0, 1))


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200"])
def test_any_dense_model_is_composed_from_a_kernel_table_and_says_so(gpu: str) -> None:
    hardware = load_hardware(gpu)
    four, eight = (compose(shipped(gpu), load_model_spec("llama-3.1-70b"), hardware, tp=tp) for tp in (4, 8))
    decode = BatchShape((), 64, 64_000, 1000, 0, 64)
    assert eight.stage_ns(decode) < four.stage_ns(decode) < 2 * eight.stage_ns(decode)
    assert four.breakdown(decode)["all_reduce"] > 0
    assert "norm" in four.engine.region.composed
    assert not any(name.startswith("attention") for name in four.engine.region.composed)
    # GEMMs between measured widths, prompts without prefixes: inside. Prefixes and mixed batches were never measured.
    prompt = BatchShape(((512, 0),), 0, 0, 0, 0, 1)
    mixed = prompt._replace(decodes=64, decode_context_total=64_000, decode_context_max=1000)
    shapes = [decode, prompt, BatchShape(((512, 512),)), mixed]
    assert [four.inside(shape) for shape in shapes] == [True, True, False, False]
    assert [four.iteration_ns(shape)[3] for shape in shapes] == [True, True, False, False]


@pytest.mark.parametrize("gpu", ["a100", "a6000", "rtx4090"])
def test_decodes_beside_a_chunk_read_their_bytes_too(gpu: str) -> None:
    """Without grouped heads (LLaMA-13B) bytes decide: no faster beside a chunk than alone, less the launch."""
    hardware, spec = load_hardware(gpu), load_model_spec("llama-13b")
    fitted = compose(shipped(gpu), spec, hardware, terms=PLAIN)
    chunk, decodes = BatchShape(((256, 512),), 0, 0, 0, 0, 1), BatchShape((), 8, 8 * 2000, 2000, 0, 8)
    both = BatchShape(chunk.chunks, *decodes[1:])
    beside = fitted.breakdown(both)["mixed_attention"] - fitted.breakdown(chunk)["attention"]
    kv_bytes = 8 * 2000 * 2 * spec.kv_heads * spec.head_dim * 2 * spec.layers
    assert beside > kv_bytes / hardware.memory_bandwidth * 1e9
    launch = fitted.breakdown(BatchShape((), 1, 1, 1, 0, 1))["attention"]
    assert beside >= 0.99 * (fitted.breakdown(decodes)["attention"] - launch)


@pytest.mark.parametrize(("gpu", "tile", "least", "most"), [("h100", 512, 1.03, 1.3), ("a100", 128, 1.2, 1.6)])
def test_a_layer_costs_more_just_above_a_tile(gpu: str, tile: int, least: float, most: float) -> None:
    fitted = compose(shipped(gpu), load_model_spec("llama-3.1-8b"), load_hardware(gpu))
    parts = [fitted.breakdown(BatchShape((), 0, 0, 0, rows, 0)) for rows in (tile, tile + 8)]
    linear = [sum(part[name] for name in ("qkv", "attention_out", "ffn_up", "ffn_down")) for part in parts]
    assert least < linear[1] / linear[0] < most


def test_several_chunks_are_not_one_long_chunk() -> None:
    fitted = model(terms=PLAIN)
    one = fitted.breakdown(BatchShape(((2048, 0),), 0, 0, 0, 0, 1))["attention"]
    four = fitted.breakdown(BatchShape(((512, 0),) * 4, 0, 0, 0, 0, 4))["attention"]
    prefixed = fitted.breakdown(BatchShape(((512, 4096),) * 4, 0, 0, 0, 0, 4))["attention"]
    assert four < 0.8 * one < one < prefixed


def test_draws_are_seeded_and_scatter_as_widely_as_the_held_out_errors() -> None:
    """Halfway between two measured batch sizes and contexts, where both errors are whole."""
    fitted = model()
    shape = BatchShape((), 45, 45 * 1448, 1448, 0, 45)
    draws = [fitted.perturbed(seed).breakdown(shape)["attention"] for seed in range(40)]
    assert draws[7] == fitted.perturbed(7).breakdown(shape)["attention"]
    plain = fitted.breakdown(shape)["attention"]
    width = float(np.quantile(np.abs(np.log(np.array(draws) / plain)), 0.9))
    errors = fitted.provenance()["held_out_errors"]
    assert 0.5 * errors["decode batch sizes"]["p90"] < width < 3 * errors["decode batch sizes"]["p90"]
    assert fitted.perturbed(3).provenance()["perturbed"]["seed"] == 3


def test_draws_of_no_error_repeat_the_fitted_times() -> None:
    """Tables of draws have more knots; what lies between the fitted ones has to stay where it was."""
    fitted = model()
    plain = type(fitted)(replace(fitted.engine, half_widths={"decode": 1e-12, "prefill": 1e-12}, spreads={}))
    batches = [
        BatchShape((), decodes, decodes * context, context, 0, decodes)
        for decodes in (1, 7, 33)
        for context in (5, 700, 3001)
    ] + [BatchShape(((tokens, prefix),), 0, 0, 0, 0, 1) for tokens in (9, 300, 1500) for prefix in (0, 77, 3000)]
    for shape in batches:
        assert plain.perturbed(1).stage_ns(shape) == pytest.approx(fitted.stage_ns(shape), rel=1e-6)


def test_linear_layers_are_off_where_no_row_count_was_measured_and_nowhere_else() -> None:
    fitted, drawn = model(), model().perturbed(5)
    at, between = (
        [one.breakdown(BatchShape((), 0, 0, 0, rows, 0))["ffn_up"] for one in (fitted, drawn)] for rows in (1040, 1048)
    )
    assert at[0] == at[1]
    assert between[0] != between[1]


def test_an_operator_that_was_measured_has_no_factor_of_its_own() -> None:
    assert not {"ffn_up", "decode", "prefill", "mixed"} & set(model().engine.half_widths)
    other = compose(shipped(), load_model_spec("mistral-7b-v0.2"), load_hardware("rtx4090"), tp=2)
    assert {"ffn_up", "decode", "mixed"} <= set(other.engine.half_widths)


# --- model files -----------------------------------------------------------------------------------------------------


def test_a_model_file_reads_back_to_equal_predictions(tmp_path: Path) -> None:
    write_model(shipped(), tmp_path / "m.json")
    again = compose(read_model(tmp_path / "m.json"), load_model_spec("llama-3.1-8b"), load_hardware("rtx4090"))
    batch = [BatchShape(((300, 0), (200, 900)), 40, 40_000, 3000, 0, 42), BatchShape((), 7, 7000, 1800, 0, 7)]
    assert again.predict_ns(batch).tolist() == model().predict_ns(batch).tolist()


def spoil(tmp_path: Path, change: Any) -> Path:
    """A copy of the shipped model with its JSON changed."""
    write_model(shipped(), tmp_path / "m.json")
    document = json.loads((tmp_path / "m.json").read_text())
    change(document)
    (tmp_path / "m.json").write_text(json.dumps(document))
    return tmp_path / "m.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=99), "version 99"),
        (lambda d: d["curves"][0].update(rows="../../etc/passwd"), r"curves\[0\].rows"),
        (lambda d: d["curves"][0].update(rows=[-1, 5]), r"\[start, shape ...\] within"),
        (lambda d: d["curves"][0].update(rows=[0, 10**12]), r"\[start, shape ...\] within"),
        (lambda d: d["curves"][0].update(us=[0, 3]), "as many values as rows"),
        (lambda d: d["curves"][0].update(n=-5), r"curves\[0\].n"),
        (lambda d: d["curves"][0].update(operator="norm", n=0), r"curves\[0\].n: found '0', expected a number from 1"),
        (lambda d: d["curves"][0].update(operator="gemm", n=0), r"curves\[0\].n: found '0', expected a number from 1"),
        (lambda d: d["gemm_law"].update(efficiency=[1e9] * 8), "gemm_law.efficiency"),
        (lambda d: d["attention"][0].update(heads=0), "heads"),
        (lambda d: d["attention"][0]["batch_law"].update(step=1e300), "batch_law.step"),
        (lambda d: d["attention"][0]["batch_law"].update(step="__import__('os')"), "batch_law.step"),
        (lambda d: d["attention"][0].update(misses={"decode": {"axes": [], "values": ""}}), "axes"),
        (lambda d: d.update(curves="x"), "curves"),
        (lambda d: d.update(arrays_sha256="0" * 64), "does not belong"),
    ],
)
def test_a_changed_model_file_fails_in_one_line(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message) as error:
        read_model(spoil(tmp_path, change))
    assert "\n" not in str(error.value)


def replace_arrays(path: Path, arrays: dict[str, Any]) -> None:
    import hashlib

    with path.with_suffix(".npz").open("wb") as file:
        np.savez_compressed(file, **arrays)
    document = json.loads(path.read_text())
    document["arrays_sha256"] = hashlib.sha256(path.with_suffix(".npz").read_bytes()).hexdigest()
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"values": np.array([object()] * 99_999)}, "cannot be read as arrays"),
        ({"values": np.full(99_999, np.nan, np.float32)}, "not finite"),
        ({"values": np.array(["x"] * 99_999)}, "expected one row of floats"),
        ({"values": np.zeros((400, 400), np.float32)}, "expected one row of floats"),
        ({"values": np.zeros(99_999, np.float32)}, "descending"),
        ({"values": np.zeros(9, np.float32)}, "within the 9 values"),
        ({"values": np.zeros(9, np.float32), "more": np.zeros(9)}, "expected values.npy"),
    ],
)
def test_hostile_arrays_are_refused_and_nothing_is_unpickled(tmp_path: Path, arrays: Any, message: str) -> None:
    path = spoil(tmp_path, lambda d: None)
    replace_arrays(path, arrays)
    with pytest.raises(ProfileError, match=message):
        read_model(path)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    import hashlib

    path = spoil(tmp_path, lambda d: None)
    with zipfile.ZipFile(path.with_suffix(".npz"), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("values.npy", bytes(65 << 20))
    document = json.loads(path.read_text())
    document["arrays_sha256"] = hashlib.sha256(path.with_suffix(".npz").read_bytes()).hexdigest()
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match="unpacks to more than"):
        read_model(path)


def test_decodes_of_no_kv_head_are_refused(tmp_path: Path) -> None:
    """Times per stream would be divided by 0, and NaN would come out of a file that looks whole."""
    path = spoil(tmp_path, lambda document: document["attention"][0]["decode_law"].update(streams=0))
    with pytest.raises(ProfileError, match=r"decode_law.streams: found '0', expected a number from 1 to"):
        read_model(path)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"gpu rtx4090: products in 8-bit floats, .* were not measured on this card"):
        compose(shipped(), load_model_spec("llama-3.1-8b"), load_hardware("rtx4090"), dtype="fp8")


def test_keys_of_small_batches_are_cold_in_an_engine() -> None:
    """A kernel table repeats one call and finds 34 MB of keys in the H100's cache of 50; layers of an engine do not."""
    batch = BatchShape((), 8, 8 * 1000, 1000, 0, 8)
    spec, hardware = load_model_spec("llama-3.1-8b"), load_hardware("h100")
    cold, warm = (
        compose(shipped("h100"), spec, hardware, terms=EngineTerms(cold_keys=on)).breakdown(batch)["attention"]
        for on in (True, False)
    )
    assert 1.05 < cold / warm < 2.0
    layer_bytes = batch.decode_context_total * 2 * spec.kv_heads * spec.head_dim * 2
    assert cold > spec.layers * layer_bytes / hardware.memory_bandwidth * 1e9 > 0.5 * warm
    rtx = [
        compose(shipped("rtx4090"), spec, load_hardware("rtx4090"), terms=EngineTerms(cold_keys=on))
        for on in (False, True)
    ]
    assert rtx[0].stage_ns(batch) == rtx[1].stage_ns(batch)


def test_collectives_pay_the_latency_of_their_link_and_the_embedding_is_added_up() -> None:
    """Without NVLink gathering logits costs an all-reduce's 13.5 us, and tp > 1 adds one all-reduce to two a layer."""
    spec, hardware = load_model_spec("llama-3.1-8b"), load_hardware("rtx4090")
    cost = compose(shipped("rtx4090"), spec, hardware, tp=2)
    parts = cost.breakdown(BatchShape(((1, 0),), 0, 0, 0, 0, 1))
    assert parts["gather_logits"] >= 13_500
    one = parts["all_reduce"] / (2 * spec.layers + 1)
    assert one == pytest.approx(13_500, rel=0.05)
    halves = compose(shipped("rtx4090"), spec, hardware, tp=2, pp=2).breakdown(BatchShape(((1, 0),), 0, 0, 0, 0, 1))
    assert halves["all_reduce"] == pytest.approx(parts["all_reduce"], abs=2)


def test_a_name_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    from tests.hardening.command_line import run

    nowhere = tmp_path / "no-profile.parquet"
    for command in (
        ("import", "vidur", nowhere, "--out", tmp_path / "p"),
        ("fit", nowhere, "--out", tmp_path / "m.npz"),
        ("refine", "rtx4090", "--run", nowhere, "--out", tmp_path / "m"),
    ):
        refused = run("profiler", *command)
        assert refused.code == 2
        assert "found suffix" in refused.err


@pytest.mark.parametrize(
    ("measured", "wanted", "as_measured_at"), [([15, 20], 16, 15), ([15, 20], 17, 20), ([28, 36], 32, 28)]
)
def test_rows_of_one_tensor_core_tile_cost_alike(measured: list[int], wanted: int, as_measured_at: int) -> None:
    """16 rows fill one m16n8k16 tile as 15 do; 17 need a second one, as 20 do (RTX 4090: 929, 927 and 873 GB/s)."""
    law = shipped().gemm_law
    assert law is not None
    curve = RowCurve.from_points("gemm", 28672, 4096, measured, [260.0, 275.0])
    ratio = curve_us(law, curve, [as_measured_at])[0] / law.us(np.array([as_measured_at]), 28672, 4096)[0]
    assert curve_us(law, curve, [wanted])[0] == pytest.approx(ratio * law.us(np.array([wanted]), 28672, 4096)[0])


NUMPY_HEADERS = (
    "{'descr':'<f8','fortran_order':False,'shape':(1000000000000,)}",
    "{'descr':'<f8','fortran_order':False,'shape':(-1,)}",
    "{'descr':'<f8','fortran_order':False,'shape':" + str((1,) * 40) + "}",
    "{'descr':'|O','fortran_order':False,'shape':(1,)}",
    "{'descr':[('a','<f8',(10**9,))],'fortran_order':False,'shape':(1,)}",
    "__import__('os').abort()",
    "(" * 3000,
)


@pytest.mark.parametrize("header", NUMPY_HEADERS)
def test_arrays_by_another_hand_are_refused_in_one_line(header, tmp_path):
    """Headers that numpy would not write, at most 64 bytes of data behind them, and every byte of the archive bent."""
    from profiler.operators.fitting.model_file import read_values

    file = tmp_path / "model.npz"
    inside = b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header.encode() + bytes(64)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("values.npy", inside)
    whole = file.read_bytes()
    rng = np.random.default_rng(1)
    for turn in range(60):
        bent = bytearray(whole)
        for at in rng.integers(len(bent), size=turn % 5):
            bent[at] = int(rng.integers(256))
        file.write_bytes(bent)
        with pytest.raises(ProfileError):
            read_values(file, hashlib.sha256(bent).hexdigest())
