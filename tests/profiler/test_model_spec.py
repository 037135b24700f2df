"""Published parameter counts, KV sizes worked out by hand, and configs as real models publish them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from policies.work.batch import BatchShape
from profiler.errors import ProfileError
from profiler.specs.model_config import load_model_spec, model_names
from profiler.specs.model_spec import ModelSpec
from profiler.specs.useful_work import bytes_of, flops_of
from tests.shared_data import ORIGINALS

SHAPES = ORIGINALS / "model_shapes.csv"


def published_shapes() -> list[dict[str, str]]:
    with SHAPES.open(newline="") as file:
        return list(csv.DictReader(file))


def write_config(folder: Path, **keys: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(keys))
    return path


def llama_config(**changes: object) -> dict[str, object]:
    keys: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    keys.update(changes)
    return {key: value for key, value in keys.items() if value != "absent"}


@pytest.mark.parametrize("row", published_shapes(), ids=lambda row: row["model"])
def test_parameters_and_kv_bytes_equal_the_published_table(row: dict[str, str]) -> None:
    spec = load_model_spec(row["model"])
    assert spec.params == int(row["params_computed"])
    assert spec.kv_bytes_per_token() == int(row["kv_bytes_per_token_16bit"])
    assert (spec.sliding_window or "") == (int(row["sliding_window"]) if row["sliding_window"] else "")
    assert spec.max_position == int(row["max_position"])


def test_tiny_has_the_56_million_parameters_of_its_step_logs() -> None:
    a_layer = 512 * 512 * 2 + 2 * 512 * 256 + 3 * 512 * 1408 + 2 * 512
    assert load_model_spec("tiny").params == 8 * a_layer + 2 * 32000 * 512 + 512 == 56_369_664
    assert round(load_model_spec("nano").params / 1e6, 1) == 4.7


def test_every_named_model_loads_and_splits_over_two_devices() -> None:
    for name in model_names():
        spec = load_model_spec(name).with_weights("bfloat16")
        halves = 2 * spec.weight_bytes(tp=2)
        assert spec.params * 2 <= halves * 1.02 + 2 * spec.head_params * 2
        assert spec.weight_bytes(tp=1) == 2 * spec.params


def test_weights_of_pipeline_stages_add_up_to_the_whole_model() -> None:
    spec = load_model_spec("llama-3.1-8b")
    first = spec.weight_bytes(layers=20, head=False)
    last = spec.weight_bytes(layers=12, embedding=False)
    assert first + last == 2 * 8_030_261_248
    tied = load_model_spec("llama-3.2-1b")
    extra = tied.weight_bytes(layers=8, head=False) + tied.weight_bytes(layers=8, embedding=False) - 2 * tied.params
    assert extra == 2 * tied.head_params  # a tied matrix is held by both ends of a pipeline


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    spec = load_model_spec("llama-3.1-8b")
    assert spec.kv_bytes_per_token(tp=8) == 131072 // 8
    assert spec.kv_bytes_per_token(tp=16) == 131072 // 8
    assert spec.kv_bytes_per_token("fp8") == 131072 // 2
    with pytest.raises(ProfileError, match="divisor"):
        spec.gemms(tp=5)


def test_linear_flops_are_two_per_weight() -> None:
    spec = load_model_spec("llama-3.1-8b")
    by_hand = 2 * 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    assert spec.linear_flops_per_token() == by_hand == 13_958_643_712
    assert spec.head_flops_per_row == 2 * 128256 * 4096


def test_attended_pairs_of_a_chunk_and_of_a_window() -> None:
    spec = load_model_spec("llama-3.1-8b")
    assert spec.attended(4, 0) == 1 + 2 + 3 + 4
    assert spec.attended(2, 10) == 11 + 12
    assert spec.attended(1, 100) == 101
    assert spec.attention_flops(1, 100) == 4 * 32 * 32 * 128 * 101
    windowed = load_model_spec("mistral-7b-v0.1")
    for tokens, prefix in ((5000, 0), (100, 4090), (10, 9000), (4096, 0)):
        one_by_one = sum(min(prefix + i + 1, 4096) for i in range(tokens))
        assert windowed.attended(tokens, prefix) == one_by_one


def test_hugging_face_config_equals_the_named_model(tmp_path: Path) -> None:
    named = load_model_spec("llama-3.1-8b")
    write_config(tmp_path / "old", **llama_config())
    spec = load_model_spec(tmp_path / "old")
    assert (spec.params, spec.rope_theta, spec.dtype) == (named.params, 500000.0, "bfloat16")
    assert spec.rope_scaling is not None
    assert spec.rope_scaling["rope_type"] == "llama3"
    assert spec.name == "old"


def test_new_keys_say_the_same_as_old_keys(tmp_path: Path) -> None:
    new = llama_config(
        rope_theta="absent",
        rope_scaling="absent",
        torch_dtype="absent",
        dtype="float16",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
        },
    )
    a = load_model_spec(write_config(tmp_path / "a", **llama_config()))
    b = load_model_spec(write_config(tmp_path / "b", **new))
    assert (a.rope_theta, a.rope_scaling) == (b.rope_theta, b.rope_scaling)
    assert b.dtype == "float16"


def test_families_keep_their_own_defaults(tmp_path: Path) -> None:
    base = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    base |= {"intermediate_size": 18944, "vocab_size": 152064, "max_position_embeddings": 32768}
    qwen = load_model_spec(
        write_config(tmp_path / "q", model_type="qwen2", sliding_window=131072, use_sliding_window=False, **base)
    )
    assert qwen.params == load_model_spec("qwen2.5-7b").params
    assert qwen.sliding_window is None
    mistral = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    mistral |= {"intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768}
    windowed = load_model_spec(write_config(tmp_path / "m1", model_type="mistral", sliding_window=4096, **mistral))
    assert windowed.sliding_window == 4096
    full = load_model_spec(write_config(tmp_path / "m2", model_type="mistral", sliding_window=None, **mistral))
    assert full.sliding_window is None
    qwen3 = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    qwen3 |= {"intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True, "head_dim": 128}
    spec = load_model_spec(write_config(tmp_path / "q3", model_type="qwen3", max_position_embeddings=40960, **qwen3))
    assert spec.params == 596_049_920
    assert spec.qk_norm


def test_phi3_reads_its_long_rope_and_its_window(tmp_path: Path) -> None:
    keys = {"model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32}
    keys |= {"num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32064, "rms_norm_eps": 1e-5}
    short = load_model_spec(
        write_config(tmp_path / "4k", max_position_embeddings=4096, sliding_window=2047, rope_scaling=None, **keys)
    )
    assert (short.params, short.sliding_window) == (3_821_079_552, 2047)  # Phi-3-mini publishes 3.8 B
    scaling = {"type": "su", "short_factor": [1.0], "long_factor": [1.1]}
    long = load_model_spec(
        write_config(
            tmp_path / "128k",
            max_position_embeddings=131072,
            original_max_position_embeddings=4096,
            sliding_window=262144,
            rope_scaling=scaling,
            **keys,
        )
    )
    assert long.sliding_window is None
    assert long.rope_scaling == {
        "rope_type": "longrope",
        "short_factor": [1.0],
        "long_factor": [1.1],
        "original_max_position_embeddings": 4096,
    }


def test_gpt2_and_falcon_spell_their_sizes_differently(tmp_path: Path) -> None:
    gpt2 = load_model_spec(
        write_config(tmp_path / "g", model_type="gpt2", n_embd=768, n_layer=12, n_head=12, n_positions=1024)
    )
    assert gpt2.params == 124_439_808  # GPT-2 small, published
    falcon = {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71}
    falcon |= {"multi_query": True, "parallel_attn": True, "bias": False, "vocab_size": 65024}
    spec = load_model_spec(write_config(tmp_path / "f", **falcon))
    assert spec.params == 6_921_720_704  # Falcon-7B with its tied head, published
    assert (spec.kv_heads, spec.norms_per_layer) == (1, 1)


def test_names_are_forgiving_and_unknown_ones_are_helped() -> None:
    assert load_model_spec("meta-llama/Llama-3.1-8B-Instruct").name == "llama-3.1-8b"
    assert load_model_spec("Qwen/Qwen2.5-7B").name == "qwen2.5-7b"
    with pytest.raises(ProfileError, match=r"did you mean .*llama-3\.1-8b"):
        load_model_spec("llama-3.1-9b")


def test_a_toml_file_adds_a_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("layers=2\nhidden=64\nheads=4\nintermediate=128\nvocab=100\nmax_position=128\n")
    spec = load_model_spec(path)
    assert (spec.name, spec.kv_heads, spec.head_dim) == ("mine", 4, 16)
    path.write_text("layers=2\nhiden=64\n")
    with pytest.raises(ProfileError, match="unknown key 'hiden'"):
        load_model_spec(path)
    path.write_text("layers=2\nhidden=64\n")
    with pytest.raises(ProfileError, match="missing heads"):
        load_model_spec(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": -1}, "hidden_size: found -1"),
        ({"hidden_size": "4096"}, "hidden_size: found '4096'"),
        ({"num_hidden_layers": "absent"}, "missing num_hidden_layers"),
        ({"model_type": "mamba"}, "model_type: found 'mamba'"),
        ({"num_local_experts": 8}, "num_local_experts: experts are known of mixtral"),
        ({"num_key_value_heads": 5}, "cannot share"),
        ({"rope_scaling": [1]}, "expected a JSON object"),
    ],
)
def test_a_bad_config_says_where_and_what(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    path = write_config(tmp_path / "bad", **llama_config(**changes))
    with pytest.raises(ProfileError, match=says):
        load_model_spec(path)


def test_a_truncated_or_missing_config_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 4')
    with pytest.raises(ProfileError, match="cannot be read as JSON"):
        load_model_spec(path)
    with pytest.raises(ProfileError, match="no such file"):
        load_model_spec(tmp_path / "nowhere.json")


def test_a_spec_is_a_cache_key() -> None:
    a, b = load_model_spec("llama-3.1-8b"), load_model_spec("llama-3.1-8b")
    assert hash(a) == hash(b)
    assert isinstance(a, ModelSpec)


def test_sizes_that_overflow_a_float_are_no_sizes() -> None:
    from dataclasses import replace

    for key in ("hidden", "intermediate", "layers", "vocab"):
        with pytest.raises(
            ProfileError, match=f"{key}: found 1000000000000000000.*, expected a whole number of 1 to 2"
        ):
            replace(load_model_spec("nano"), **{key: 10**308})


@pytest.mark.parametrize("tokens", [10**8, 4 * 10**9, 10**12, 10**18, 10**19, 10**30])
def test_more_tokens_than_64_bits_can_count_are_refused_and_never_wrap_around(tokens: int) -> None:
    spec = load_model_spec("llama-3.1-8b")
    for shape in (BatchShape(((tokens, 0),), sampled=1), BatchShape(((tokens, tokens),) * 3)):
        with pytest.raises(ProfileError, match="64 bits"):
            flops_of(spec, [shape])
    if tokens > 10**15:
        with pytest.raises(ProfileError, match="64 bits"):
            bytes_of(spec, [BatchShape((), 1, tokens, tokens, 0, 1)])


def test_what_fits_into_64_bits_is_counted_to_the_last_pair() -> None:
    """A million tokens: 500,000,500,000 pairs of 524,288 FLOPs, the linear layers, one row of the head."""
    spec = load_model_spec("llama-3.1-8b")
    pairs = 10**6 * (10**6 + 1) // 2
    by_hand = 524_288 * pairs + spec.linear_flops_per_token() * 10**6 + spec.head_flops_per_row
    assert flops_of(spec, [BatchShape(((10**6, 0),), sampled=1)]).tolist() == [by_hand]


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16_384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
        ({"rope_type": "longrope", "factor": 32.0}, 4096),
    ],
)
def test_rope_scaling_stretches_the_context_where_positions_do_not_count_it_yet(scaling, expected) -> None:
    from dataclasses import replace

    spec = replace(load_model_spec("llama-2-7b"), rope_scaling=scaling)
    assert spec.context_length == expected


@pytest.mark.parametrize(
    ("name", "published_e9", "active_e9"),
    [
        # The models' own cards: total and active parameters in billions, to the digits that they print.
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141, 39),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("deepseek-v3", 671, 37),
        ("minimax-m2.5", 229, 11),
        ("gemma-4-26b-a4b", 25.2, 3.8),
    ],
)
def test_experts_and_those_that_a_token_meets_are_counted_as_published(
    name: str, published_e9: float, active_e9: float
) -> None:
    spec = load_model_spec(name)
    last_digit = 0.1 if published_e9 % 1 else 1
    # Qwen3's card cuts 3.353 down to 3.3, others round.
    assert abs(spec.params / 1e9 - published_e9) < 0.6 * last_digit
    assert abs(spec.active_params / 1e9 - active_e9) < 0.6 * last_digit
    spec = spec.with_weights("bfloat16")
    # Half of every expert lies on each of two devices; routers and norms on both.
    assert spec.params * 2 <= 2 * spec.weight_bytes(tp=2) <= spec.params * 2 * 1.02
    assert spec.weight_bytes() == 2 * spec.params


def qwen_moe_config(**changes: object) -> dict[str, object]:
    family: dict[str, object] = {
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 160,
    }
    sizes = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    return llama_config(**family, **sizes, intermediate_size=256, vocab_size=100, **changes)


def test_dense_layers_of_a_qwen_moe_are_those_that_its_step_passes_over_and_those_named(tmp_path: Path) -> None:
    path = write_config(tmp_path / "moe", **qwen_moe_config(decoder_sparse_step=2, mlp_only_layers=[3]))
    spec = load_model_spec(path)
    assert spec.dense_layers == (0, 2, 3, 4)
    assert [spec.has_experts(layer) for layer in range(6)] == [False, True, False, False, False, True]
    assert (spec.norm_topk, spec.shared_gate, spec.expert_layers) == (False, True, 2)
    attention = 64 * (64 + 32 + 32) + 64 + 32 + 32 + 64 * 64 + 2 * 64
    routed, shared, router = 8 * 3 * 64 * 96, 3 * 64 * 160, 64 * 9
    blocks = 6 * attention + 4 * 3 * 64 * 256 + 2 * (routed + shared + router)
    assert spec.params == blocks + 2 * 100 * 64 + 64
    assert spec.active_params == spec.params - 2 * (6 * 3 * 64 * 96)
    touched = 6 * (64 * 128 + 64 * 64) + 4 * 3 * 64 * 256 + 2 * (2 * 3 * 64 * 96 + shared + router)
    assert spec.linear_flops_per_token() == 2 * touched
    with pytest.raises(ProfileError, match="8 experts, top 2"):
        spec.gemms()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts_per_tok": 9}, "top_k: found 9, expected 1 to the 8 experts"),
        ({"mlp_only_layers": [6]}, r"mlp_only_layers: found \[6\], expected numbers of layers, 0 to 5"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers: found 'all'"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size: found 0"),
    ],
)
def test_a_bad_number_of_experts_says_where_and_what(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    path = write_config(tmp_path / "bad", **{**qwen_moe_config(), **changes})
    with pytest.raises(ProfileError, match=says):
        load_model_spec(path)


def test_what_belongs_to_experts_is_refused_without_any(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    sizes = "layers=2\nhidden=64\nheads=4\nintermediate=128\nvocab=100\nmax_position=64\n"
    path.write_text(sizes + "top_k=2\n")
    with pytest.raises(ProfileError, match="top_k belongs to a model with experts"):
        load_model_spec(path)
    path.write_text(sizes + "experts=4\ntop_k=2\nexpert_intermediate=32\ndense_layers=[1, 0]\n")
    with pytest.raises(ProfileError, match=r"dense_layers: found \[1, 0\], expected rising numbers of 0 to 1"):
        load_model_spec(path)


def test_gpt_oss_counts_as_its_card_does_which_leaves_the_embedding_out_of_the_active_ones() -> None:
    """117B of which 5.1B active, and 21B of which 3.6B; 60.8 and 12.8 GiB, as their card says."""
    for name, total, active, gib in (("gpt-oss-120b", 116.83, 5.13, 60.8), ("gpt-oss-20b", 20.91, 3.61, 12.8)):
        spec = load_model_spec(name)
        assert round(spec.params / 1e9, 2) == total
        assert round((spec.active_params - spec.embedding_params) / 1e9, 2) == active
        assert round(spec.weight_bytes() / 2**30, 1) == pytest.approx(gib, abs=0.11)


def test_latent_attention_keeps_one_vector_a_token_whatever_the_heads() -> None:
    """DeepSeek-V3: (512 + 64) numbers in each of 61 layers, 70,272 bytes in 16 bits (DeepSeek-V3 report: 70 KB)."""
    spec = load_model_spec("deepseek-v3")
    assert [spec.kv_bytes_per_token(tp=tp) for tp in (1, 8)] == [70_272, 70_272]
    # 192 and 128 wide: 2 * (192 + 128) * 128 FLOPs a pair and layer.
    assert spec.attention_flops(1) == 61 * 2 * 320 * 128
    kinds = {gemm.name: (gemm.n, gemm.k) for gemm in spec.attention_gemms(8)}
    assert kinds["kv_up"] == (16 * (128 + 128), 512)
    assert kinds["attention_out"] == (7168, 16 * 128)


def test_kinds_of_layers_keep_what_they_look_at() -> None:
    """Gemma 4: 25 layers with 8 KV heads of 256 and a window of 1,024, 5 with 2 of 512. gpt-oss: 18 and 18, 128."""
    gemma = load_model_spec("gemma-4-26b-a4b")
    assert gemma.kv_bytes_per_token() == 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512)
    assert gemma.kv_tokens_held(10_240) == pytest.approx((51_200 * 1024 + 5120 * 10_240) / 56_320)
    oss = load_model_spec("gpt-oss-120b")
    assert oss.kv_tokens_held(1128) == (128 + 1128) / 2
    pairs = 18 * (128 * 129 // 2 + 872 * 128) + 18 * (1000 * 1001 // 2)
    assert oss.attention_flops(1000) == pairs * 4 * 64 * 64


def test_experts_lie_on_devices_as_vllm_lays_them(tmp_path: Path) -> None:
    spec = load_model_spec("minimax-m2.5")
    routed = 62 * 256 * 3 * 3072 * 1536
    shares = [spec.weight_bytes(tp=1, expert_ways=8, whole_experts=whole) for whole in (True,)]
    shares += [spec.with_weights("bfloat16").weight_bytes(tp=1, expert_ways=8)]
    assert shares[0] == pytest.approx(routed / 8 + (spec.params - routed) * 1.3, rel=0.05)
    assert shares[1] == 2 * (spec.params - routed) + 2 * routed // 8
    # 1536 / 8 = 192 is no multiple of the blocks of 128 that share a scale.
    with pytest.raises(ProfileError, match=r"1536 / 8 = 192 is no multiple of its blocks of 128.*--ep"):
        spec.weight_bytes(tp=8)
    assert spec.weight_bytes(tp=8, whole_experts=True)
    with pytest.raises(ProfileError, match="expected a divisor of its 256 experts"):
        spec.check_tp(1, expert_ways=3, whole_experts=True)


@pytest.mark.parametrize(
    ("weights", "bits"), [("fp8", 8), ("fp8_block", 8.001953125), ("int4", 4.125), ("mxfp4", 4.25), ("nvfp4", 4.5)]
)
def test_weights_may_be_served_in_fewer_bits_than_the_checkpoint_has(weights: str, bits: float) -> None:
    spec, dtype = load_model_spec("llama-3.1-70b").served_as("auto", weights)
    linear = 80 * (8192 * (8192 + 2048 + 8192) + 3 * 8192 * 28672)
    assert dtype == "bfloat16"
    assert spec.weight_bytes() == pytest.approx(linear * bits / 8 + 2 * (spec.params - linear), abs=1)
    assert spec.with_weights("bfloat16").weight_bytes() == 2 * spec.params
    with pytest.raises(ProfileError, match="weight dtype: found 'int3'"):
        spec.with_weights("int3")


@pytest.mark.parametrize(
    ("family", "says"),
    [("llama4", "chunked attention"), ("kimi_k25", "Kimi-K2"), ("qwen3_5_moe", "linear attention layers keep a state")],
)
def test_families_that_cannot_be_expressed_are_refused_by_name(tmp_path: Path, family: str, says: str) -> None:
    path = write_config(tmp_path / "x", **llama_config(model_type=family))
    with pytest.raises(ProfileError, match=f"found '{family}', which is not supported: .*{says}"):
        load_model_spec(path)


def test_a_checkpoint_of_modelopt_says_in_a_file_of_its_own_how_it_is_stored(tmp_path: Path) -> None:
    path = write_config(tmp_path / "fp8", **llama_config())
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (path.parent / "hf_quant_config.json").write_text(json.dumps(said))
    spec = load_model_spec(path)
    assert (spec.weight_format, spec.weight_bits, spec.kv_dtype()) == ("fp8", 8.0, "float8")
    assert spec.kv_dtype(kv_dtype="bfloat16") == "bfloat16"


REAL = ORIGINALS / "model_configs"


@pytest.mark.skipif(not REAL.exists(), reason="the models' own configs lie beside the project")
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("minimax-m2.5", "MiniMaxAI--MiniMax-M2.5"),
        ("deepseek-v3", "deepseek-ai--DeepSeek-V3"),
        ("gpt-oss-120b", "openai--gpt-oss-120b"),
        ("gpt-oss-20b", "openai--gpt-oss-20b"),
        ("gemma-4-26b-a4b", "google--gemma-4-26B-A4B"),
        ("qwen3-235b-a22b", "Qwen--Qwen3-235B-A22B"),
    ],
)
def test_named_models_are_what_their_configs_say(name: str, file: str) -> None:
    own, read = load_model_spec(name), load_model_spec(REAL / f"{file}_config.json")
    same = {**read.summary(), "name": own.name, "source": own.source}
    assert own.summary() == same


def test_a_month_of_release_is_no_part_of_a_name() -> None:
    assert load_model_spec("Qwen/Qwen3-30B-A3B-Instruct-2507") is load_model_spec("qwen3-30b-a3b")
