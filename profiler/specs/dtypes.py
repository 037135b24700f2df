"""Number formats by name: one spelling inside, many accepted at the door."""

from __future__ import annotations

from profiler.errors import ProfileError

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}

_ALIASES = {
    "auto": "bfloat16",
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8",
    "fp8_e4m3": "float8",
    "fp8_e5m2": "float8",
    "float8_e4m3fn": "float8",
    "float8_e5m2": "float8",
}


def canonical_dtype(name: str) -> str:
    """The spelling used in tables and specs ("bf16", "torch.bfloat16" and "auto" -> "bfloat16")."""
    text = name.strip().lower().removeprefix("torch.")
    text = _ALIASES.get(text, text)
    if text not in DTYPE_BYTES:
        known = ", ".join([*DTYPE_BYTES, *sorted(_ALIASES)])
        raise ProfileError(f"dtype: found {name!r}, expected one of {known}")
    return text


def dtype_bytes(name: str) -> int:
    """Bytes of one element."""
    return DTYPE_BYTES[canonical_dtype(name)]
