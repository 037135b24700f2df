"""A model's weights as plain tensors, from a Hugging Face folder (safetensors only) or drawn from a seed.

Projections that read the same input are merged on loading (q, k, v into one matrix; gate and up into one), so that the
model has four matrix products a layer whatever the checkpoint calls its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor.errors import ExecutorError
from executor.kernels.experts import ExpertWeights
from policies.edges.input_file import checked_file, read_json
from profiler.specs.model_spec import ModelSpec

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
MAX_INDEX_BYTES = 64 << 20
CPU = torch.device("cpu")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
STORED_DTYPES = ("F64", "F32", "F16", "BF16")
"""How weights may be stored; whole numbers and 8-bit floats belong to quantised forms that have scales beside them."""


@dataclass
class LayerWeights:
    """One transformer layer. Matrices are [out, in]; biases and q/k norms are None where the model has none.

    A layer has gate_up and down, or experts.
    """

    attention_norm: Tensor
    qkv: Tensor
    attention_out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor | None
    down: Tensor | None
    qkv_bias: Tensor | None = None
    attention_out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    experts: ExpertWeights | None = None

    def tensors(self) -> list[Tensor]:
        """All of the layer's."""
        own = [value for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)]
        return own + (self.experts.tensors() if self.experts is not None else [])


@dataclass
class Weights:
    """embedding and head: [vocab, hidden]; the same tensor where embeddings are tied."""

    embedding: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    head: Tensor

    def num_bytes(self) -> int:
        tensors = [self.embedding, self.final_norm] + ([] if self.head is self.embedding else [self.head])
        for layer in self.layers:
            tensors += layer.tensors()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_executable(spec: ModelSpec) -> None:
    """Raise ExecutorError unless the executor can run this architecture (the Llama family)."""
    wanted = (
        ("norm", spec.norm, "rmsnorm"),
        ("position", spec.position, "rope"),
        ("activation", spec.activation, "silu"),
        ("gated", spec.gated, True),
        ("parallel_attention", spec.parallel_attention, False),
        ("kv_latent", spec.kv_latent, 0),
        ("attention_sinks", spec.attention_sinks, False),
        ("qk_norm_whole", spec.qk_norm_whole, False),
        ("full_kv_heads", spec.full_kv_heads, 0),
        ("full_head_dim", spec.full_head_dim, 0),
        ("router_bias", spec.router_bias, False),
        ("expert_bias", spec.expert_bias, False),
    )
    for key, found, expected in wanted:
        if found != expected:
            raise ExecutorError(
                f"model {spec.name}: {key} is {found!r}, expected {expected!r}: the executor runs the Llama family "
                "(Llama, Mistral, Qwen2, Qwen3, Phi-3, Mixtral, Qwen2-MoE, Qwen3-MoE); the simulator takes any spec"
            )
    if spec.experts and spec.mlp_bias:
        raise ExecutorError(f"model {spec.name}: mlp_bias beside experts: the executor runs experts without biases")


def assemble(spec: ModelSpec, take: Callable[[str, tuple[int, ...]], Tensor], names: set[str]) -> Weights:
    """Weights from a source that gives tensors by Hugging Face name.

    take(name, shape): the tensor, already of the wanted dtype and device; raises when its shape differs.
    names: which tensors the source has; merged forms (Phi-3's qkv_proj, gate_up_proj) are taken where they exist.
    """
    layers = assemble_layers(spec, take, names)
    embedding = take(EMBEDDING, (spec.vocab, spec.hidden))
    head = embedding if spec.tied_embeddings else take(HEAD, (spec.vocab, spec.hidden))
    return Weights(embedding, layers, take(FINAL_NORM, (spec.hidden,)), head)


