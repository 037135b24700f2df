"""Attention and FFN on two device groups: micro-batches go back and forth between them, layer after layer.

A replica splits every batch into m equal micro-batches. While the attention group works on one, the FFN group works on
another, and a third may be on the link. With A, F and X for attention, FFN and one transfer of a micro-batch in one
layer, the groups settle into a period of max(m A, m F, A + F + 2 X) per layer, so an iteration of L layers takes

    (L - 1) max(m A, m F, A + F + 2 X) + A + F + 2 X + (m - 1) max(A, F)

exactly (tests/simulator/test_afd.py plays it event by event). Embedding, output head and sampler live with attention.
This is a cost model like any other, so every policy, leap and cluster works on top of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies import BatchShape, Ns, PolicyError
from policies.contract.policy import knob
from policies.registry import knob_value, knobs_of
from profiler import Hardware, ModelSpec
from profiler.cost_model import CostModel
from profiler.specs.dtypes import dtype_bytes
from profiler.specs.memory_plan import RUNTIME_BYTES, activation_bytes
from simulator.errors import SimulationError

FFN_OPERATORS = ("ffn_up", "ffn_down")
HALF_OPERATORS = ("norms_activations", "all_reduce")
"""Operators of a cost model's breakdown that belong to the FFN, and those that attention and FFN have one half each."""


@dataclass(frozen=True)
class Apart:
    """How a replica's devices are divided. The knobs of `--afd attention=4,ffn=4`; each group is tensor-parallel."""

    attention: int = knob(1, "devices of the attention group", least=1)
    ffn: int = knob(1, "devices of the FFN group", least=1)
    ffn_gpu: str = knob("", "GPU of the FFN group; that of the attention group by default")
    micro_batches: int = knob(2, "micro-batches that go back and forth", least=1)
    link: str = knob("network", "what lies between the groups", choices=("network", "link"))
    link_bandwidth: float = knob(0.0, "bytes/s of a device in one direction; 0: the GPU's own", least=0)
    link_latency_us: float = knob(10.0, "latency of one transfer", least=0)

    @property
    def devices(self) -> int:
        return self.attention + self.ffn

    def bytes_per_s(self, attention_gpu: Hardware, ffn_gpu: Hardware) -> float:
        """What crosses between the groups in one direction: the slower side's devices, each with its own port."""
        sides = []
        for gpu, devices in ((attention_gpu, self.attention), (ffn_gpu, self.ffn)):
            own = gpu.network_bandwidth if self.link == "network" else gpu.link_bandwidth
            port = self.link_bandwidth or own
            if not port:
                raise SimulationError(f"--afd: the network of {gpu.name} is not known; give link_bandwidth (bytes/s)")
            sides.append(port * devices)
        return min(sides)


def make_apart(values: Mapping[str, Any]) -> Apart:
    """The settings of `--afd`; SimulationError for an unknown key or a wrong value."""
    known = knobs_of(Apart)  # type: ignore[arg-type]
    settings = {}
    for key, value in values.items():
        if key not in known:
            raise SimulationError(
                f"--afd: unknown key {key!r}; known keys: {', '.join(entry.name for entry in fields(Apart))}"
            )
        try:
            settings[key] = knob_value("--afd", known[key], value)
        except PolicyError as error:
            raise SimulationError(str(error)) from None
    return Apart(**settings)


class Layer(NamedTuple):
    """One micro-batch in one layer, in ns (scalars or columns), and what an iteration costs outside the layers."""

    attention: Any
    ffn: Any
    transfer: Any
    ends: Any


