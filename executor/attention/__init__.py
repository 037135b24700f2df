"""Attention backends by name, one file each behind one interface; `auto` takes the fastest that works here."""

from __future__ import annotations

from importlib import import_module

import torch

from executor.attention.base import AttentionBackend
from executor.errors import ExecutorError
from profiler.model_spec import ModelSpec

__all__ = ["BACKENDS", "AttentionBackend", "make_attention"]

BACKENDS: dict[str, str] = {
    "native": "executor.attention.native:NativeAttention",
    "sdpa": "executor.attention.sdpa:SdpaAttention",
    "reference": "executor.attention.reference:ReferenceAttention",
    "reading": "executor.attention.reading:ReadingAttention",
}
"""Name -> where its class lives, fastest first: the order in which `auto` tries them."""


def make_attention(
    name: str,
    spec: ModelSpec,
    device: torch.device,
    kv_dtype: torch.dtype,
    activation_dtype: torch.dtype,
    *,
    heads: int | None = None,
) -> AttentionBackend:
    """The backend of that name, or with `auto` the first that can run this model here.

    Raises ExecutorError for an unknown name, or where the named one cannot run (with its reason).
    """
    if name != "auto" and name not in BACKENDS:
        raise ExecutorError(f"attention: found {name!r}, expected one of auto, {', '.join(BACKENDS)}")
    for candidate in BACKENDS if name == "auto" else (name,):
        module, _, cls_name = BACKENDS[candidate].partition(":")
        cls: type[AttentionBackend] = getattr(import_module(module), cls_name)
        reason = cls.why_not(spec, device, kv_dtype)
        if candidate == "native" and not reason and activation_dtype != torch.float32:
            reason = f"the C++ attention takes float32 activations, these are {activation_dtype}"
        if not reason:
            return cls(spec, heads=heads)
        if name != "auto":
            raise ExecutorError(f"attention {name}: {reason}")
    raise AssertionError("the reference backend runs everywhere")
