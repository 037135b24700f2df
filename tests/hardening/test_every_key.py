"""Every key that the readers of models know, present or not in the usual file, becomes each of the values that no one
can mean: the model is refused with the reader's own error, or its shape and rotary tables are finite numbers.

By direct calls, which take a hundredth of a command. `LEAF_VALUES=all` tries every value at every place.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profiler import load_model_spec
from profiler.errors import ProfileError
from profiler.specs.model_config import _FAMILIES
from profiler.specs.model_spec import ModelSpec
from tests.hardening.test_every_leaf import ALL, VALUES, bent

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "head_dim": 16,
}
SMALL = {
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "architectures": ["X"],
    "torch_dtype": "float16",
    "_name_or_path": "a/b",
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "sliding_window": 64,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "num_experts": 0,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    },
    "minimax_m2": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0},
    "deepseek_v2": {},
    "deepseek_v3": {},
}
"""What the families with experts have beside or instead of the other keys."""
for _name in ("deepseek_v2", "deepseek_v3"):
    EXPERTS[_name] = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "norm_topk_prob": True,
    }
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": True,
        "original_max_position_embeddings": 1024,
    },
    "longrope": {
        "type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 1024,
        "attention_factor": None,
    },
    "new keys": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_inner": 128,
        "vocab_size": 100,
        "n_positions": 64,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    "falcon": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "parallel_attn": True,
        "multi_query": True,
        "num_ln_in_parallel_attn": 2,
        "bias": False,
        "alibi": False,
        "ffn_hidden_size": 128,
        "vocab_size": 100,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "activation": "gelu",
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 1e4,
    },
}


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    for family in _FAMILIES:
        if family in OTHERS:
            yield family, {"model_type": family, **OTHERS[family]}
            continue
        small = {key: value for key, value in SMALL.items() if key != "num_experts"} if family in EXPERTS else SMALL
        for name, scaling in SCALINGS.items():
            key = "rope_parameters" if name == "new keys" else "rope_scaling"
            yield f"{family} {name}", {"model_type": family, **SIZES, **small, **EXPERTS.get(family, {}), key: scaling}


def look(spec: ModelSpec) -> None:
    """What the simulator and the executor make of it."""
    assert spec.params > 0
    assert spec.weight_bytes() > 0
    torch = pytest.importorskip("torch")
    from executor.errors import ExecutorError
    from executor.model.rope import rope_tables
    from executor.model.weights import check_executable

    try:
        check_executable(spec)
        if spec.head_dim < 1_000:
            for table in rope_tables(spec, 64, torch.float32, torch.device("cpu")):
                assert table.shape[0] == 64
                assert 0 < 2 * table.shape[1] <= spec.head_dim
                assert bool(table.isfinite().all()), "rotary tables that are no numbers"
    except ExecutorError as error:
        _check_length(error)


def _check_length(error: Exception) -> None:
    assert len(str(error)) < 1500


@pytest.mark.parametrize(
    ("name", "config", "first"), [pytest.param(*each, 7 * turn, id=each[0]) for turn, each in enumerate(configs())]
)
def test_every_key_of_a_hugging_face_config_may_be_anything(
    name: str, config: dict[str, Any], first: int, tmp_path: Path
) -> None:
    file = tmp_path / "m" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(config))
    look(load_model_spec(file))
    faults = []
    for what, document in bent(config, first):
        file.write_text(json.dumps(document))
        try:
            look(load_model_spec(file))
        except ProfileError as error:
            _check_length(error)
        except Exception as error:
            faults.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
    assert faults == [], f"{len(faults)}:\n" + "\n".join(faults)


FACTS: dict[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.block_count": 1,
    "llama.embedding_length": 16,
    "llama.feed_forward_length": 24,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.key_length": 8,
    "llama.attention.value_length": 8,
    "llama.context_length": 128,
    "llama.rope.dimension_count": 8,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.scaling.type": "none",
    "llama.expert_count": 0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.attention.causal": True,
    "llama.logit_scale": 1.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "end"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "",
}
TENSORS: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (40, 16),
    "output_norm.weight": (16,),
    "output.weight": (40, 16),
    "blk.0.attn_norm.weight": (16,),
    "blk.0.ffn_norm.weight": (16,),
    "blk.0.attn_q.weight": (16, 16),
    "blk.0.attn_k.weight": (8, 16),
    "blk.0.attn_v.weight": (8, 16),
    "blk.0.attn_output.weight": (16, 16),
    "blk.0.ffn_gate.weight": (24, 16),
    "blk.0.ffn_up.weight": (24, 16),
    "blk.0.ffn_down.weight": (16, 24),
}


def gguf(facts: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> bytes:
    """A GGUF file of version 3 with float32 tensors of 0.5."""

    def text(value: str) -> bytes:
        raw = value.encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(raw)) + raw

    def typed(value: Any) -> tuple[int, bytes]:
        if isinstance(value, bool):
            return 7, struct.pack("<?", value)
        if isinstance(value, int):
            return (10, struct.pack("<Q", value)) if value >= 0 else (11, struct.pack("<q", value))
        if isinstance(value, float):
            return 12, struct.pack("<d", value)
        if isinstance(value, str):
            return 8, text(value)
        entries = [typed(entry) for entry in value]
        kind = entries[0][0] if entries else 8
        return 9, struct.pack("<IQ", kind, len(entries)) + b"".join(entry for of, entry in entries if of == kind)

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    for key, value in facts.items():
        kind, raw = typed(value)
        head += text(key) + struct.pack("<I", kind) + raw
    offset = 0
    for name, shape in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], 0, offset)
        offset += 4 * math.prod(shape)
    return head + bytes(-len(head) % 32) + struct.pack("<f", 0.5) * (offset // 4)


def load_gguf(content: bytes, file: Path) -> None:
    """Shape, tokenizer, rotary tables and weights of a GGUF file; everything it holds is used or refused."""
    import torch

    from executor.model.gguf_file import GgufFile
    from executor.model.loading import ModelSource
    from executor.model.tokenizer import load_tokenizer

    file.write_bytes(content)
    spec = GgufFile(file).spec()
    look(spec)
    weights = GgufFile(file).weights(spec, torch.float32, torch.device("cpu"))
    assert float(weights.layers[0].qkv.sum()) == 0.5 * 32 * 16
    load_tokenizer(ModelSource("gguf", spec, file)).encode("ab")


def test_every_fact_of_a_gguf_file_may_be_anything(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    file = tmp_path / "m.gguf"
    load_gguf(gguf(FACTS, TENSORS), file)
    faults = []
    for first in range(0, 1 if ALL else len(VALUES), 4):
        for what, facts in bent({"facts": FACTS}, first):
            try:
                content = gguf(facts["facts"], TENSORS)
            except (struct.error, TypeError, AttributeError, KeyError):
                continue  # nothing that a GGUF file can say
            try:
                load_gguf(content, file)
            except ValueError as error:
                if type(error).__module__ not in ("executor.errors", "profiler.errors"):
                    faults.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
            except Exception as error:
                faults.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
    assert faults == [], f"{len(faults)}:\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("facts", "tensors", "message"),
    [
        ({}, {"blk.0.attn_q.bias": (16,)}, "tensor blk.0.attn_q.bias is not of this architecture"),
        ({}, {"blk.0.ffn_gate_inp.weight": (4, 16)}, "is not of this architecture"),
        ({"llama.rope.dimension_count": 4}, {}, "dimension_count: found 4"),
        ({"llama.expert_count": 8}, {}, "expert_count: found 8"),
        ({"llama.block_count": 1 << 39}, {}, "expected the weights of 549755813888 layers"),
        ({"llama.attention.head_count_kv": 2.0}, {}, "expected a whole number"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, {}, "expected a finite number"),
        ({"tokenizer.ggml.eos_token_id": 4}, {}, "special token: found 4"),
        ({"tokenizer.ggml.merges": ["ab"]}, {}, "make none"),
    ],
)
def test_a_gguf_file_that_the_executor_would_run_otherwise_is_refused(
    facts: dict[str, Any], tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    """Weights and facts that change what a model computes must not be passed over in silence."""
    pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    from executor.errors import ExecutorError

    with pytest.raises(ExecutorError, match=message):
        load_gguf(gguf({**FACTS, **facts}, {**TENSORS, **tensors}), tmp_path / "m.gguf")


def test_a_folder_of_other_weights_than_its_config_says_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    stored = pytest.importorskip("safetensors.torch")
    from executor.errors import ExecutorError
    from executor.model.loading import find_model, load_model
    from executor.model.weights import names_taken, random_names, random_tensor

    shape = {"model_type": "llama", **SIZES, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    spec = load_model_spec(tmp_path)
    (tmp_path / "pytorch_model.pth").write_bytes(b"")
    with pytest.raises(ExecutorError, match="is a pickle and is never opened"):
        load_model(str(tmp_path), device="cpu", max_tokens=32)
    names = names_taken(tmp_path, spec, random_names(spec), 99)
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(spec).items()}
    assert set(shapes) == names
    good = {name: random_tensor(0, name, of) for name, of in shapes.items()}

    def refused(tensors: dict[str, Any], message: str) -> None:
        stored.save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ExecutorError, match=message):
            load_model(str(tmp_path), device="cpu", max_tokens=32)

    stored.save_file(good, tmp_path / "model.safetensors")
    assert find_model(str(tmp_path)).kind == "folder"
    load_model(str(tmp_path), device="cpu", max_tokens=32)
    refused({name: good[name] for name in good if name != "lm_head.weight"}, "lm_head.weight is missing")
    refused({**good, "model.norm.weight": torch.ones(64, dtype=torch.int8)}, "found I8, expected plain weights")
    (tmp_path / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 1 << 39}))
    refused(good, "expected the weights of 549755813888 layers")


def _tensors(spec: ModelSpec) -> dict[str, Any]:
    """Name -> tensor of that shape, of a model of the Llama family."""
    import torch

    from executor.model.weights import assemble, random_names

    found = {}

    def take(name: str, shape: tuple[int, ...]) -> Any:
        found[name] = torch.empty(shape, device="meta")
        return found[name]

    assemble(spec, take, random_names(spec))
    return found
