"""Rotary position embedding: the cosine and sine tables of every scaling that the supported configs use.

Tables are computed in float64 and rounded once. Pairs are (i, i + half) over the rotated part of a head, the layout of
Hugging Face weights; GGUF's interleaved weights are rearranged on reading instead (see gguf_file).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor.errors import ExecutorError
from policies.edges.settings import check_value, shown
from profiler.specs.model_spec import ModelSpec

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


def rope_tables(spec: ModelSpec, max_tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [max_tokens, rotated / 2], with the scaling's attention factor multiplied in.

    max_tokens: longest context of this engine. longrope chooses between its two sets of factors by it, once: keys in
    the cache must all have been rotated alike (transformers chooses by each call's length and then mixes the two).
    Raises ExecutorError for a rope_type that is not in ROPE_TYPES or lacks a key, and for numbers that give no angles.
    """
    try:
        frequencies, factor = rope_frequencies(spec, max_tokens)
    except ArithmeticError as error:
        raise ExecutorError(f"model {spec.name}: its rotary embedding cannot be computed: {error}") from None
    except ValueError as error:
        if isinstance(error, ExecutorError):
            raise
        raise ExecutorError(f"model {spec.name}: its rotary embedding cannot be computed: {error}") from None
    angles = torch.arange(max_tokens, dtype=torch.float64)[:, None] * frequencies[None, :]
    tables = (angles.cos() * factor).to(device, dtype), (angles.sin() * factor).to(device, dtype)
    if not all(bool(table.isfinite().all()) for table in tables):
        facts = f"rope_theta {spec.rope_theta}, rope_scaling {dict(spec.rope_scaling or {})}"
        raise ExecutorError(f"model {spec.name}: its rotary embedding is not finite ({facts[:200]})")
    return tables


def rope_frequencies(spec: ModelSpec, max_tokens: int) -> tuple[Tensor, float]:
    """Inverse frequencies (float64, [rotated / 2]) and the factor on cosine and sine."""
    rotated = int(spec.head_dim * spec.rotary_fraction) // 2 * 2
    if not rotated:
        found = f"{spec.rotary_fraction} of a head_dim of {spec.head_dim}"
        raise ExecutorError(f"model {spec.name}: found {found} to rotate, expected two dimensions at least")
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
    plain = spec.rope_theta**-exponents
    scaling = dict(spec.rope_scaling or {})
    kind = str(scaling.get("rope_type", "default"))
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / _number(spec, scaling, "factor"), 1.0
    if kind == "llama3":
        return _llama3(spec, plain, scaling), 1.0
    if kind == "yarn":
        return _yarn(spec, plain, rotated, scaling)
    if kind == "longrope":
        return _longrope(spec, plain, scaling, max_tokens)
    raise ExecutorError(f"model {spec.name}: rope_type: found {kind!r}, expected one of {', '.join(ROPE_TYPES)}")


def _number(spec: ModelSpec, scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ExecutorError(f"model {spec.name}: rope_scaling: {key}: found {shown(value)}, expected a number")
    return float(value)


def _llama3(spec: ModelSpec, plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor = _number(spec, scaling, "factor")
    low, high = _number(spec, scaling, "low_freq_factor"), _number(spec, scaling, "high_freq_factor")
    original = _number(spec, scaling, "original_max_position_embeddings")
    turns = original * plain / (2 * math.pi)  # full turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / factor


def _yarn(spec: ModelSpec, plain: Tensor, rotated: int, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, section 3.2 and 3.4): a ramp over dimensions, and a temperature on the attention."""
    factor = _number(spec, scaling, "factor")
    original = _number(spec, scaling, "original_max_position_embeddings", spec.max_position)

    def dimension(turns: float) -> float:
        return rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    first = dimension(_number(spec, scaling, "beta_fast", 32.0))
    last = dimension(_number(spec, scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    steps = torch.arange(rotated // 2, dtype=torch.float64)
    stretch = ((steps - first) / (last - first if last != first else 0.001)).clamp(0.0, 1.0)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        attention = _number(spec, scaling, "attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention = mscale(_number(spec, scaling, "mscale")) / mscale(_number(spec, scaling, "mscale_all_dim"))
    else:
        attention = mscale(1.0)
    return stretch * plain / factor + (1.0 - stretch) * plain, attention


def _longrope(spec: ModelSpec, plain: Tensor, scaling: Mapping[str, Any], max_tokens: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024) as Phi-3 has it: a factor per dimension, another set beyond the original length."""
    original = _number(spec, scaling, "original_max_position_embeddings", spec.max_position)
    key = "long_factor" if max_tokens > original else "short_factor"
    factors = scaling.get(key)
    where = f"model {spec.name}: rope_scaling: {key}"
    if not isinstance(factors, list | tuple) or len(factors) != len(plain):
        found = len(factors) if isinstance(factors, list | tuple) else shown(factors)
        raise ExecutorError(f"{where}: found {found}, expected {len(plain)} numbers")
    for entry in factors:
        check_value(where, entry, (float,), ExecutorError)
    given = scaling.get("attention_factor")
    stretched = _number(spec, scaling, "factor", spec.max_position / original)
    if given is not None:
        attention = _number(spec, scaling, "attention_factor")
    else:
        attention = math.sqrt(1.0 + math.log(stretched) / math.log(original)) if stretched > 1.0 else 1.0
    return plain / torch.tensor(factors, dtype=torch.float64), attention
