"""Engines by name: which version is meant, whose terms count, what a file may say, and links without peer-to-peer."""

from dataclasses import replace

import numpy as np
import pytest

from policies.work.batch import BatchShape
from profiler import load_cost_model, load_hardware, load_model_spec
from profiler.errors import ProfileError
from profiler.operators.engine_terms import EngineTerms
from profiler.operators.named_engines import engine_flags, engine_names, load_engine

DECODES = BatchShape((), 32, 32 * 500, 500, 0, 32, 0)
PROMPT = BatchShape(((2048, 0),), 0, 0, 0, 0, 1, 0)


def test_a_version_that_is_not_listed_is_the_newest_before_it():
    assert load_engine("vllm:0.12").name == "vllm:0.11"
    assert load_engine("vllm:0.19").name == "vllm:0.19"
    assert load_engine("vllm:1.0").name == load_engine("vllm").name == "vllm:0.32"
    with pytest.raises(ProfileError, match=r"oldest known is vllm:0\.11"):
        load_engine("vllm:0.8")


@pytest.mark.parametrize("name", ["vlm", "vllm:new", "missing.toml"])
def test_an_unknown_engine_is_refused(name):
    with pytest.raises(ProfileError):
        load_engine(name)


def test_every_engine_states_the_source_of_its_terms():
    for name in engine_names()[1:]:
        engine = load_engine(name)
        assert {"knobs", "limits", "host", "front"} <= set(engine.sources), name
        assert set(engine.half_widths) == {"host", "sustained", "front_end"}
        EngineTerms.from_mapping(engine.terms)


def test_default_batches_follow_the_size_of_the_card():
    engine = load_engine("vllm:0.19")
    assert engine.limit("token_budget", load_hardware("h100")) == 8192
    assert [engine.limit("token_budget", load_hardware(gpu)) for gpu in ("a100", "rtx4090")] == [2048, 2048]


def test_an_engine_of_a_file_builds_on_a_named_one_and_says_that_it_is_calibrated(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "vllm:0.19"\ncalibrated_on = "two logs"\n[terms]\nhost_before_us = 500.0\n')
    engine = load_engine(file)
    assert engine.label == "mine, CALIBRATED on two logs"
    assert engine.terms["host_before_us"] == 500.0
    assert engine.terms["sustained_clocks"] is True
    assert "mine, CALIBRATED on two logs" in load_cost_model("llama-3.1-8b", "h100", engine=file).name


@pytest.mark.parametrize(
    "text",
    [
        "speed = 3", '[terms]\nfront = 1', '[half_widths]\nhost = -1', '[limits.huge]\ntoken_budget = 1',
        'knobs = 3', '[limits.large]\ntoken_budget = "x"',
    ],
)  # fmt: skip
def test_an_engine_file_that_makes_no_sense_is_refused(tmp_path, text):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ProfileError, match=r"mine\.toml"):
        load_engine(file)


def test_host_terms_add_what_they_say():
    plain = load_cost_model("qwen3-32b", "h100", tp=2)
    slower = load_cost_model("qwen3-32b", "h100", tp=2, terms={"host_tp_step_us": 100, "host_tp_sequence_us": 10})
    single = load_cost_model("llama-3.1-8b", "h100", terms={"host_tp_step_us": 100})
    assert slower.host_ns(DECODES)[0] - plain.host_ns(DECODES)[0] == 100_000 + 32 * 10_000
    assert single.host_ns(DECODES) == load_cost_model("llama-3.1-8b", "h100").host_ns(DECODES)


def test_a_roofline_takes_host_terms_and_refuses_others():
    plain = load_cost_model("llama-3.1-8b", "h100", cost_model="roofline")
    slower = load_cost_model("llama-3.1-8b", "h100", cost_model="roofline", terms={"host_before_us": 165})
    assert slower.host_ns(DECODES)[0] - plain.host_ns(DECODES)[0] == 100_000
    with pytest.raises(ProfileError, match="--term graph_padding"):
        load_cost_model("llama-3.1-8b", "h100", cost_model="roofline", terms={"graph_padding": False})


def test_a_step_outside_graphs_takes_at_least_its_launches():
    # Llama: 4 GEMMs, 2 norms, attention, activation, rotary embedding: 9 kernels in each of 32 layers.
    cost = load_cost_model("llama-3.1-8b", "h100", terms={"launch_us": 100, "graph_padding": False})
    assert cost.stage_ns(DECODES) == 9 * 32 * 100_000
    assert cost.breakdown(DECODES)["waiting_for_launches"] > 0
    assert sum(cost.breakdown(DECODES).values()) == cost.stage_ns(DECODES) + sum(cost.host_ns(DECODES))
    assert cost.iteration_ns(DECODES)[2] == cost.stage_ns(DECODES) == cost.predict_ns([DECODES])[0]
    assert cost.repeat_ns(DECODES, 3).tolist() == [cost.stage_ns(DECODES)] * 3
    graphs = load_cost_model("llama-3.1-8b", "h100", terms={"launch_us": 100})
    assert graphs.stage_ns(DECODES) == load_cost_model("llama-3.1-8b", "h100").stage_ns(DECODES)


