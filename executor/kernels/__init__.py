"""Kernel sets by name; `auto` takes the fastest that works here."""

from __future__ import annotations

import torch

from executor.errors import ExecutorError
from executor.kernels.base import Kernels, Linear

__all__ = ["KERNELS", "Kernels", "Linear", "make_kernels"]

KERNELS = ("auto", "native", "triton", "compiled", "plain_device", "torch")


def make_kernels(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    *,
    with_experts: bool = False,
) -> Kernels:
    """The kernel set for a device, a weight dtype and the dtype of the pool that keys and values go to (the weights').
    with_experts: the model has experts, so that `auto` tests their kernels too.

    `auto`: `native` on a CPU for float32 and bfloat16 weights and pools where the C++ kernels can be built; on CUDA
    `triton` where it imports and its self-test passes, else `plain_device`; otherwise `torch`.
    Raises ExecutorError for an unknown name, or for one that cannot run here.
    """
    if name not in KERNELS:
        raise ExecutorError(f"kernels: found {name!r}, expected one of {', '.join(KERNELS)}")
    from executor.kernels.plain import PlainKernels

    if name == "torch":
        return PlainKernels(device, dtype)
    if name in ("triton", "compiled", "plain_device") or (name == "auto" and device.type == "cuda"):
        return _device_kernels(name, device, dtype, with_experts)
    from executor.kernels.native import DTYPES, NativeKernels
    from executor.native.library import native_reason

    kv_dtype = dtype if kv_dtype is None else kv_dtype
    fits = device.type == "cpu" and dtype in DTYPES and kv_dtype in DTYPES
    if name == "native" and not fits:
        found = f"{dtype} with a KV pool of {kv_dtype} on {device}"
        raise ExecutorError(f"kernels: native runs float32 and bfloat16 on a CPU; found {found}")
    if name == "native" or (fits and not native_reason()):
        return NativeKernels(device)
    return PlainKernels(device, dtype)


def _device_kernels(name: str, device: torch.device, dtype: torch.dtype, with_experts: bool) -> Kernels:
    from executor.kernels.device import FUSIONS, DeviceKernels, TritonKernels

    if name == "plain_device":
        return DeviceKernels(device, dtype)
    if name == "triton":
        return TritonKernels(device, dtype)
    if name == "compiled":
        from executor.kernels.compiled import CompiledKernels

        return CompiledKernels(device, dtype)
    from executor.checks.self_test import why_experts_fail, why_kernels_fail

    if why_kernels_fail(device, dtype):
        return DeviceKernels(device, dtype)
    plain_experts = with_experts and why_experts_fail(device, dtype)
    return TritonKernels(device, dtype, fused=FUSIONS - {"experts"} if plain_experts else FUSIONS)
