"""Builds the C++ kernels once per machine and loads them through ctypes.

The shared object is compiled into a temporary name and renamed, so that two processes may build at once and a killed
build leaves nothing behind. Threads are the library's own (native/pool.h), as many as PyTorch has when a step begins.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

from executor.errors import ExecutorError
from policies.edges.output_file import clear_leftovers, refuse_strangers, scratch_prefix

_SOURCES = ("kernels.cpp", "attention.h", "experts.h", "gemm.h", "pointwise.h", "pool.h", "vec.h")
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-pthread")
if platform.machine().lower() in ("x86_64", "amd64"):
    _FLAGS += ("-mprefer-vector-width=512",)


class NativeError(ExecutorError):
    """The C++ kernels cannot be built or loaded here; the message says why."""


class Pool(ctypes.Structure):
    """attention.h `Pool`: one layer of the key/value pool."""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_size", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
    ]


class Work(ctypes.Structure):
    """attention.h `Work`: one layer's attention over a whole batch."""

    _fields_ = [
        ("pool", Pool),
        ("tables", c_void_p),
        ("table_width", c_long),
        ("q", c_void_p),
        ("out", c_void_p),
        ("ldq", c_long),
        ("ldo", c_long),
        ("heads", c_int),
        ("window", c_int),
        ("scale", c_float),
        ("num_chunks", c_long),
        ("num_decodes", c_long),
        ("chunk_row", c_void_p),
        ("chunk_tokens", c_void_p),
        ("chunk_prefix", c_void_p),
        ("chunk_table", c_void_p),
        ("decode_row", c_void_p),
        ("decode_context", c_void_p),
        ("decode_table", c_void_p),
    ]


class Rotation(ctypes.Structure):
    """pointwise.h `Rotation`: rotary embedding and the store into the pool for a whole batch."""

    _fields_ = [
        ("qkv", c_void_p),
        ("ld", c_long),
        ("rows", c_long),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("half", c_long),
        ("heads", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("block_size", c_int),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
        ("keys", c_void_p),
        ("values", c_void_p),
    ]


class ExpertLayer(ctypes.Structure):
    """experts.h `ExpertLayer`: one layer's experts over a whole batch."""

    _fields_ = [
        ("x", c_void_p),
        ("ldx", c_long),
        ("rows", c_long),
        ("hidden", c_long),
        ("width", c_long),
        ("logits", c_void_p),
        ("ld_logits", c_long),
        ("experts", c_int),
        ("top_k", c_int),
        ("norm_topk", c_int),
        ("half", c_int),
        ("shared_gate", c_int),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("gate_up_panels", c_long),
        ("down_panels", c_long),
        ("shared", c_void_p),
        ("out", c_void_p),
        ("ldo", c_long),
        ("ids", c_void_p),
        ("place", c_void_p),
        ("counts", c_void_p),
        ("weights", c_void_p),
        ("gathered", c_void_p),
        ("activated", c_void_p),
        ("products", c_void_p),
    ]


_SIGNATURES = {
    "ct_lanes": (c_int, []),
    "ct_queries": (c_int, []),
    "ct_set_threads": (None, [c_int]),
    "ct_packed_panels": (c_long, [c_long, c_int]),
    "ct_pack": (None, [c_void_p, c_long, c_long, c_long, c_int, c_int, c_void_p]),
    "ct_gemm": (
        None,
        [c_void_p, c_long, c_long, c_void_p, c_int, c_long, c_long, c_long, c_void_p, c_void_p, c_long, c_long, c_int],
    ),
    "ct_experts": (None, [POINTER(ExpertLayer)]),
    "ct_rms_norm": (None, [c_void_p, c_long, c_void_p, c_float, c_long, c_long, c_void_p]),
    "ct_embed": (None, [c_void_p, c_long, c_void_p, c_int, c_long, c_void_p]),
    "ct_rotate_and_store": (None, [POINTER(Rotation), c_int]),
    "ct_attend": (None, [POINTER(Work), c_int]),
    "ct_argmax": (None, [c_void_p, c_long, c_long, c_long, c_void_p]),
}

__all__ = ["ExpertLayer", "NativeError", "Pool", "Rotation", "Work", "native_library", "native_reason"]


@cache
def _attempt() -> tuple[ctypes.CDLL | None, str]:
    try:
        return _load(), ""
    except NativeError as error:
        return None, str(error)


def native_library() -> ctypes.CDLL:
    """The loaded kernels; built on the first call of this machine (about 7 s), afterwards found in the cache folder.

    Raises NativeError with the reason (no compiler, a failed build, CHARIOTEER_NATIVE=0).
    """
    library, reason = _attempt()
    if library is None:
        raise NativeError(reason)
    return library


def native_reason() -> str:
    """Empty when the kernels work here, else why they do not."""
    return _attempt()[1]


def _load() -> ctypes.CDLL:
    if os.environ.get("CHARIOTEER_NATIVE", "1") == "0":
        raise NativeError("C++ kernels are switched off by CHARIOTEER_NATIVE=0")
    path = _build()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"C++ kernels: {path}: cannot be loaded: {error}") from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _build() -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NativeError("C++ kernels need a compiler: found neither g++ nor clang++ (install g++, or set CXX)")
    folder = Path(__file__).parent
    key = hashlib.sha256("\0".join((compiler, *_FLAGS, _machine())).encode())
    for name in _SOURCES:
        key.update((folder / name).read_bytes())
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "charioteer"
    target = cache_folder / f"kernels-{key.hexdigest()[:16]}.so"
    try:
        cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "geteuid") and (status := cache_folder.lstat()).st_uid == os.geteuid():
            cache_folder.chmod(status.st_mode & 0o7755)  # a wide umask made it; who wrote what is looked at below
        refuse_strangers(cache_folder, NativeError)
        if os.path.lexists(target):
            refuse_strangers(target, NativeError)
            return target
        clear_leftovers(cache_folder)
        with tempfile.TemporaryDirectory(".part", scratch_prefix("kernels"), cache_folder) as temporary:
            compiled, linked = Path(temporary) / "kernels.o", Path(temporary) / "kernels.so"
            _run([compiler, *_FLAGS, "-c", str(folder / "kernels.cpp"), "-o", str(compiled)])
            _run([compiler, "-shared", "-pthread", str(compiled), "-o", str(linked)])
            linked.chmod(0o700)
            os.replace(linked, target)
    except OSError as error:
        raise NativeError(f"C++ kernels: {cache_folder}: cannot be written: {error}") from None
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        told = next((line for line in lines if "error" in line), lines[0])  # not the headers that lead to it
        raise NativeError(f"C++ kernels: {command[0]} failed: {told}")


def _machine() -> str:
    """What -march=native depends on: a cache folder shared between machines must not mix them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
