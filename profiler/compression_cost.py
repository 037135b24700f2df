"""What compressed keys and values cost in time: packing them and reading them packed, as terms on top of a cost model.

Prices are per value (one number of a key or a value), so that those measured with one model hold for another on the
same device. The executor measures them (`python -m executor compression --costs FILE`); where nothing was measured, the
bytes that have to move set a bound. Which tokens are old is counted as the executor's pool counts them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from policies.edges.input_file import read_json
from policies.edges.output_file import write_text
from policies.work.batch import BatchShape
from policies.work.request import Ns
from profiler.cost_model import CostModel
from profiler.errors import ProfileError
from profiler.specs.dtypes import dtype_bytes
from profiler.specs.hardware import Hardware
from profiler.specs.kv_compression import Compression
from profiler.specs.model_spec import ModelSpec
from profiler.specs.shape_columns import Column, ShapeColumns

COSTS = ("bound", "fused", "none", "cpu")
"""bound: packing and unpacking move their bytes once through the device's memory, whole, before attention reads them
(what the executor does). fused: decodes read packed bytes in place of whole ones (a kernel that nobody has written
here). none: no time. cpu: the prices measured with this project's executor on one thread of a CPU."""

FORMAT = "charioteer packed kv costs"


@dataclass(frozen=True)
class PackingPrices:
    """Nanoseconds per value: pack_ns when a block is packed; chunk_read_ns and decode_read_ns on top of what reading
    in full precision costs, for every old value that a chunk or a decode reads. source: where they come from."""

    pack_ns: float
    chunk_read_ns: float
    decode_read_ns: float
    source: str
    measured: bool = False

    def __post_init__(self) -> None:
        for name in ("pack_ns", "chunk_read_ns", "decode_read_ns"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not -1e6 < value < 1e6:
                raise ProfileError(f"{self.source}: {name}: found {value!r}, expected nanoseconds per value")


def bound_prices(
    compression: Compression, model: ModelSpec, hardware: Hardware, kv_dtype: str, *, fused: bool = False
) -> PackingPrices:
    """The least time on a device: bytes over its memory bandwidth, nothing else."""
    full = float(dtype_bytes(kv_dtype))
    packed = compression.packed_bytes_per_token(model) / values_per_token(model)
    through = (full + packed) / hardware.memory_bandwidth * 1e9
    if not fused:
        return PackingPrices(through, through, through, f"bytes over the bandwidth of {hardware.name}")
    saved = (full - packed) / hardware.memory_bandwidth * 1e9
    return PackingPrices(through, 0.0, -saved, f"bytes over the bandwidth of {hardware.name}, attention over packed KV")


def prices_of(
    name: str, compression: Compression, model: ModelSpec, hardware: Hardware, kv_dtype: str
) -> PackingPrices | None:
    """The prices that `--kv-compression-cost` names: one of COSTS, or a file of measured ones. None: no time."""
    if name == "none":
        return None
    if name in ("bound", "fused"):
        return bound_prices(compression, model, hardware, kv_dtype, fused=name == "fused")
    if name == "cpu":
        return read_prices(_shipped(), compression)
    path = Path(name)
    if not path.exists():
        raise ProfileError(
            f"--kv-compression-cost: found {name!r}, expected {', '.join(COSTS)} or a file of measured costs"
        )
    return read_prices(path, compression)


def _shipped() -> Path:
    return Path(str(resources.files("profiler"))) / "data" / "kv_compression_cpu.json"


def values_per_token(model: ModelSpec, layers: int | None = None, tp: int = 1) -> int:
    """Numbers that one token's keys and values consist of on one device."""
    return 2 * (model.layers if layers is None else layers) * model.kv_heads_per_device(tp) * model.head_dim


def write_prices(prices: Mapping[str, PackingPrices], path: Path, facts: Mapping[str, Any]) -> None:
    """Measured prices by coding (as kivi4), whole or not at all. facts: device, model and what else explains them."""
    content = {"format": FORMAT, **facts, "prices": {coding: asdict(found) for coding, found in prices.items()}}
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n", ProfileError)


def read_prices(path: Path, compression: Compression) -> PackingPrices:
    """The prices of one coding from a file; raises ProfileError with the file and the entry at fault."""
    content = read_json(path, ProfileError)
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("prices"), dict):
        raise ProfileError(f"{path}: found something else, expected {FORMAT!r} (`executor compression --costs`)")
    coding = f"{compression.coding}{compression.bits}"
    found = content["prices"].get(coding)
    names = {entry.name for entry in fields(PackingPrices)}
    if not isinstance(found, dict) or not names - {"source", "measured"} <= set(found) <= names:
        raise ProfileError(f"{path}: found no prices of {coding}, it has {', '.join(sorted(content['prices'])[:20])}")
    return PackingPrices(**{**found, "source": f"{path.name}: {found.get('source', '')}"[:200]})


