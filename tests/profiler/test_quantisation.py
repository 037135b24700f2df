"""Quantised checkpoints and windows on some layers: their bytes are counted, their costs refused, never taken for 16 bits."""

import json
from pathlib import Path
from typing import Any

import pytest

from policies import BatchShape
from profiler import ProfileError, load_cost_model, load_model_spec
from profiler.specs.hardware import load_hardware
from profiler.specs.memory_plan import plan_memory
from simulator import replay
from workloads import generate

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672, "model_type": "llama",
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8,
    "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
LINEAR = 80 * 8192 * (10_240 + 8_192 + 57_344 + 28_672)
REST = 2 * 128_256 * 8192 + (2 * 80 + 1) * 8192
"""Weights of the blocks' linear layers; of embedding, head and norms, which stay in 16 bits."""


def folder(tmp_path: Path, **more: Any) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({**LLAMA_70B, **more}))
    return place


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}, 8 + 32 / 16384),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4 + 0.126953125),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        (
            {
                "quant_method": "compressed-tensors", "ignore": ["lm_head"],
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
            },
            8,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True}}},
            },
            4 + 16 / 128,
        ),
    ],
)  # fmt: skip
def test_weights_take_the_bits_that_their_quantisation_says(tmp_path: Path, config: Any, bits: float) -> None:
    spec = load_model_spec(folder(tmp_path, quantization_config=config))
    assert spec.weight_bytes("bfloat16") == pytest.approx(LINEAR * bits / 8 + 2 * REST, rel=1e-9)


def test_seventy_billion_weights_in_awq_take_37_gib_and_a_roofline_reads_them_as_such(tmp_path: Path) -> None:
    model = folder(tmp_path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    plan = plan_memory(load_model_spec(model), load_hardware("h200"))
    assert plan.weight_bytes / 2**30 == pytest.approx(37.0, abs=0.1)
    few, plain = (load_cost_model(one, "h200", cost_model="roofline") for one in (model, "llama-3.1-70b"))
    one = BatchShape((), 1, 1, 1, 0, 1)
    named = ("qkv", "attention_out", "ffn_up", "ffn_down")
    times = [sum(cost.breakdown(one)[name] for name in named) for cost in (few, plain)]
    # Bytes of weights decide: 4.15625 bits instead of 16, beside 3 us of launching each of 320 kernels.
    launches = 320 * 3000
    assert (times[0] - launches) / (times[1] - launches) == pytest.approx(4.15625 / 16, rel=0.01)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "quip"}, "quant_method: found 'quip', expected one of awq, gptq"),
        ("awq", "found 'awq', expected an object with quant_method"),
        ({"quant_method": "awq", "bits": "four"}, "bits: found 'four', expected a whole number"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp"]}, "in part are not understood"),
        ({"quant_method": "compressed-tensors"}, "config_groups: found 0 forms of weights"),
    ],
)
def test_a_quantisation_that_is_not_understood_is_refused(tmp_path: Path, config: Any, said: str) -> None:
    with pytest.raises(ProfileError, match=said):
        load_model_spec(folder(tmp_path, quantization_config=config))


def test_fp8_weights_leave_keys_and_values_in_16_bits() -> None:
    spec, gpu = load_model_spec("llama-3.1-8b"), load_hardware("h100")
    plain, small = plan_memory(spec, gpu), plan_memory(spec, gpu, dtype="fp8")
    assert (
        small.kv_bytes_per_token
        == plain.kv_bytes_per_token
        == 2 * plan_memory(spec, gpu, kv_dtype="fp8").kv_bytes_per_token
    )
    assert load_cost_model(spec, gpu, cost_model="roofline", dtype="fp8").kv_dtype == "bfloat16"  # type: ignore[attr-defined]


def test_layers_with_a_window_hold_no_more_than_it(tmp_path: Path) -> None:
    """Window 1,024 in 60 of 80 layers: 4,096 tokens hold (60 * 1,024 + 20 * 4,096) / 80 = 1,792 a layer."""
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 20
    spec = load_model_spec(folder(tmp_path, layer_types=kinds, sliding_window=1024))
    assert (spec.sliding_window, spec.sliding_layers) == (1024, 60)
    assert [spec.kv_tokens_held(tokens) for tokens in (100, 1024, 4096)] == [100, 1024, 1792]
    decodes = BatchShape((), 8, 8 * 4096, 4096, 0, 8)
    attention = [
        load_cost_model(one, "h200", cost_model="roofline").breakdown(decodes)["decode_attention"]
        for one in (spec, load_model_spec("llama-3.1-70b"))
    ]
    # 1,792 + 2 tokens a layer instead of 4,096 + 2, beside two kernels a layer in both.
    launches = 80 * 2 * 3000
    assert (attention[0] - launches) / (attention[1] - launches) == pytest.approx(1794 / 4098, rel=1e-3)


def test_a_pool_of_windows_holds_more_long_requests() -> None:
    """Mistral 0.1 looks back 4,096 tokens: of requests of 12,288 a third stays."""
    options = {"gpu": "h100", "cost_model": "roofline"}
    long = generate(requests=2, arrivals="burst", prompt="fixed:12188", output="fixed:100")
    short = generate(requests=2, arrivals="burst", prompt="fixed:2000", output="fixed:100")
    long_blocks, short_blocks, whole = (
        replay(trace, model=model, **options).config["num_blocks"]
        for trace, model in ((long, "mistral-7b-v0.1"), (short, "mistral-7b-v0.1"), (long, "mistral-7b-v0.2"))
    )
    assert short_blocks == whole
    assert long_blocks == pytest.approx(3 * whole, rel=1e-4)


def test_costs_of_ones_own_may_serve_quantised_weights(tmp_path: Path) -> None:
    model = folder(tmp_path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    (tmp_path / "mine.py").write_text(
        "from profiler.roofline.roofline import Roofline\n"
        "def Mine(model, gpu, dtype, kv_dtype, tp):\n"
        "    return Roofline(model, gpu, dtype=dtype, kv_dtype=kv_dtype, tp=tp)\n"
    )
    cost = load_cost_model(model, "h200", cost_model=f"{tmp_path / 'mine.py'}:Mine")
    assert cost.stage_ns(BatchShape(((100, 0),), sampled=1), 0) > 0
