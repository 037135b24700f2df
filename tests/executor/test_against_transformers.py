"""Every architecture's last-token logits and greedy answers against transformers, on small random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.batches.batch_arrays import Step
from executor.model.loading import Loaded, load_model

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.5 + 0.4 * i for i in range(8)],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-1 (no grouped heads)": ("Llama", {"num_key_value_heads": 4}),
    "llama-2 linear scaling": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-3": ("Llama", {"rope_theta": 500000.0}),
    "llama-3.1": ("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama-3.2 tied": ("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "mistral v0.1 window": ("Mistral", {"sliding_window": 24}),
    "mistral v0.3": ("Mistral", {"sliding_window": None, "rope_theta": 1e6}),
    "qwen2.5": ("Qwen2", {"use_sliding_window": False, "sliding_window": 24, "tie_word_embeddings": True}),
    "qwen2.5 yarn": ("Qwen2", {"rope_scaling": YARN, "rope_theta": 1e6}),
    "qwen3": ("Qwen3", {"head_dim": 24, "rope_theta": 1e6}),
    "phi-3 mini 4k": ("Phi3", {"sliding_window": 24, "original_max_position_embeddings": 256}),
    "phi-3 long, short prompt": ("Phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 160}),
    "phi-3 long, long prompt": ("Phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 32}),
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral, one expert a token": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1}),
    "qwen2-moe": ("Qwen2Moe", {"num_experts": 12, "num_experts_per_tok": 4, "norm_topk_prob": False}),
    "qwen2-moe, dense layers": (
        "Qwen2Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "head_dim": 24}),
    "qwen3-moe, a dense layer": (
        "Qwen3Moe",
        {"num_experts": 7, "num_experts_per_tok": 2, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
}
WIDTHS = {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 72, "initializer_range": 0.3}
"""Of experts. Weights are drawn wider than elsewhere: experts then differ, and no row is near a tie between two."""
ARCHITECTURES |= {name: (family, {**WIDTHS, **changes}) for name, (family, changes) in EXPERTS.items()}

BACKENDS = [("torch", "reference"), ("torch", "sdpa"), ("native", "native")]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(transformers' model, its saved folder); weights and biases all random, norms too."""
    family, changes = ARCHITECTURES[request.param]
    torch.manual_seed(7)
    settings = {**SMALL, **changes}
    if family == "Mistral" or family == "Llama":
        settings["head_dim"] = 16
    config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder, max_shard_size="60KB")
    return model, folder


def run_ours(loaded: Loaded, prompt: list[int], steps: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy ids and last-token logits, the prompt in chunks of 40 tokens, blocks of 8 in a shuffled order."""
    size = 8
    blocks = -(-(len(prompt) + steps) // size)
    table = (1 + np.random.default_rng(0).permutation(blocks)).astype(np.int32)[None]
    cache = loaded.new_cache(blocks, size)
    ids, logits = [], []
    tokens = list(prompt)
    done = 0
    while len(ids) < steps:
        span = tokens[done : done + 40]
        positions = np.arange(done, done + len(span), dtype=np.int32)
        decode = done >= len(prompt)
        here, none = np.zeros(1, np.int32), np.empty(0, np.int32)
        step = Step(
            rows=len(span),
            token_ids=np.asarray(span, np.int64),
            positions=positions,
            slots=(table[0, positions // size].astype(np.int64) * size + positions % size),
            tables=table,
            chunk_row=none if decode else here,
            chunk_tokens=none if decode else np.asarray([len(span)], np.int32),
            chunk_prefix=none if decode else np.asarray([done], np.int32),
            chunk_table=none if decode else here,
            decode_row=here if decode else none,
            decode_context=np.asarray([done], np.int32) if decode else none,
            decode_table=here if decode else none,
            sampled_rows=np.asarray([len(span) - 1], np.int32),
            sampled_table=here,
        )
        out = loaded.model.forward(torch.from_numpy(step.token_ids), step, cache)[0].float().clone()
        done += len(span)
        if done == len(tokens):
            ids.append(int(out.argmax()))
            logits.append(out)
            tokens.append(ids[-1])
    return ids, logits


def test_logits_and_greedy_answers_equal_transformers(checkpoint: tuple[Any, Path]) -> None:
    """fp32 relative error at most 1e-4; 64 greedy ids equal until the top-2 margin falls below 1e-3."""
    model, folder = checkpoint
    prompt = np.random.default_rng(3).integers(0, SMALL["vocab_size"], 77).tolist()
    for kernels, attention in BACKENDS:
        long_model = getattr(model.config, "original_max_position_embeddings", None) == 160
        loaded = load_model(
            str(folder), device="cpu", kernels=kernels, attention=attention, max_tokens=150 if long_model else 256
        )
        ids, logits = run_ours(loaded, prompt, 64)
        with torch.no_grad():
            # One pass over prompt and our own answer gives transformers' logits at every one of our steps.
            theirs = model(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :]
        for step, (ours, reference) in enumerate(zip(logits, theirs)):
            scale = float(reference.abs().max())
            assert float((ours - reference).abs().max()) / scale < 1e-4, (kernels, attention, step)
            top = reference.topk(2).values
            if float(top[0] - top[1]) > 1e-3:
                assert ids[step] == int(reference.argmax()), (kernels, attention, step)