def assemble_layers(
    spec: ModelSpec, take: Callable[[str, tuple[int, ...]], Tensor], names: set[str]
) -> list[LayerWeights]:
    """The transformer layers of `assemble`."""
    hidden, ffn, d = spec.hidden, spec.intermediate, spec.head_dim
    q, kv = spec.q_size, spec.kv_size

    def merged(prefix: str, whole: str, parts: tuple[tuple[str, int], ...], kind: str) -> Tensor:
        columns = (hidden,) if kind == "weight" else ()
        if f"{prefix}{whole}.{kind}" in names:
            return take(f"{prefix}{whole}.{kind}", (sum(rows for _, rows in parts), *columns))
        return torch.cat([take(f"{prefix}{part}.{kind}", (rows, *columns)) for part, rows in parts])

    layers = []
    for index in range(spec.layers):
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv_parts = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
        ffn_parts = (("gate_proj", ffn), ("up_proj", ffn))
        dense = not spec.has_experts(index)
        layers.append(
            LayerWeights(
                attention_norm=take(prefix + "input_layernorm.weight", (hidden,)),
                qkv=merged(attention, "qkv_proj", qkv_parts, "weight"),
                qkv_bias=merged(attention, "qkv_proj", qkv_parts, "bias") if spec.qkv_bias else None,
                attention_out=take(attention + "o_proj.weight", (hidden, q)),
                attention_out_bias=take(attention + "o_proj.bias", (hidden,)) if spec.out_bias else None,
                q_norm=take(attention + "q_norm.weight", (d,)) if spec.qk_norm else None,
                k_norm=take(attention + "k_norm.weight", (d,)) if spec.qk_norm else None,
                ffn_norm=take(prefix + "post_attention_layernorm.weight", (hidden,)),
                gate_up=merged(mlp, "gate_up_proj", ffn_parts, "weight") if dense else None,
                gate_up_bias=merged(mlp, "gate_up_proj", ffn_parts, "bias") if spec.mlp_bias else None,
                down=take(mlp + "down_proj.weight", (hidden, ffn)) if dense else None,
                down_bias=take(mlp + "down_proj.bias", (hidden,)) if spec.mlp_bias else None,
                experts=None if dense else _experts(spec, prefix, take, names),
            )
        )
    return layers


def _experts(
    spec: ModelSpec, prefix: str, take: Callable[[str, tuple[int, ...]], Tensor], names: set[str]
) -> ExpertWeights:
    """One layer's experts under Mixtral's names (block_sparse_moe, w1, w3, w2) where the source has those, otherwise
    under Qwen's."""
    hidden, width, shared = spec.hidden, spec.expert_intermediate, spec.shared_intermediate
    mlp, (gate, up, down) = prefix + "mlp.", ("gate_proj", "up_proj", "down_proj")
    if f"{prefix}block_sparse_moe.gate.weight" in names:
        mlp, (gate, up, down) = prefix + "block_sparse_moe.", ("w1", "w3", "w2")

    def pair(where: str, width: int) -> tuple[Tensor, Tensor]:
        both = [take(f"{where}{part}.weight", (width, hidden)) for part in (gate, up)]
        return torch.cat(both), take(f"{where}{down}.weight", (hidden, width))

    routed = [pair(f"{mlp}experts.{number}.", width) for number in range(spec.experts)]
    gate_up = torch.stack([up_rows for up_rows, _ in routed])
    found = ExpertWeights(
        take(mlp + "gate.weight", (spec.experts, hidden)),
        gate_up,
        torch.stack([down_rows for _, down_rows in routed]),
        spec.top_k,
        spec.norm_topk,
    )
    if shared:
        found.shared_gate_up, found.shared_down = pair(mlp + "shared_expert.", shared)
        if spec.shared_gate:
            found.shared_gate = take(mlp + "shared_expert_gate.weight", (1, hidden))
    return found


def random_weights(spec: ModelSpec, seed: int, dtype: torch.dtype, device: torch.device) -> Weights:
    """Weights drawn from a seed: normal with deviation 0.02 (norms 1, biases small), the usual start of training.

    Every tensor has a generator of its own, named by seed and tensor, so values do not depend on the order of drawing,
    and float32 is drawn first, so that every dtype sees the same values rounded. Drawn on the device that keeps them:
    8 billion take over a minute on a CPU. A GPU's generator is another one, so its values differ from a CPU's.
    """
    check_executable(spec)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        return random_tensor(seed, name, shape, device).to(dtype)

    return assemble(spec, draw, random_names(spec))


def random_names(spec: ModelSpec) -> set[str]:
    return set() if spec.tied_embeddings else {HEAD}