class PackedCost:
    """A cost model whose old keys and values are packed: `inner`, and what packing and reading them costs more.

    layers: of each stage. tp: devices of a stage, each with its share of the heads. A decode packs one token a step in
    the mean (whole blocks now and then, in fact), and its context is taken to end in the middle of a block.
    """

    def __init__(
        self,
        inner: CostModel,
        compression: Compression,
        prices: PackingPrices,
        model: ModelSpec,
        layers: Sequence[int],
        tp: int = 1,
    ) -> None:
        self.inner, self.compression, self.prices = inner, compression, prices
        self.kind, self.stages, self.tile = inner.kind, inner.stages, inner.tile
        self.calibrated = inner.calibrated and prices.measured
        self.name = f"{inner.name}, {compression.coding}{compression.bits} keys and values"
        self._model, self._layers, self._tp = model, tuple(layers), tp
        self._per_stage = tuple(
            tuple(
                price * values_per_token(model, count, tp)
                for price in (prices.pack_ns, prices.chunk_read_ns, prices.decode_read_ns)
            )
            for count in layers
        )

    def __getattr__(self, name: str) -> Any:
        # What a cost model may offer in addition, where the inner one does.
        if name in ("layer_split", "ranks", "graph_rows"):
            return getattr(self.inner, name)
        if name == "ranks_ns":
            together = self.inner.ranks_ns  # type: ignore[attr-defined]
            return lambda shapes: [
                ns + sum(self._terms(shape, 0).values()) for ns, shape in zip(together(shapes), shapes, strict=True)
            ]
        if name == "perturbed":
            drawn = self.inner.perturbed  # type: ignore[attr-defined]
            return lambda seed: PackedCost(
                drawn(seed), self.compression, self.prices, self._model, self._layers, self._tp
            )
        raise AttributeError(name)

    # How many tokens

    def packed_tokens(self, chunks: Sequence[tuple[int, int]], decodes: int, context: int) -> int:
        """Tokens that a batch packs."""
        old = self.compression.old_tokens
        packed = sum([old(prefix + tokens) - old(prefix) for tokens, prefix in chunks])
        return packed + (decodes if self._old_of_decodes(decodes, context) else 0)

    def _old_of_decodes(self, decodes: int, context: int) -> int:
        return max(0, context - decodes * (self.compression.window + self.compression.group // 2))

    def _chunk_old(self, chunks: Sequence[tuple[int, int]]) -> int:
        old = self.compression.old_tokens
        return sum([old(prefix) for _, prefix in chunks])

    # CostModel

    def host_ns(self, shape: BatchShape) -> tuple[Ns, Ns]:
        return self.inner.host_ns(shape)

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> Ns:
        return self.inner.stage_ns(shape, stage) + sum(self._terms(shape, stage).values())

    def _terms(self, shape: BatchShape, stage: int) -> dict[str, Ns]:
        pack, chunk_read, decode_read = self._per_stage[stage]
        chunks, decodes, context = shape[0], shape[1], shape[2]
        return {
            "kv_pack": int(self.packed_tokens(chunks, decodes, context) * pack + 0.5),
            "kv_read_packed": int(self._chunk_old(chunks) * chunk_read + 0.5)
            + int(self._old_of_decodes(decodes, context) * decode_read),
        }

    def send_ns(self, shape: BatchShape, stage: int) -> Ns:
        return self.inner.send_ns(shape, stage)

    def repeat_ns(self, shape: BatchShape, steps: int, stage: int = 0) -> Column:
        """stage_ns of `steps` iterations in which every decode's context grows by one a step."""
        pack, chunk_read, decode_read = self._per_stage[stage]
        decodes = shape[1]
        context = shape[2] + decodes * np.arange(steps, dtype=np.int64)
        packed, old = self._of_decodes(np.full(steps, decodes, np.int64), context)
        packed += self.packed_tokens(shape[0], 0, 0)
        more: Column = (packed * pack + 0.5).astype(np.int64) + (old * decode_read).astype(np.int64)
        return self.inner.repeat_ns(shape, steps, stage) + more + int(self._chunk_old(shape[0]) * chunk_read + 0.5)

    def _of_decodes(self, decodes: Column, context: Column) -> tuple[Column, Column]:
        """(tokens packed, old tokens read) by the decodes of each batch."""
        span = self.compression.window + self.compression.group // 2
        old = np.maximum(0, context - decodes * span)
        return np.where(old > 0, decodes, 0), old

    def predict_ns(self, shapes: object, stage: int = 0) -> Column:
        """stage_ns of many shapes."""
        columns = ShapeColumns.of(shapes)
        pack, chunk_read, decode_read = self._per_stage[stage]
        group, window = self.compression.group, self.compression.window
        tokens, prefix = columns.chunk_tokens, columns.chunk_prefix
        before, after = (np.maximum(0, end - window) // group * group for end in (prefix, prefix + tokens))
        packed, old = self._of_decodes(columns.decodes, columns.decode_context_total)
        packed = packed + columns.per_batch(after - before)
        found: Column = self.inner.predict_ns(shapes, stage) + (packed * pack + 0.5).astype(np.int64)
        found += (columns.per_batch(before) * chunk_read + 0.5).astype(np.int64) + (old * decode_read).astype(np.int64)
        return found

    def breakdown(self, shape: BatchShape) -> Mapping[str, Ns]:
        """The inner model's parts, and packing and reading packed keys and values over all stages."""
        parts = dict(self.inner.breakdown(shape))
        for stage in range(self.stages):
            for name, ns in self._terms(shape, stage).items():
                parts[name] = parts.get(name, 0) + ns
        return {name: ns for name, ns in parts.items() if ns}

    def inside(self, shape: BatchShape) -> bool:
        return self.inner.inside(shape)

    def provenance(self) -> Mapping[str, object]:
        return {
            **self.inner.provenance(),
            "name": self.name,
            "calibrated": self.calibrated,
            "kv_packing": asdict(self.prices),
        }
