"""How weights may be stored with fewer bits, by the names that kernel tables and engines use.

A format says what a weight takes with its share of scales, and in which numbers its products are made: weight-only
formats (int4, mxfp4) are unpacked to 16 bits on their way to the processors.
"""

from __future__ import annotations

from typing import NamedTuple

from profiler.errors import ProfileError
from profiler.specs.dtypes import DTYPE_BYTES, canonical_dtype


class NumberFormat(NamedTuple):
    """bits: of one weight with its share of scales, as the format is usually stored. products: dtype in which products
    are made; "" for that of the activations. words: what it is."""

    bits: float
    products: str
    words: str


FORMATS: dict[str, NumberFormat] = {
    "fp8": NumberFormat(8.0, "float8", "8-bit floats, one scale a tensor or token"),
    "fp8_block": NumberFormat(8 + 32 / (128 * 128), "float8", "8-bit floats, a 32-bit scale a block of 128 x 128"),
    "int8": NumberFormat(8.0, "int8", "8-bit integers, one scale a channel and token"),
    "int8_wo": NumberFormat(8.0, "", "8-bit integers, weights alone"),
    "int4_wo": NumberFormat(4 + 16 / 128, "", "4-bit integers, weights alone, a 16-bit scale a group of 128"),
    "w4a16_mxfp4": NumberFormat(4 + 8 / 32, "", "4-bit floats, weights alone, an 8-bit scale a group of 32"),
    "nvfp4": NumberFormat(4 + 8 / 16, "float4", "4-bit floats, an 8-bit scale a group of 16"),
}
_ALIASES = {
    "float8": "fp8",
    "fp8_e4m3": "fp8",
    "block_fp8": "fp8_block",
    "int4": "int4_wo",
    "awq": "int4_wo",
    "gptq": "int4_wo",
    "mxfp4": "w4a16_mxfp4",
    "fp4": "nvfp4",
}


def weight_format(name: str) -> str:
    """The spelling used in tables of a `--weight-dtype`: a format's name, "auto", or a dtype that is not quantised."""
    text = name.strip().lower().removeprefix("torch.")
    text = _ALIASES.get(text, text)
    if text in FORMATS or text == "auto":
        return text
    try:
        plain = canonical_dtype(text)
    except ProfileError:
        plain = ""
    if plain not in ("bfloat16", "float16", "float32"):
        known = ", ".join(["auto", "bfloat16", "float16", "float32", *FORMATS, *_ALIASES])
        raise ProfileError(f"weight dtype: found {name!r}, expected one of {known}")
    return plain


def format_of_dtype(dtype: str) -> str:
    """The format of weights that a dtype of fewer than 16 bits stands for; "" for others."""
    name = canonical_dtype(dtype)
    return {"float8": "fp8", "int8": "int8"}.get(name, "") if DTYPE_BYTES[name] < 2 else ""