def test_sustained_clocks_slow_dense_products_of_prompts_and_no_decode():
    plain = load_cost_model("qwen3-32b", "h100", tp=2)
    real = load_cost_model("qwen3-32b", "h100", tp=2, terms={"sustained_clocks": True})
    ffn_up = real.breakdown(PROMPT)["ffn_up"]
    # 64 layers, gate and up of 25,600 rows over two devices, 5,120 deep, at 0.6 of 989.5 TFLOPS.
    assert ffn_up == pytest.approx(64 * 2 * 2048 * 25_600 * 5_120 / (0.6 * 989.5e12) * 1e9, rel=1e-6)
    assert ffn_up > plain.breakdown(PROMPT)["ffn_up"]
    assert real.breakdown(DECODES)["ffn_up"] == plain.breakdown(DECODES)["ffn_up"]


def test_a_file_that_changes_only_a_link_keeps_the_fitted_kernels_and_not_their_collectives(tmp_path):
    file = tmp_path / "node.toml"
    file.write_text('base = "h100"\nlink = "PCIe 5 x16"\nlink_bandwidth = 64e9\n')
    own, table = (load_cost_model("qwen3-32b", gpu, tp=2) for gpu in (file, "h100"))
    assert own.kind == "fitted"
    own_parts, parts = own.breakdown(PROMPT), table.breakdown(PROMPT)
    assert {name: ns for name, ns in own_parts.items() if name not in ("all_reduce", "gather_logits")} == {
        name: ns for name, ns in parts.items() if name not in ("all_reduce", "gather_logits")
    }
    assert own_parts["all_reduce"] > 2 * parts["all_reduce"]
    file.write_text('base = "h100"\nmemory_bandwidth = 2000e9\n')
    assert load_cost_model("qwen3-32b", file, tp=2).kind == "roofline"


def test_without_peer_to_peer_an_all_reduce_goes_through_the_host():
    card = replace(load_hardware("rtxpro6000"), p2p=False)
    cost = load_cost_model("qwen3-32b", card, tp=2)
    rows = np.array([2048.0])
    moved = 2048 * load_model_spec("qwen3-32b").hidden * 2
    assert cost.engine.first_rows(rows)["all_reduce"][0] == pytest.approx(12 + moved / 16e9 * 1e6)
    assert "CALIBRATED" in cost.name
    assert not load_hardware("rtx4090").p2p


def test_intervals_draw_host_and_sustained_clocks_as_wide_as_the_engine_says():
    spec, gpu = load_model_spec("qwen3-32b"), load_hardware("h100")
    engine = load_engine("vllm:0.11")
    exact = replace(engine, half_widths={"host": 0.0, "sustained": 0.0})
    for chosen, same in ((exact, True), (engine, False)):
        cost = load_cost_model(spec, gpu, tp=2, engine=chosen)
        draw = cost.perturbed(3)
        assert (draw.host_ns(DECODES) == cost.host_ns(DECODES)) is same
        assert (draw.engine.sustained == cost.engine.sustained) is same


def test_flags_are_spelled_as_each_server_spells_them():
    settings = {"token_budget": 2048, "memory": 0.9, "long_prefill": 0}
    assert engine_flags("vllm:0.19", settings).startswith("--max-num-batched-tokens 2048 --gpu-memory-utilization 0.9")
    assert engine_flags("sglang:0.5", settings) == "--chunked-prefill-size 2048 --mem-fraction-static 0.9"
    assert engine_flags("trtllm", {"token_budget": 1, "max_num_seqs": 2}) == "--max_num_tokens 1 --max_batch_size 2"


def test_scales_by_phase_multiply_device_time_and_nothing_else():
    plain = load_cost_model("llama-3.1-8b", "h100")
    scaled = load_cost_model("llama-3.1-8b", "h100", terms={"prefill_scale": 2.0, "decode_scale": 1.25})
    for shape, factor in ((PROMPT, 2.0), (DECODES, 1.25)):
        assert scaled.stage_ns(shape) == int(plain.stage_ns(shape) * factor + 0.5) == scaled.predict_ns([shape])[0]
        assert scaled.host_ns(shape) == plain.host_ns(shape)
        assert sum(scaled.breakdown(shape).values()) == scaled.stage_ns(shape) + sum(scaled.host_ns(shape))
    assert scaled.repeat_ns(DECODES, 4).tolist() == [int(ns * 1.25 + 0.5) for ns in plain.repeat_ns(DECODES, 4)]
    assert scaled.perturbed(1).stage_ns(DECODES) == int(plain.perturbed(1).stage_ns(DECODES) * 1.25 + 0.5)
    roofline = load_cost_model("llama-3.1-8b", "h100", cost_model="roofline", terms={"decode_scale": 1.25})
    assert not hasattr(roofline, "perturbed")