def random_tensor(seed: int, name: str, shape: tuple[int, ...], device: torch.device = CPU) -> Tensor:
    """One tensor of `random_weights`, in float32 on the device."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    generator = torch.Generator(device=device).manual_seed(_tensor_seed(seed, name))
    return torch.randn(shape, generator=generator, device=device).mul_(0.02)


def _tensor_seed(seed: int, name: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


def folder_weights(folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Weights:
    """Weights of a Hugging Face folder: model.safetensors, or the shards that model.safetensors.index.json names.

    Raises ExecutorError for missing files, missing or unknown tensors and wrong shapes; never opens a pickle.
    """
    check_executable(spec)
    homes = tensor_homes(folder)
    check_all_known(folder, spec, homes)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        whole: Tensor = stored_tensor(folder, homes, name, shape)[:]
        return whole.to(device, dtype)

    return assemble(spec, take, set(homes))


def stored_tensor(folder: Path, homes: Mapping[str, Path], name: str, shape: tuple[int, ...]) -> Any:
    """A tensor of a folder that is read only where it is sliced; ExecutorError unless it is there with this shape."""
    home = homes.get(name)
    if home is None:
        raise ExecutorError(f"{folder}: tensor {name} is missing; the config asks for it with shape {list(shape)}")
    stored = _open(home).get_slice(name)
    if tuple(stored.get_shape()) != shape:
        raise ExecutorError(f"{home}: tensor {name}: found shape {list(stored.get_shape())}, expected {list(shape)}")
    if stored.get_dtype() not in STORED_DTYPES:
        found, known = stored.get_dtype(), ", ".join(STORED_DTYPES)
        raise ExecutorError(f"{home}: tensor {name}: found {found}, expected plain weights ({known})")
    return stored


def check_all_known(folder: Path, spec: ModelSpec, homes: Mapping[str, Path]) -> None:
    """Raise for a tensor that the model has no place for: weights must not be ignored silently."""
    used = names_taken(folder, spec, set(homes), len(homes))
    # A tied model may still carry its head; rotary tables are derived.
    unknown = [name for name in homes if name not in used and name != HEAD and "rotary" not in name]
    if unknown:
        raise ExecutorError(f"{folder}: tensor {sorted(unknown)[0]} is not of this architecture ({len(unknown)} such)")


def names_taken(where: Path, spec: ModelSpec, names: set[str], num_tensors: int) -> set[str]:
    """The tensors that `assemble` asks a source for that has `names`.

    ExecutorError where it holds fewer tensors than the model has layers: 10^12 layers would be asked for one by one.
    """
    if spec.layers > num_tensors:
        raise ExecutorError(f"{where}: found {num_tensors} tensors, expected the weights of {spec.layers} layers")
    used: set[str] = set()

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        used.add(name)
        return torch.empty(shape, device="meta")

    assemble(spec, take, names)
    return used


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(checked_file(path, ExecutorError, 1 << 50), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ExecutorError(f"{path}: cannot be read as safetensors: {error}") from None


def tensor_homes(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = read_json(index, ExecutorError, MAX_INDEX_BYTES)
        names = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
            raise ExecutorError(f"{index}: found no weight_map, expected an index of shards")
        outside = [file for file in names.values() if file in ("", "..") or file != Path(file).name]
        if outside:
            raise ExecutorError(f"{index}: found shard {outside[0][:60]!r}, expected the name of a file beside it")
        homes = {name: folder / file for name, file in names.items()}
        missing = sorted({path.name for path in homes.values() if not path.is_file()})
        if missing:
            raise ExecutorError(f"{folder}: shard {missing[0]} is missing ({len(missing)} named by the index are)")
        return homes
    files = sorted(_safetensors(folder))
    if not files:
        pickled = sorted(path for form in PICKLED for path in folder.glob(form))
        hint = f"; {pickled[0].name} is a pickle and is never opened: convert it to safetensors" if pickled else ""
        raise ExecutorError(f"{folder}: no model.safetensors and no index of shards{hint}")
    return {name: path for path in files for name in _open(path).keys()}  # noqa: SIM118 (not a dictionary)


def _safetensors(folder: Path) -> Iterator[Path]:
    whole = folder / "model.safetensors"
    return iter([whole]) if whole.is_file() else folder.glob("*.safetensors")
