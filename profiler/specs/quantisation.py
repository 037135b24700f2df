"""What a checkpoint's quantization_config says of its weights: the method, and the bits that a weight really takes.

Only the linear layers of the transformer's blocks are quantised; embeddings, norms and the output head keep the model's
dtype, as each of these methods has it. Scales (and zero points) of groups are counted with the weights they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from policies.edges.settings import shown
from profiler.errors import ProfileError

SCALE_BITS = 16
"""Of one scale: methods keep it in 16 bits."""
HIGH_PRECISION = ("lm_head", "embed_tokens", "norm", "wte", "wpe", "word_embeddings", "score")
"""What no method quantises anyway, by parts of a module's name."""


ROUTERS = ("gate", "router", "e_score_correction_bias", "shared_expert_gate")
"""Last parts of names that belong to routers, which no method quantises either."""
ATTENTION = ("self_attn",)
"""Last part of the names by which a checkpoint leaves all of attention as it was: experts alone are quantised then."""


class Quantisation(NamedTuple):
    """method: as the config names it, with bits and group. bits: of one weight, its share of scales included. format:
    in which of `profiler.specs.number_format.FORMATS`, "" for one that no table knows. quantised: "blocks" or
    "experts". kv_cache_dtype: of keys and values, where the checkpoint asks for one."""

    method: str
    bits: float
    format: str = ""
    quantised: str = "blocks"
    kv_cache_dtype: str = ""


def read_quantisation(where: str, keys: Mapping[str, Any]) -> Quantisation | None:
    """The quantisation that a Hugging Face config declares (`quantization_config`, or `compression_config`); None for
    none. Raises ProfileError for a method or a value that is not understood: nothing is read as 16 bits in silence."""
    name = next((key for key in ("quantization_config", "compression_config") if keys.get(key)), None)
    if name is None:
        beside = keys.get("quantization")  # ModelOpt's own file beside the config has no quant_method
        return _modelopt(f"{where}: quantization", beside) if isinstance(beside, Mapping) else None
    config = keys[name]
    if not isinstance(config, Mapping):
        raise ProfileError(f"{where}: {name}: found {shown(config)}, expected an object with quant_method")
    where = f"{where}: {name}"
    method = str(config.get("quant_method", "bitsandbytes" if "load_in_4bit" in config else ""))
    if method not in _METHODS:
        raise ProfileError(f"{where}: quant_method: found {shown(method)}, expected one of {', '.join(_METHODS)}")
    experts_alone = _refuse_exceptions(where, config)
    return _METHODS[method](where, config)._replace(quantised="experts" if experts_alone else "blocks")


def _awq(where: str, config: Mapping[str, Any]) -> Quantisation:
    """Groups of 128 inputs, a 16-bit scale each and, with zero points, a zero of as many bits as a weight."""
    bits = _whole(where, config, ("bits", "w_bit"), 4)
    group = _whole(where, config, ("group_size", "q_group_size"), 128)
    return _grouped("awq", bits, group, bits if config.get("zero_point", True) else 0, weights_alone=True)


def _gptq(where: str, config: Mapping[str, Any]) -> Quantisation:
    """As AWQ; zero points are always stored, symmetric or not."""
    bits = _whole(where, config, ("bits",), 4)
    return _grouped("gptq", bits, _whole(where, config, ("group_size",), 128), bits, weights_alone=True)


def _fp8(where: str, config: Mapping[str, Any]) -> Quantisation:
    """8 bits; a 32-bit scale per tensor, or per block of weight_block_size."""
    block = config.get("weight_block_size")
    if block is None:
        return Quantisation("fp8", 8.0, "fp8")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(side, int) and side > 0 for side in block)):
        raise ProfileError(f"{where}: weight_block_size: found {shown(block)}, expected two whole numbers")
    name = f"fp8 in blocks of {block[0]} x {block[1]}"
    return Quantisation(name, 8 + 32 / (block[0] * block[1]), "fp8_block" if block == [128, 128] else "")


def _mxfp4(where: str, config: Mapping[str, Any]) -> Quantisation:
    """Microscaling: 4 bits and an 8-bit exponent for every 32."""
    return Quantisation("mxfp4", 4 + 8 / 32, "w4a16_mxfp4")