class AttentionFfnApart:
    """CostModel of a replica whose attention and FFN groups have cost models of their own.

    attention, ffn: cost models of the whole model on each group (one stage each), whose breakdown names the operators.
    hidden_bytes: of one row between the groups. bytes_per_s: what crosses the link in one direction.
    """

    stages = 1

    def __init__(
        self, attention: CostModel, ffn: CostModel, apart: Apart, *, layers: int, hidden_bytes: int, bytes_per_s: float
    ) -> None:
        self.attention, self.ffn, self.apart, self.layers = attention, ffn, apart, layers
        self.tile = attention.tile
        self.kind = attention.kind if attention.kind == ffn.kind else f"{attention.kind} + {ffn.kind}"
        self.calibrated = attention.calibrated and ffn.calibrated
        groups = f"attention [{attention.name}] apart from FFN [{ffn.name}]"
        # Between the groups nothing was measured, however well the groups themselves were.
        self.name = f"{groups}, {apart.micro_batches} micro-batches, transfers by the link's specification"
        self._row_ns = hidden_bytes / bytes_per_s * 1e9
        self._latency_ns = apart.link_latency_us * 1e3
        self._linear: dict[int, tuple[Ns, Ns]] = {}
        missing = [name for name in FFN_OPERATORS if name not in ffn.breakdown(BatchShape(dummy_tokens=1))]
        if missing:
            raise SimulationError(f"--afd: cost model {ffn.name} does not tell {missing[0]} apart; use a roofline")

    def host_ns(self, shape: BatchShape) -> tuple[Ns, Ns]:
        return self.attention.host_ns(shape)

    def perturbed(self, seed: int) -> AttentionFfnApart:
        """Both groups' costs drawn from their own errors."""
        for cost in (self.attention, self.ffn):
            if not hasattr(cost, "perturbed"):
                raise SimulationError(f"--runs: {cost.name} was not measured and knows no error")
        other = copy(self)
        other.attention, other.ffn = self.attention.perturbed(seed), self.ffn.perturbed(seed)  # type: ignore[attr-defined]
        other._linear = {}
        return other

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> Ns:
        """One iteration, from embedding to sampler."""
        return int(self._iteration(self._layer(shape)))

    def send_ns(self, shape: BatchShape, stage: int) -> Ns:
        return 0

    def repeat_ns(self, shape: BatchShape, steps: int, stage: int = 0) -> NDArray[np.int64]:
        """stage_ns of `steps` iterations in each of which every decode's context is one longer."""
        total = shape.decode_context_total
        contexts = np.arange(total, total + steps * shape.decodes, max(1, shape.decodes), dtype=np.int64)
        if not shape.decodes:
            return np.full(steps, self.stage_ns(shape), np.int64)
        part = self._micro_batch(shape)
        longest = shape.decode_context_max + np.arange(steps)
        shapes = [
            part._replace(decode_context_total=int(context) // self.apart.micro_batches, decode_context_max=int(most))
            for context, most in zip(contexts, longest)
        ]
        bare = _without_attention(part)
        attended = self.attention.predict_ns(shapes) - self.attention.stage_ns(bare)
        return np.asarray(self._iteration(self._layer(shape, attended)), np.int64)

    def predict_ns(self, shapes: object, stage: int = 0) -> NDArray[np.int64]:
        return np.array([self.stage_ns(shape) for shape in shapes], np.int64)  # type: ignore[attr-defined]

    def breakdown(self, shape: BatchShape) -> Mapping[str, Ns]:
        """What the attention group does, and how long it waits for the other one; sums to host + iteration."""
        before, after = self.host_ns(shape)
        layer = self._layer(shape)
        attention = self.apart.micro_batches * self.layers * layer.attention
        parts = {
            "host_before": before,
            "attention": attention,
            "embedding_head_sampling": layer.ends,
            "attention_waits": self._iteration(layer) - attention - layer.ends,
            "host_after": after,
        }
        return {name: int(ns) for name, ns in parts.items() if ns}

    def group_shares(self, shape: BatchShape) -> dict[str, float]:
        """Share of an iteration in which each group, and the link in one direction, is busy."""
        layer, whole = self._layer(shape), self.stage_ns(shape)
        passes = self.apart.micro_batches * self.layers
        return {
            "attention": (passes * layer.attention + layer.ends) / whole,
            "ffn": passes * layer.ffn / whole,
            "link": passes * layer.transfer / whole,
        }

    def inside(self, shape: BatchShape) -> bool:
        part = self._micro_batch(shape)
        return self.attention.inside(part) and self.ffn.inside(part)

    def provenance(self) -> Mapping[str, object]:
        return {
            "kind": "attention and FFN apart",
            "groups": {entry.name: getattr(self.apart, entry.name) for entry in fields(self.apart)},
            "attention": dict(self.attention.provenance()),
            "ffn": dict(self.ffn.provenance()),
        }

    # One layer

    def _iteration(self, layer: Layer) -> Any:
        m = self.apart.micro_batches
        a, f, x = layer.attention, layer.ffn, layer.transfer
        there_and_back = a + f + 2 * x
        slower = np.maximum(a, f)
        period = np.maximum(m * slower, there_and_back)
        return (self.layers - 1) * period + there_and_back + (m - 1) * slower + layer.ends

    def _layer(self, shape: BatchShape, attended: Any = None) -> Layer:
        """attended: time of the attention kernels over all layers; computed unless given."""
        part = self._micro_batch(shape)
        bare = _without_attention(part)
        rows = part.rows
        if attended is None:
            attended = self.attention.stage_ns(part) - self.attention.stage_ns(bare)
        beside, ffn = self._linear_ns(rows)
        ends = self.attention.stage_ns(BatchShape(dummy_tokens=shape.rows, sampled=shape.sampled))
        ends -= self.attention.stage_ns(BatchShape(dummy_tokens=shape.rows)) - self._embedding_ns(shape.rows)
        return Layer(
            (beside + attended) // self.layers,
            ffn // self.layers,
            int(self._latency_ns + rows * self._row_ns + 0.5),
            ends,
        )

    def _micro_batch(self, shape: BatchShape) -> BatchShape:
        """An even share of a batch. A chunk's share sits at the mean depth of its parts."""
        m = self.apart.micro_batches
        if m == 1:
            return shape._replace(sampled=0)
        chunks = []
        for tokens, prefix in shape.chunks:
            share = -(-tokens // m)
            chunks.append((share, prefix + (tokens - share) // 2))
        return BatchShape(
            tuple(chunks),
            -(-shape.decodes // m),
            shape.decode_context_total // m,
            shape.decode_context_max,
            -(-shape.dummy_tokens // m),
            0,
            -(-shape.executed_rows // m),
        )

    def _linear_ns(self, rows: int) -> tuple[Ns, Ns]:
        """(linear work of the attention group, work of the FFN group) of so many rows over all layers."""
        found = self._linear.get(rows)
        if found is None:
            bare = BatchShape(dummy_tokens=rows)
            of_ffn = _ffn_part(self.ffn.breakdown(bare))
            whole = self.attention.stage_ns(bare) - self._embedding_ns(rows)
            found = self._linear[rows] = whole - _ffn_part(self.attention.breakdown(bare)), of_ffn
        return found

    def _embedding_ns(self, rows: int) -> Ns:
        return self.attention.breakdown(BatchShape(dummy_tokens=rows)).get("embedding", 0)


def _ffn_part(breakdown: Mapping[str, Ns]) -> Ns:
    whole = sum(breakdown.get(name, 0) for name in FFN_OPERATORS)
    return whole + sum(breakdown.get(name, 0) for name in HALF_OPERATORS) // 2


def _without_attention(shape: BatchShape) -> BatchShape:
    """The same rows as dummies, which cost linear layers only."""
    return BatchShape(dummy_tokens=shape.tokens + shape.dummy_tokens, executed_rows=shape.executed_rows)


def attention_blocks(
    model: ModelSpec,
    hardware: Hardware,
    apart: Apart,
    *,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    share: float,
    activation_tokens: int = 2048,
    max_num_seqs: int = 256,
) -> int:
    """KV blocks of a replica: the attention group holds no FFN weights. Raises SimulationError where one does not fit.

    share: of the device's memory that may be used. activation_tokens, max_num_seqs: of the largest batch.
    """
    ffn = sum(gemm.n * gemm.k for gemm in model.gemms(apart.attention) if gemm.name in FFN_OPERATORS)
    weights = model.weight_bytes(dtype, apart.attention) - model.layers * ffn * dtype_bytes(dtype)
    usable = int(hardware.memory_bytes * share)
    activations = activation_bytes(model, dtype, apart.attention, activation_tokens, max_num_seqs)
    left = usable - weights - activations - RUNTIME_BYTES
    kv = model.kv_bytes_per_token(kv_dtype, apart.attention) * block_size
    if left < kv:
        raise SimulationError(
            f"--afd: attention of {model.name} does not fit on {apart.attention} x {hardware.name}: "
            f"{weights / 2**30:.1f} GiB of weights a device, {usable / 2**30:.1f} GiB usable"
        )
    return int(left // kv)


def check_ffn_fits(
    model: ModelSpec, hardware: Hardware, apart: Apart, *, dtype: str, share: float, activation_tokens: int = 2048
) -> None:
    """Raise SimulationError unless the FFN weights fit on their group."""
    ffn = sum(gemm.n * gemm.k for gemm in model.gemms(apart.ffn) if gemm.name in FFN_OPERATORS)
    weights = model.layers * ffn * dtype_bytes(dtype)
    usable = int(hardware.memory_bytes * share)
    if weights + activation_bytes(model, dtype, apart.ffn, activation_tokens, 0) + RUNTIME_BYTES > usable:
        raise SimulationError(
            f"--afd: the FFN of {model.name} does not fit on {apart.ffn} x {hardware.name}: "
            f"{weights / 2**30:.1f} GiB of weights a device, {usable / 2**30:.1f} GiB usable"
        )
