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


class Quantisation(NamedTuple):
    """method: as the config names it, with bits and group. bits: of one weight, its share of scales included."""

    method: str
    bits: float


def read_quantisation(where: str, keys: Mapping[str, Any]) -> Quantisation | None:
    """The quantisation that a Hugging Face config declares (`quantization_config`, or `compression_config`); None for
    none. Raises ProfileError for a method or a value that is not understood: nothing is read as 16 bits in silence."""
    name = next((key for key in ("quantization_config", "compression_config") if keys.get(key)), None)
    if name is None:
        return None
    config = keys[name]
    if not isinstance(config, Mapping):
        raise ProfileError(f"{where}: {name}: found {shown(config)}, expected an object with quant_method")
    where = f"{where}: {name}"
    method = str(config.get("quant_method", "bitsandbytes" if "load_in_4bit" in config else ""))
    if method not in _METHODS:
        raise ProfileError(f"{where}: quant_method: found {shown(method)}, expected one of {', '.join(_METHODS)}")
    _refuse_exceptions(where, config)
    return _METHODS[method](where, config)


def _awq(where: str, config: Mapping[str, Any]) -> Quantisation:
    """Groups of 128 inputs, a 16-bit scale each and, with zero points, a zero of as many bits as a weight."""
    bits = _whole(where, config, ("bits", "w_bit"), 4)
    group = _whole(where, config, ("group_size", "q_group_size"), 128)
    return _grouped("awq", bits, group, bits if config.get("zero_point", True) else 0)


def _gptq(where: str, config: Mapping[str, Any]) -> Quantisation:
    """As AWQ; zero points are always stored, symmetric or not."""
    bits = _whole(where, config, ("bits",), 4)
    return _grouped("gptq", bits, _whole(where, config, ("group_size",), 128), bits)


def _fp8(where: str, config: Mapping[str, Any]) -> Quantisation:
    """8 bits; a 32-bit scale per tensor, or per block of weight_block_size."""
    block = config.get("weight_block_size")
    if block is None:
        return Quantisation("fp8", 8.0)
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(side, int) and side > 0 for side in block)):
        raise ProfileError(f"{where}: weight_block_size: found {shown(block)}, expected two whole numbers")
    return Quantisation(f"fp8 in blocks of {block[0]} x {block[1]}", 8 + 32 / (block[0] * block[1]))


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
    return _grouped(name, bits, _whole(where, forms[0], ("group_size",), -1) if group else -1, zeros)


def _bitsandbytes(where: str, config: Mapping[str, Any]) -> Quantisation:
    """8 bits; or 4 with a 32-bit maximum per 64 weights, itself in 8 bits (32 per 256 of them) if doubly quantised."""
    if config.get("load_in_8bit"):
        return Quantisation("bitsandbytes 8 bits", 8.0)
    if not config.get("load_in_4bit"):
        raise ProfileError(f"{where}: found neither load_in_8bit nor load_in_4bit, expected one of them to be true")
    scale = 8 / 64 + 32 / (64 * 256) if config.get("bnb_4bit_use_double_quant") else 32 / 64
    return Quantisation("bitsandbytes 4 bits", 4 + scale)


_METHODS = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
}


def _grouped(name: str, bits: int, group: int, zero_bits: int) -> Quantisation:
    if group < 1:  # one scale for a whole row of the matrix: thousands of weights
        return Quantisation(f"{name}, {bits} bits", float(bits))
    return Quantisation(f"{name}, {bits} bits in groups of {group}", bits + (SCALE_BITS + zero_bits) / group)


def _whole(where: str, config: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= 1 << 20:
            raise ProfileError(f"{where}: {name}: found {shown(value)}, expected a whole number")
        return value
    return default


def _refuse_exceptions(where: str, config: Mapping[str, Any]) -> None:
    """Linear layers of the blocks that stay as they were would have to be counted one by one."""
    for key in ("modules_to_not_convert", "ignore", "llm_int8_skip_modules", "ignored_layers"):
        names = config.get(key) or ()
        if not isinstance(names, list | tuple):
            raise ProfileError(f"{where}: {key}: found {shown(names)}, expected a list of modules")
        for name in names:
            if not any(part in str(name) for part in HIGH_PRECISION):
                raise ProfileError(
                    f"{where}: {key}: found {shown(name)}, expected modules beside the blocks' linear layers alone "
                    f"({', '.join(HIGH_PRECISION[:3])}, ...): blocks that are quantised in part are not understood"
                )
