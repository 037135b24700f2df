"""Attention backends by name, one file each behind one interface; `auto` takes the fastest that works here."""

from __future__ import annotations

from importlib import import_module

import torch

from executor.attention.base import AttentionBackend
from executor.errors import ExecutorError
from profiler.specs.model_spec import ModelSpec

__all__ = ["BACKENDS", "AttentionBackend", "backend_class", "make_attention"]

BACKENDS: dict[str, str] = {
    "flash_attn": "executor.attention.flash_attn:FlashAttention",
    "triton": "executor.attention.triton:TritonAttention",
    "native": "executor.attention.native:NativeAttention",
    "sdpa": "executor.attention.sdpa:SdpaAttention",
    "flex": "executor.attention.flex:FlexAttention",
    "paged": "executor.attention.paged:PagedAttention",
    "reference": "executor.attention.reference:ReferenceAttention",
    "reading": "executor.attention.reading:ReadingAttention",
    "packed": "executor.attention.packed:PackedDecodes",
}
"""Name -> where its class lives, fastest first: the order in which `auto` tries them (flex only by its name)."""

_CUDA_ONLY = ("flash_attn", "triton")
"""What `auto` tries on CUDA alone, and takes only if it passes its self-test there."""


def backend_class(name: str) -> type[AttentionBackend]:
    """The class behind a name of BACKENDS."""
    module, _, cls_name = BACKENDS[name].partition(":")
    cls: type[AttentionBackend] = getattr(import_module(module), cls_name)
    return cls


def make_attention(
    name: str,
    spec: ModelSpec,
    device: torch.device,
    kv_dtype: torch.dtype,
    activation_dtype: torch.dtype,
    *,
    heads: int | None = None,
    block_size: int | None = None,
) -> AttentionBackend:
    """The backend of that name, or with `auto` the first that can run this model here.

    block_size: tokens per block of the pool that it will read, where known: some backends read large blocks only.
    Raises ExecutorError for an unknown name, or where the named one cannot run (with its reason).
    """
    if name != "auto" and name not in BACKENDS:
        raise ExecutorError(f"attention: found {name!r}, expected one of auto, {', '.join(BACKENDS)}")
    passed_over = []
    for candidate in BACKENDS if name == "auto" else (name,):
        if name == "auto" and (candidate == "flex" or (candidate in _CUDA_ONLY and device.type != "cuda")):
            continue
        for cls in backend_class(candidate).forms(device):
            reason = cls.why_not(spec, device, kv_dtype)
            if not reason and block_size is not None:
                reason = cls.why_not_blocks(block_size)
            if candidate == "native" and not reason and activation_dtype != torch.float32:
                reason = f"the C++ attention takes float32 activations, these are {activation_dtype}"
            if not reason and candidate in _CUDA_ONLY and (name == "auto" or len(cls.forms(device)) > 1):
                from executor.checks.self_test import why_attention_fails

                reason = why_attention_fails(cls, spec, device, kv_dtype, block_size or 16)
            if not reason:
                backend = cls(spec, heads=heads)
                backend.passed_over = "; ".join(passed_over)
                return backend
            passed_over.append(f"{candidate}: {reason}")
    if name != "auto":
        raise ExecutorError("attention " + "; ".join(passed_over))
    raise AssertionError("the reference backend runs everywhere")
