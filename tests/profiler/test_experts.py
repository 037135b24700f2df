"""Experts: how tokens spread, what a layer costs on a card, what devices send each other, and files that hold it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.work.batch import BatchShape
from profiler import load_cost_model
from profiler.errors import ProfileError
from profiler.experts.exchange import exchanges
from profiler.experts.expert_fit import ExpertTable, fit_experts
from profiler.experts.expert_law import ExpertShape
from profiler.experts.routing import Spread, loads
from profiler.operators.card_kernels import read_card, write_card
from profiler.operators.fitting.model_file import shipped
from profiler.specs.hardware import load_hardware
from profiler.specs.model_config import load_model_spec
from profiler.specs.parallel_layout import ParallelLayout
from tests.shared_data import shared


def test_an_even_draw_touches_as_many_experts_as_probability_says() -> None:
    """Of 256 experts, 32 tokens with 8 each miss one with probability (1 - 8 / 256) ** 32."""
    expected = 256 * (1 - (1 - 8 / 256) ** 32)
    assert loads(Spread("uniform"), 32, 256, 8).touched == pytest.approx(expected, rel=0.02)
    # 32 tokens spread as evenly as can be touch all of them, one each.
    even = loads(Spread("balanced"), 32, 256, 8)
    assert (even.touched, even.tokens, even.padded[0]) == (256, 256, 256 * 16)


@given(
    tokens=st.integers(1, 3000), ways=st.sampled_from([1, 2, 8]), name=st.sampled_from(["balanced", "power_law_1.2"])
)
@settings(max_examples=25, deadline=None)
def test_no_assignment_is_lost_and_the_fullest_device_has_its_share_at_least(tokens: int, ways: int, name: str) -> None:
    spread = Spread.parse(name)
    counts = spread.counts(tokens, 64, 4)
    assert (counts.sum(axis=1) == 4 * tokens).all()
    assert counts.max() <= tokens
    found = loads(spread, tokens, 64, 4, ways)
    assert found.tokens >= 4 * tokens / ways - 1e-6
    assert found.touched <= 64 / ways
    assert all(padded >= found.tokens for padded in found.padded)


def test_measured_counts_decide_who_gets_what(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("count\n1\n0\n0\n3\n")
    counts = Spread.parse(str(path)).counts(1000, 4, 1)
    assert (counts[:, 1:3] == 0).all()
    assert counts[:, 3].mean() == pytest.approx(750, rel=0.05)
    with pytest.raises(ProfileError, match="found counts of 4 experts, expected 8"):
        Spread.parse(str(path)).counts(10, 8, 1)
    with pytest.raises(ProfileError, match="routing: found 'skewed', expected one of uniform"):
        Spread.parse("skewed")


def test_devices_exchange_tokens_as_vllm_has_them_do_it() -> None:
    """Hidden states of 2,048 in 16 bits are 4,096 bytes; router logits of 128 experts 256 more on the way there."""
    spec = load_model_spec("qwen3-30b-a3b")

    def said(**layout: object) -> list[tuple[str, int, float, bool]]:
        return [tuple(one) for one in exchanges(spec, ParallelLayout(**layout))]  # type: ignore[arg-type]

    assert said() == []
    assert said(tp=4) == said(tp=4, ep=True) == [("all_reduce", 4, 4096.0, False)]
    there, back = ("all_gather", 2, 4352.0, True), ("reduce_scatter", 2, 4096.0, True)
    assert said(dp=2) == said(dp=2, ep=True) == [there, back]
    assert said(tp=2, dp=2) == [there, back, ("all_reduce", 2, 4096.0, False)]
    # With both, tokens are cut over tp first, all four devices gather, and each rank gathers its own at the end.
    together = [("all_gather", 4, 4352.0, True), ("reduce_scatter", 4, 4096.0, True), ("all_gather", 2, 4096.0, False)]
    assert said(tp=2, dp=2, ep=True) == together


def test_experts_of_an_h200_cost_what_was_measured_of_them() -> None:
    """MiniMax-M2.5 in block-wise fp8: 143.3 us for 16 tokens over tensor parallel 4, 300.2 for 2,048 over eight devices
    with whole experts, under the collector's power law (aiconfigurator 0.12.0, vLLM 0.24)."""
    path = shipped("h200", "experts")
    assert path is not None
    fit = read_card(path).experts_in("fp8_block")
    for shape, tokens, us in (
        (ExpertShape(3072, 1536 // 4, 256, 8), 16, 143.3),
        (ExpertShape(3072, 1536, 256, 8, ways=8), 2048, 300.2),
    ):
        times = fit.times(shape, Spread.parse("power_law_1.01"))
        assert times.measured
        assert float(times.us(np.array([float(tokens)]))[0]) == pytest.approx(us, rel=0.02)
    # One that was not measured: between its neighbours in width.
    narrow, middle, wide = (
        float(fit.times(ExpertShape(3072, width, 256, 8), Spread("balanced")).us(np.array([512.0]))[0])
        for width in (384, 512, 768)
    )
    assert narrow < middle < wide


@pytest.mark.originals
def test_another_project_measured_the_same_experts_alike() -> None:
    """LLMServingSim's profile of Qwen3-30B-A3B on an RTX PRO 6000, by tokens and by experts that got any; our tables are
    aiconfigurator's of that card, under an even draw."""
    import csv

    with shared("profiles/llmservingsim/RTXPRO6000/Qwen3-30B-A3B-Instruct-2507/tp1/moe.csv").open() as lines:
        rows = [
            (int(row["tokens"]), float(row["activated_experts"]), float(row["time_us"]))
            for row in csv.DictReader(lines)
        ]
    path = shipped("rtxpro6000", "experts")
    assert path is not None
    times = read_card(path).experts_in("bfloat16").times(ExpertShape(2048, 768, 128, 8), Spread("uniform"))
    errors = []
    for tokens in sorted({row[0] for row in rows}):
        own = sorted(row[1:] for row in rows if row[0] == tokens)
        touched = loads(Spread("uniform"), tokens, 128, 8).touched
        measured = np.interp(touched, *np.array(own).T)
        errors.append(abs(float(times.us(np.array([float(tokens)]))[0]) / measured - 1))
    assert np.median(errors) < 0.1
    assert max(errors) < 0.25


def test_a_card_without_kernels_of_a_format_says_which_it_has() -> None:
    with pytest.raises(ProfileError, match=r"a100: products in fp8 in blocks .* expected one of bfloat16"):
        load_cost_model("minimax-m2.5", "a100", tp=4)
    with pytest.raises(ProfileError, match="a100: experts in w4a16_mxfp4 were not measured on this card"):
        load_cost_model("gpt-oss-120b", "a100")
    with pytest.raises(ProfileError, match="rtx4090: experts were not measured on this card"):
        load_cost_model("mixtral-8x7b", "rtx4090", tp=4)
    with pytest.raises(ProfileError, match="latent attention of deepseek-v2-lite: found sizes"):
        load_cost_model("deepseek-v2-lite", "h200")


MODELS = {
    "minimax-m2.5": {"gpu": "h200", "tp": 4},
    "gpt-oss-120b": {"gpu": "h100", "tp": 2},
    "deepseek-v3": {"gpu": "h200", "dp": 8, "ep": True},
}


@pytest.mark.parametrize("model", MODELS)
def test_scalar_vector_and_ranked_forms_are_equal_and_sums_are_exact(model: str) -> None:
    cost = load_cost_model(model, **MODELS[model])  # type: ignore[arg-type]
    shapes = [
        BatchShape((), 7, 7 * 900, 1200, 0, 7),
        BatchShape(((700, 0),), 0, 0, 0, 0, 1),
        BatchShape(((1500, 300), (400, 0)), 20, 20 * 900, 1000, 0, 21),
        BatchShape((), 0, 0, 0, 1, 0),
    ]
    scalar = [cost.stage_ns(shape) for shape in shapes]
    assert cost.predict_ns(shapes).tolist() == scalar
    for shape, ns in zip(shapes, scalar, strict=True):
        assert sum(cost.breakdown(shape).values()) == ns + sum(cost.host_ns(shape))
        assert cost.repeat_ns(shape, 3)[0] == ns
    ranks = getattr(cost, "ranks", 1)
    if ranks > 1:
        for shape, ns in zip(shapes, scalar, strict=True):
            assert set(cost.ranks_ns([shape] * ranks)) == {ns}  # type: ignore[attr-defined]
        busy, idle = [shapes[0]] * 4, [shapes[3]] * 4
        found = cost.ranks_ns(busy + idle)  # type: ignore[attr-defined]
        # Four ranks with work and four without: less than if all had some, and an idle one waits for the others' experts.
        assert scalar[3] < found[-1] < found[0] < scalar[0]
        assert cost.repeat_ranks_ns(busy + idle, 2)[:, 0].tolist() == list(found)  # type: ignore[attr-defined]


def test_kernels_of_a_card_survive_their_file_and_a_bent_one_is_refused(tmp_path: Path) -> None:
    path = shipped("a100", "experts")
    assert path is not None
    card, copy = read_card(path), tmp_path / "mine.json"
    few = {name: replace(fit, tables=fit.tables[:3]) for name, fit in card.experts.items()}
    write_card(replace(card, experts=few), copy)
    again = read_card(copy)
    assert again.experts["bfloat16"].tables[0].shape == few["bfloat16"].tables[0].shape
    assert np.allclose(again.experts["bfloat16"].tables[2].us, few["bfloat16"].tables[2].us)
    document = json.loads(copy.read_text())
    document["experts"][0]["tables"][0][1][2] = -1
    bent = tmp_path / "bent.json"
    bent.write_text(json.dumps(document))
    bent.with_suffix(".npz").write_bytes(copy.with_suffix(".npz").read_bytes())
    with pytest.raises(ProfileError, match=r"tables\[0\].*expected hidden, width, experts"):
        read_card(bent)


def test_a_law_finds_the_card_behind_times_that_follow_one() -> None:
    """Times made by a law of 70 % bandwidth and 20 us of launching: a fit says the same of batches that it never saw."""
    hardware, spread = load_hardware("h100"), Spread("uniform")
    tokens = np.array([1.0, 8.0, 64.0, 512.0, 4096.0])
    tables = []
    for width in (512, 1024, 2048):
        shape = ExpertShape(2048, width, 64, 4)
        features = shape.features(spread, tokens.astype(int).tolist())
        stream = features[:, 0] * shape.weights * 2 / (hardware.memory_bandwidth * 0.7 / 1e6)
        products = 2 * features[:, 4] * shape.weights / (hardware.peak("bfloat16") * 0.5 / 1e6)
        tables.append(ExpertTable("k", shape, ("uniform",), tokens, (20 + np.maximum(stream, products))[None]))
    fit = fit_experts("bfloat16", tables, hardware)
    assert fit.errors["tokens"]["median"] < 0.1
    shape = ExpertShape(2048, 1536, 64, 4)
    told = float(fit.times(shape, spread).us(np.array([64.0]))[0])
    touched = loads(spread, 64, 64, 4).touched
    assert told == pytest.approx(20 + touched * shape.weights * 2 / (hardware.memory_bandwidth * 0.7 / 1e6), rel=0.1)
