"""Reads model specs: by name from data/models.toml, from a Hugging Face folder or config.json, from a TOML file.

Hugging Face configs spell one fact in many ways and leave out whatever equals their class's default; each family below
is one function that knows its family's spellings and defaults.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from policies.edges.input_file import read_json, read_toml
from policies.edges.settings import shown
from profiler.errors import ProfileError
from profiler.specs.model_spec import ModelSpec
from profiler.specs.quantisation import Quantisation, read_quantisation

_FIELDS = {field.name for field in fields(ModelSpec)}
Facts = dict[str, Any]
LAYER_TYPES = ("full_attention", "sliding_attention")


def load_model_spec(name_or_path: str | Path) -> ModelSpec:
    """The spec of a named model, a Hugging Face folder or config.json, or a TOML file of ModelSpec fields.

    Names are case-insensitive; an organisation ("meta-llama/Llama-3.1-8B") and endings such as "-Instruct" or "-hf" are
    ignored when the bare name is known. Raises ProfileError, with near matches for an unknown name.
    """
    text = str(name_or_path)
    path = Path(text)
    if path.is_dir() and ((path / "config.json").exists() or _known(text) is None):
        return _from_hugging_face(path / "config.json")
    if path.suffix == ".json":
        return _from_hugging_face(path)
    if path.suffix == ".toml":
        return _from_toml(path)
    return _named(text)


def model_names() -> list[str]:
    """Names that load_model_spec knows, in the order of the table."""
    return list(_table())


@cache
def _table() -> dict[str, ModelSpec]:
    text = resources.files("profiler").joinpath("data/models.toml").read_text(encoding="utf-8")
    return {name: _build(name, facts, "models.toml") for name, facts in tomllib.loads(text).items()}


def _known(text: str) -> ModelSpec | None:
    """The named model that `text` means, if any."""
    table = _table()
    return next((table[form] for form in _spellings(text.lower().rsplit("/", 1)[-1]) if form in table), None)


def _named(text: str) -> ModelSpec:
    if spec := _known(text):
        return spec
    table = _table()
    name = text.lower().rsplit("/", 1)[-1]
    near = difflib.get_close_matches(name, table, n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(table)}"
    raise ProfileError(f"model {text!r} is neither a known name nor an existing folder, .json or .toml file; {hint}")


def _spellings(name: str) -> list[str]:
    forms = [name, name.replace("_", "-")]
    forms += [re.sub(r"-\d{4}$", "", form) for form in list(forms)]  # a month of release, as in -Instruct-2507
    for ending in ("-instruct", "-thinking", "-chat", "-hf", "-base"):
        forms += [form.removesuffix(ending) for form in list(forms)]
    forms += [form.replace("meta-llama-", "llama-") for form in list(forms)]
    return list(dict.fromkeys(forms))


def _build(name: str, facts: Mapping[str, Any], where: str) -> ModelSpec:
    unknown = sorted(set(facts) - _FIELDS)
    if unknown:
        raise ProfileError(f"{where}: model {name}: unknown key {unknown[0]!r}, expected one of {sorted(_FIELDS)}")
    facts = dict(facts)
    facts["name"] = facts.get("name", name)
    facts.setdefault("kv_heads", facts.get("heads"))
    heads, hidden = facts.get("heads"), facts.get("hidden")
    if "head_dim" not in facts and isinstance(heads, int) and isinstance(hidden, int) and heads:
        facts["head_dim"] = hidden // heads
    try:
        return ModelSpec(**facts)
    except TypeError as error:
        missing = [key for key in _REQUIRED if facts.get(key) is None]
        what = f"missing {', '.join(missing)}" if missing else str(error)
        raise ProfileError(f"{where}: model {facts['name']}: {what}") from None


_REQUIRED = ("layers", "hidden", "heads", "intermediate", "vocab", "max_position")


def _from_toml(path: Path) -> ModelSpec:
    facts = read_toml(path, ProfileError)
    if len(facts) == 1 and isinstance(next(iter(facts.values())), dict) and "rope_scaling" not in facts:
        name, facts = next(iter(facts.items()))
        return _build(name, facts, str(path))
    return _build(path.stem, facts, str(path))


# --- Hugging Face ----------------------------------------------------------------------------------------------------


class _Config:
    """A config.json with its path, so that every complaint names file and key."""

    def __init__(self, path: Path, keys: Mapping[str, Any]) -> None:
        self.path, self.keys = path, keys

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of `names` that is present and not null, as a whole number of at least `least`."""
        for name in names:
            value = self.keys.get(name)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ProfileError(
                    f"{self.path}: {name}: found {shown(value)}, expected a whole number of at least {least}"
                )
            return value
        if default is None:
            raise ProfileError(f"{self.path}: missing {' or '.join(names)}")
        return default

    def number(self, *names: str, default: float) -> float:
        for name in names:
            value = self.keys.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ProfileError(f"{self.path}: {name}: found {shown(value)}, expected a number")
            return float(value)
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self.keys.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ProfileError(f"{self.path}: {name}: found {shown(value)}, expected true or false")
        return value

    def text(self, *names: str, default: str) -> str:
        for name in names:
            value = self.keys.get(name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise ProfileError(f"{self.path}: {name}: found {shown(value)}, expected a text")
            return value
        return default


def _from_hugging_face(path: Path) -> ModelSpec:
    if not path.exists():
        raise ProfileError(f"{path}: no such file; expected a Hugging Face config.json")
    keys = read_json(path, ProfileError)
    if not isinstance(keys, dict):
        raise ProfileError(f"{path}: found {type(keys).__name__}, expected a JSON object")
    config = _Config(path, keys)
    family = config.text("model_type", default="")
    if family in _TEXT_INSIDE and isinstance(inner := keys.get("text_config"), dict):
        # A model of pictures and text: its language model is served, and what surrounds it is a small part.
        keys = {**{key: keys[key] for key in ("quantization_config", "dtype", "torch_dtype") if key in keys}, **inner}
        config, family = _Config(path, keys), _TEXT_INSIDE[family]
    if family in _REFUSED:
        raise ProfileError(f"{path}: model_type: found {family!r}, which is not supported: {_REFUSED[family]}")
    if family not in _FAMILIES:
        raise ProfileError(f"{path}: model_type: found {family!r}, expected one of {', '.join(_FAMILIES)}")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.keys.get(key) and family not in _EXPERT_FAMILIES:
            known = ", ".join(_EXPERT_FAMILIES)
            raise ProfileError(f"{path}: {key}: experts are known of {known}; {family!r} is expected to be dense")
    architectures = config.keys.get("architectures") or [""]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise ProfileError(f"{path}: architectures: found {shown(architectures)}, expected a list of class names")
    facts = _FAMILIES[family](config)
    facts.setdefault("architecture", architectures[0] or facts["default_architecture"])
    del facts["default_architecture"]
    facts["dtype"] = config.text("dtype", "torch_dtype", default="bfloat16").removeprefix("torch.")
    _count_windows(config, facts)
    if found := _quantisation(path, keys):
        keys_of = ("quantisation", "weight_bits", "weight_format", "quantised", "kv_cache_dtype")
        facts |= dict(zip(keys_of, found, strict=True))
    facts["source"] = f"Hugging Face {path.name}"
    named = config.text("_name_or_path", default="").rstrip("/").rsplit("/", 1)[-1]
    name = path.parent.name or path.parent.resolve().name or named
    return _build(name, facts, str(path))


def _quantisation(path: Path, keys: Mapping[str, Any]) -> Quantisation | None:
    """What the config says; or, where it says nothing, ModelOpt's own file beside it, as vLLM looks for it."""
    beside = path.with_name("hf_quant_config.json")
    if not any(keys.get(key) for key in ("quantization_config", "compression_config")) and beside.exists():
        other = read_json(beside, ProfileError)
        if isinstance(other, dict):
            return read_quantisation(str(beside), other)
    return read_quantisation(str(path), keys)


def _sizes(config: _Config) -> Facts:
    """The keys on which the Llama-like families agree."""
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    return {
        "layers": config.integer("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.integer("num_key_value_heads", default=heads),
        "head_dim": config.integer("head_dim", default=hidden // heads),
        "intermediate": config.integer("intermediate_size"),
        "vocab": config.integer("vocab_size"),
        "activation": config.text("hidden_act", default="silu"),
        "norm_eps": config.number("rms_norm_eps", default=1e-6),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        **_rope(config),
    }


def _rope(config: _Config, theta: float = 10000.0) -> Facts:
    """Rotary facts under old keys (rope_theta, rope_scaling with `type`) and new ones (rope_parameters)."""
    new = config.keys.get("rope_parameters") or {}
    old = config.keys.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise ProfileError(f"{config.path}: rope_parameters and rope_scaling: expected a JSON object or null")
    nested = [key for key, value in new.items() if isinstance(value, dict)]
    if nested and set(nested) <= set(LAYER_TYPES):
        # Kinds of layers that differ in their frequencies alone cost the same: those of full attention are kept.
        new = new.get("full_attention") or new[nested[0]]
        new = {key: value for key, value in new.items() if key != "rope_type"} | {"rope_type": "default"}
    elif nested:
        raise ProfileError(f"{config.path}: rope_parameters: {nested[0]}: one set for all layers was expected")
    scaling = dict(new or old)
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    own = _Config(config.path, {key: scaling.pop(key, None) for key in ("rope_theta", "partial_rotary_factor")})
    kind = scaling.get("rope_type", "default")
    original = config.keys.get("original_max_position_embeddings")
    if original is not None and kind != "default":
        scaling.setdefault("original_max_position_embeddings", original)
    return {
        "position": "rope",
        "rope_theta": own.number("rope_theta", default=config.number("rope_theta", default=theta)),
        "rope_scaling": None if kind == "default" else scaling,
        "rotary_fraction": own.number(
            "partial_rotary_factor", default=config.number("partial_rotary_factor", default=1.0)
        ),
    }


def _count_windows(config: _Config, facts: Facts) -> None:
    """How many layers have the window: by `layer_types`, or by max_window_layers (Qwen: the first layers have none)."""
    kinds, layers = config.keys.get("layer_types"), facts["layers"]
    if kinds is None:
        if facts.get("sliding_window") and config.text("model_type", default="").startswith("qwen"):
            facts["sliding_layers"] = layers - config.integer("max_window_layers", default=28, least=0)
        return
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise ProfileError(
            f"{config.path}: layer_types: found {shown(kinds)}, expected {layers} entries of {' or '.join(LAYER_TYPES)}"
        )
    windows = kinds.count("sliding_attention")
    if not windows:
        facts["sliding_window"] = None
    else:
        facts["sliding_window"] = facts.get("sliding_window") or config.integer("sliding_window")
        facts["sliding_layers"] = windows


def _llama(config: _Config) -> Facts:
    bias = config.flag("attention_bias", False)
    return {
        **_sizes(config),
        "max_position": config.integer("max_position_embeddings", default=2048),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": config.flag("mlp_bias", False),
        "default_architecture": "LlamaForCausalLM",
    }


def _mistral(config: _Config) -> Facts:
    # A missing key means Mistral's own default of 4096; an explicit null means no window.
    window = config.integer("sliding_window", default=4096)
    if "sliding_window" in config.keys and config.keys["sliding_window"] is None:
        window = 0
    return {
        **_sizes(config),
        "max_position": config.integer("max_position_embeddings", default=131072),
        "sliding_window": window or None,
        "default_architecture": "MistralForCausalLM",
    }


def _qwen(config: _Config) -> Facts:
    """Qwen2 and Qwen2.5: bias on q, k, v only; a sliding_window value counts only with use_sliding_window."""
    facts = {
        **_sizes(config),
        "max_position": config.integer("max_position_embeddings", default=32768),
        "qkv_bias": True,
        "default_architecture": "Qwen2ForCausalLM",
    }
    facts["sliding_window"] = _qwen_window(config, facts["layers"])
    return facts


def _qwen_window(config: _Config, layers: int) -> int | None:
    if not config.flag("use_sliding_window", False):
        return None
    first = config.integer("max_window_layers", default=28, least=0)
    if first >= layers:
        return None
    return config.integer("sliding_window", default=4096)


def _qwen3(config: _Config) -> Facts:
    bias = config.flag("attention_bias", False)
    facts = {
        **_sizes(config),
        "head_dim": config.integer("head_dim", default=128),
        "max_position": config.integer("max_position_embeddings", default=32768),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": True,
        "default_architecture": "Qwen3ForCausalLM",
    }
    facts["sliding_window"] = _qwen_window(config, facts["layers"])
    return facts


def _phi3(config: _Config) -> Facts:
    """Phi-3 and Phi-4-mini: `su` and `longrope` scaling with factors per dimension, a window that may exceed reach."""
    facts = {
        **_sizes(config),
        "norm_eps": config.number("rms_norm_eps", default=1e-5),
        "max_position": config.integer("max_position_embeddings", default=4096),
        "default_architecture": "Phi3ForCausalLM",
    }
    if facts["rope_scaling"] and facts["rope_scaling"].get("rope_type") == "su":
        facts["rope_scaling"]["rope_type"] = "longrope"
    window = config.integer("sliding_window", default=facts["max_position"])
    facts["sliding_window"] = window if window < facts["max_position"] else None
    return facts


def _gpt2(config: _Config) -> Facts:
    """GPT-2, and GPT-3-like shapes in its keys: learned positions, LayerNorm, biases everywhere, tied head."""
    hidden = config.integer("n_embd", "hidden_size", default=768)
    heads = config.integer("n_head", "num_attention_heads", default=12)
    return {
        "layers": config.integer("n_layer", "num_hidden_layers", default=12),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "intermediate": config.integer("n_inner", "intermediate_size", default=4 * hidden),
        "vocab": config.integer("vocab_size", default=50257),
        "max_position": config.integer("n_positions", "n_ctx", "max_position_embeddings", default=1024),
        "gated": False,
        "activation": config.text("activation_function", default="gelu_new"),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "norm": "layernorm",
        "norm_eps": config.number("layer_norm_epsilon", default=1e-5),
        "position": "learned",
        "default_architecture": "GPT2LMHeadModel",
    }


def _falcon(config: _Config) -> Facts:
    """Falcon: parallel attention, two matrices, grouped heads in the new architecture, one KV head (7B) in the old."""
    hidden = config.integer("hidden_size", "n_embed", default=4544)
    heads = config.integer("num_attention_heads", "n_head", default=71)
    new = config.flag("new_decoder_architecture", False)
    parallel = config.flag("parallel_attn", True) or new
    if new:
        kv_heads = config.integer("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if config.flag("multi_query", True) else heads
    norms = config.integer("num_ln_in_parallel_attn", default=2 if new else 1) if parallel else 2
    bias = config.flag("bias", False)
    rotary = {"position": "alibi"} if config.flag("alibi", False) else _rope(config)
    return {
        "layers": config.integer("num_hidden_layers", "n_layer", default=32),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate": config.integer("ffn_hidden_size", default=4 * hidden),
        "vocab": config.integer("vocab_size", default=65024),
        "max_position": config.integer("max_position_embeddings", default=2048),
        "gated": False,
        "activation": config.text("activation", default="gelu"),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "norm": "layernorm",
        "norm_eps": config.number("layer_norm_epsilon", default=1e-5),
        "norms_per_layer": norms,
        "parallel_attention": parallel,
        **rotary,
        "default_architecture": "FalconForCausalLM",
    }


def _mixtral(config: _Config) -> Facts:
    """Mixtral: every layer has experts, as wide as `intermediate_size`; weights of the top k sum to 1."""
    sizes = _sizes(config)
    facts = {
        **sizes,
        **_rope(config, theta=1e6),
        "norm_eps": config.number("rms_norm_eps", default=1e-5),
        "max_position": config.integer("max_position_embeddings", default=131072),
        "sliding_window": config.integer("sliding_window", default=0, least=0) or None,
        "experts": config.integer("num_local_experts", "num_experts", default=8),
        "top_k": config.integer("num_experts_per_tok", default=2),
        "expert_intermediate": sizes["intermediate"],
        "norm_topk": True,
        "default_architecture": "MixtralForCausalLM",
    }
    return facts


def _qwen2_moe(config: _Config) -> Facts:
    """Qwen1.5-MoE and Qwen2-MoE: shared experts behind a sigmoid gate beside the routed ones."""
    return {
        **_qwen(config),
        **_qwen_experts(config, experts=60, top_k=4, width=1408),
        "qkv_bias": config.flag("qkv_bias", True),
        "shared_intermediate": config.integer("shared_expert_intermediate_size", default=5632, least=0),
        "shared_gate": True,
        "default_architecture": "Qwen2MoeForCausalLM",
    }


def _qwen3_moe(config: _Config) -> Facts:
    """Qwen3-MoE: no shared experts. Its class takes hidden / heads where head_dim is not stated, unlike Qwen3's."""
    facts = _qwen3(config)
    facts["head_dim"] = config.integer("head_dim", default=facts["hidden"] // facts["heads"])
    return {
        **facts,
        **_qwen_experts(config, experts=128, top_k=8, width=768),
        "default_architecture": "Qwen3MoeForCausalLM",
    }


def _qwen_experts(config: _Config, *, experts: int, top_k: int, width: int) -> Facts:
    """Experts in every `decoder_sparse_step`th layer (counted from 1) that `mlp_only_layers` does not name."""
    layers = config.integer("num_hidden_layers")
    step = config.integer("decoder_sparse_step", default=1)
    plain = config.keys.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(layer) is int and 0 <= layer < layers for layer in plain):
        raise ProfileError(
            f"{config.path}: mlp_only_layers: found {shown(plain)}, expected numbers of layers, 0 to {layers - 1}"
        )
    return {
        "experts": config.integer("num_experts", "num_local_experts", default=experts),
        "top_k": config.integer("num_experts_per_tok", default=top_k),
        "expert_intermediate": config.integer("moe_intermediate_size", default=width),
        "norm_topk": config.flag("norm_topk_prob", False),
        "dense_layers": tuple(layer for layer in range(layers) if layer in plain or (layer + 1) % step),
    }


def _minimax(config: _Config) -> Facts:
    """MiniMax-M2: every layer has experts, as wide as `intermediate_size`; norms over all heads of queries and keys."""
    sizes = _sizes(config)
    rotated = config.integer("rotary_dim", default=sizes["head_dim"])
    return {
        **sizes,
        "norm_eps": config.number("rms_norm_eps", default=1e-6),
        "max_position": config.integer("max_position_embeddings", default=196608),
        "rotary_fraction": rotated / sizes["head_dim"],
        "qk_norm": config.flag("use_qk_norm", True),
        "qk_norm_whole": config.text("qk_norm_type", default="per_layer") == "per_layer",
        "experts": config.integer("num_local_experts", "num_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "expert_intermediate": sizes["intermediate"],
        "shared_intermediate": config.integer("shared_intermediate_size", default=0, least=0),
        "router_bias": config.flag("use_routing_bias", True),
        "default_architecture": "MiniMaxM2ForCausalLM",
    }


def _gpt_oss(config: _Config) -> Facts:
    """gpt-oss: windows in every second layer, attention sinks, biases everywhere, experts as wide as the model."""
    sizes = _sizes(config)
    return {
        **sizes,
        "norm_eps": config.number("rms_norm_eps", default=1e-5),
        "max_position": config.integer("max_position_embeddings", default=131072),
        "sliding_window": config.integer("sliding_window", default=128),
        "qkv_bias": config.flag("attention_bias", True),
        "out_bias": config.flag("attention_bias", True),
        "attention_sinks": True,
        "experts": config.integer("num_local_experts", "num_experts", default=128),
        "top_k": config.integer("num_experts_per_tok", "experts_per_token", default=4),
        "expert_intermediate": sizes["intermediate"],
        "router_bias": True,
        "expert_bias": True,
        "default_architecture": "GptOssForCausalLM",
    }


def _deepseek(config: _Config) -> Facts:
    """DeepSeek-V2, V3, R1: latent attention; the first layers dense, then routed and shared experts."""
    width = config.integer("moe_intermediate_size")
    layers, first = config.integer("num_hidden_layers"), config.integer("first_k_dense_replace", default=0, least=0)
    step = config.integer("moe_layer_freq", default=1)
    nope, rope = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    sizes = _sizes(_Config(config.path, {**config.keys, "head_dim": nope + rope}))
    return {
        **sizes,
        "max_position": config.integer("max_position_embeddings", default=163840),
        "kv_latent": config.integer("kv_lora_rank"),
        "q_latent": config.integer("q_lora_rank", default=0, least=0),
        "rope_dim": rope,
        "value_dim": config.integer("v_head_dim"),
        "experts": config.integer("n_routed_experts"),
        "top_k": config.integer("num_experts_per_tok"),
        "expert_intermediate": width,
        "shared_intermediate": width * config.integer("n_shared_experts", default=0, least=0),
        "norm_topk": config.flag("norm_topk_prob", True),
        "dense_layers": tuple(layer for layer in range(layers) if layer < first or layer % step),
        "router_bias": config.text("topk_method", default="") == "noaux_tc",
        "default_architecture": "DeepseekV3ForCausalLM",
    }


def _gemma3(config: _Config) -> Facts:
    """Gemma 3: five layers with a window for each without, norms around attention and FFN."""
    facts = {
        **_sizes(config),
        "head_dim": config.integer("head_dim", default=256),
        "max_position": config.integer("max_position_embeddings", default=131072),
        "activation": config.text("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "vocab": config.integer("vocab_size", default=262208),
        "norms_per_layer": 4,
        "qk_norm": True,
        "sliding_window": config.integer("sliding_window", default=4096),
        "default_architecture": "Gemma3ForCausalLM",
    }
    if config.keys.get("layer_types") is None:
        step = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
        facts["sliding_layers"] = facts["layers"] - facts["layers"] // step
    return facts


def _gemma4(config: _Config) -> Facts:
    """Gemma 4: layers without a window have heads of their own size, whose values are their keys; with experts, every
    layer has a dense FFN beside them."""
    facts = _gemma3(config)
    facts |= {
        "full_head_dim": config.integer("global_head_dim", default=0, least=0),
        "full_kv_heads": config.integer("num_global_key_value_heads", default=0, least=0),
        "full_keys_only": config.flag("attention_k_eq_v", False),
        "default_architecture": "Gemma4ForCausalLM",
    }
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if config.keys.get(key):
            raise ProfileError(f"{config.path}: {key}: found {shown(config.keys[key])}, expected 0: not supported")
    if config.flag("enable_moe_block", False):
        facts |= {
            "experts": config.integer("num_experts"),
            "top_k": config.integer("top_k_experts"),
            "expert_intermediate": config.integer("moe_intermediate_size"),
            "shared_intermediate": facts["intermediate"],
            "norms_per_layer": 6,
        }
    return facts


_FAMILIES: dict[str, Callable[[_Config], Facts]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "falcon": _falcon,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "minimax_m2": _minimax,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
}
_EXPERT_FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "minimax_m2",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "gemma4_text",
)
_TEXT_INSIDE = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
"""Models of pictures and text: the type of the language model inside them."""
_LINEAR = "linear attention layers keep a state instead of keys and values"
_CHUNKED = "chunked attention, and layers without positions, are not understood"
_REFUSED = {
    "kimi_k2": "its 384 experts are measured on no card beside its attention",
    "kimi_k25": "a model of pictures around Kimi-K2, whose 384 experts are measured on no card beside its attention",
    "llama4": _CHUNKED,
    "llama4_text": _CHUNKED,
    "qwen3_next": _LINEAR,
    "qwen3_5": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "deepseek_v32": "sparse attention by an indexer is not understood",
}
"""Families that are known and refused, and why."""
