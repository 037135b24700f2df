"""What all engines of benchmarks/engine.py load: a folder with random weights, and the mix of requests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHARED_MIX = ROOT.parent / "shared/data/vllm_cpu_steps/reqs_fp32_t2q_512.jsonl"
SEED = 0

Mix = list[tuple[list[int], int]]


def lengths_of_the_mix() -> list[tuple[int, int]]:
    """(prompt, output) of the 64 requests: those of the published vLLM log where it lies, else of the same ranges."""
    if SHARED_MIX.is_file():
        rows = [json.loads(line) for line in SHARED_MIX.read_text(encoding="utf-8").splitlines()]
        return [(row["prompt"], row["output"]) for row in sorted(rows, key=lambda row: row["id"])]
    import random

    draw = random.Random(SEED)
    return [(draw.randint(128, 1024), draw.randint(16, 128)) for _ in range(64)]


def read_mix(folder: Path) -> Mix:
    return [(ids, output) for ids, output in json.loads((folder / "mix.json").read_text(encoding="utf-8"))]


def write_inputs(folder: Path, model: str, limit: int) -> dict[str, Any]:
    """A Hugging Face folder with random weights, and the prompts: what all engines load."""
    import random

    sys.path.insert(0, str(ROOT))
    import torch
    from safetensors.torch import save_file

    from executor.model.weights import random_weights
    from profiler import load_model_spec

    spec = load_model_spec(model)
    tensors = {}
    weights = random_weights(spec, SEED, torch.float32, torch.device("cpu"))
    q, kv, ffn = spec.q_size, spec.kv_size, spec.intermediate
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        for name, part in zip("qkv", layer.qkv.split([q, kv, kv])):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = part.contiguous()
        for name, part in zip(("gate", "up"), layer.gate_up.split([ffn, ffn])):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = part.contiguous()
        tensors[f"{prefix}self_attn.o_proj.weight"] = layer.attention_out
        tensors[f"{prefix}mlp.down_proj.weight"] = layer.down
        tensors[f"{prefix}input_layernorm.weight"] = layer.attention_norm
        tensors[f"{prefix}post_attention_layernorm.weight"] = layer.ffn_norm
    tensors["model.embed_tokens.weight"] = weights.embedding
    tensors["model.norm.weight"] = weights.final_norm
    tensors["lm_head.weight"] = weights.head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    draw = random.Random(SEED)
    mix = [
        ([draw.randrange(3, spec.vocab) for _ in range(prompt)], output)
        for prompt, output in lengths_of_the_mix()[:limit]
    ]
    (folder / "mix.json").write_text(json.dumps(mix), encoding="utf-8")
    prompt_tokens, outputs = sum(len(ids) for ids, _ in mix), sum(output for _, output in mix)
    rows = prompt_tokens + outputs - len(mix)
    attention = sum(spec.attention_flops(len(ids) + output - 1) for ids, output in mix)
    return {
        "requests": len(mix),
        "prompt_tokens": prompt_tokens,
        "output_tokens": outputs,
        "linear_flop": spec.linear_flops_per_token() * rows + spec.head_flops_per_row * outputs,
        "attention_flop": attention,
    }