def _modelopt(where: str, config: Mapping[str, Any]) -> Quantisation:
    """NVIDIA ModelOpt: the algorithm by name, keys and values apart."""
    algorithm = str(config.get("quant_algo") or "")
    known = {
        "FP8": Quantisation("fp8 (modelopt)", 8.0, "fp8"),
        "NVFP4": Quantisation("nvfp4 (modelopt)", 4 + 8 / 16, "nvfp4"),
        "W4A16_AWQ": Quantisation("awq (modelopt), 4 bits in groups of 128", 4 + 16 / 128, "int4_wo"),
    }
    if algorithm not in known:
        raise ProfileError(f"{where}: quant_algo: found {shown(algorithm)}, expected one of {', '.join(known)}")
    keys_values = str(config.get("kv_cache_quant_algo") or "")
    if keys_values not in ("", "FP8", "None"):
        raise ProfileError(f"{where}: kv_cache_quant_algo: found {shown(keys_values)}, expected FP8 or none")
    _refuse_exceptions(where, {"ignore": config.get("exclude_modules") or config.get("ignore") or ()})
    return known[algorithm]._replace(kv_cache_dtype="float8" if keys_values == "FP8" else "")


def _compressed_tensors(where: str, config: Mapping[str, Any]) -> Quantisation:
    """One group of layers with one form of weights; several would need to know which layer is in which."""
    groups = config.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    forms = [form for form in weights if isinstance(form, Mapping)]
    if not forms or any(form != forms[0] for form in forms):
        raise ProfileError(f"{where}: config_groups: found {len(forms)} forms of weights, expected one for all layers")
    bits = _whole(where, forms[0], ("num_bits",), 8)
    kind = str(forms[0].get("type", "int"))
    group = forms[0].get("group_size")
    name = f"compressed-tensors {kind}"
    zeros = 0 if forms[0].get("symmetric", True) else bits
    inputs = any(isinstance(one, Mapping) and one.get("input_activations") for one in groups.values())
    cache = config.get("kv_cache_scheme")
    found = _grouped(
        name,
        bits,
        _whole(where, forms[0], ("group_size",), -1) if group else -1,
        zeros,
        weights_alone=not inputs,
        floats=kind == "float",
    )
    return found._replace(kv_cache_dtype="float8" if isinstance(cache, Mapping) and cache.get("num_bits") == 8 else "")


def _bitsandbytes(where: str, config: Mapping[str, Any]) -> Quantisation:
    """8 bits; or 4 with a 32-bit maximum per 64 weights, itself in 8 bits (32 per 256 of them) if doubly quantised."""
    if config.get("load_in_8bit"):
        return Quantisation("bitsandbytes 8 bits", 8.0, "")
    if not config.get("load_in_4bit"):
        raise ProfileError(f"{where}: found neither load_in_8bit nor load_in_4bit, expected one of them to be true")
    scale = 8 / 64 + 32 / (64 * 256) if config.get("bnb_4bit_use_double_quant") else 32 / 64
    return Quantisation("bitsandbytes 4 bits", 4 + scale)


_METHODS = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
}


def _grouped(
    name: str, bits: int, group: int, zero_bits: int, *, weights_alone: bool = False, floats: bool = False
) -> Quantisation:
    """group: inputs that share a scale; below 1 for a whole row of the matrix, which is thousands of weights."""
    if bits == 4:
        table = "nvfp4" if floats else "int4_wo" if weights_alone else ""
    else:
        table = {(8, True): "fp8", (8, False): "int8_wo" if weights_alone else "int8"}.get((bits, floats), "")
    if group < 1:
        return Quantisation(f"{name}, {bits} bits", float(bits), table)
    return Quantisation(f"{name}, {bits} bits in groups of {group}", bits + (SCALE_BITS + zero_bits) / group, table)


def _whole(where: str, config: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= 1 << 20:
            raise ProfileError(f"{where}: {name}: found {shown(value)}, expected a whole number")
        return value
    return default


def _refuse_exceptions(where: str, config: Mapping[str, Any]) -> bool:
    """Whether all of attention is left as it was. Other linear layers of the blocks that stay as they were would have
    to be counted one by one, and are refused."""
    experts_alone = False
    for key in ("modules_to_not_convert", "ignore", "llm_int8_skip_modules", "ignored_layers"):
        names = config.get(key) or ()
        if not isinstance(names, list | tuple):
            raise ProfileError(f"{where}: {key}: found {shown(names)}, expected a list of modules")
        for name in names:
            last = str(name).removeprefix("re:").rstrip("$*.").rsplit(".", 1)[-1]
            if last in ATTENTION and "*" in str(name):
                experts_alone = True
            elif last not in ROUTERS and not any(part in str(name) for part in HIGH_PRECISION):
                raise ProfileError(
                    f"{where}: {key}: found {shown(name)}, expected modules beside the blocks' linear layers alone "
                    f"({', '.join(HIGH_PRECISION[:3])}, ...): blocks that are quantised in part are not understood"
                )
    return experts_alone
