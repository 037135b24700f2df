"""What speculation costs: verifying drafts beside the next token of a decode, and drafting the next ones.

A cost model of whole batches knows neither. It is asked for a batch with as many rows, and the rest is added: the
products of the drafts' queries where these are more than the keys that one read brings, and the drafting itself. So
every cost model can speculate, and none of them is slower where nobody does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from policies.work.batch import BatchShape
from policies.work.request import Ns
from profiler.cost_model import CostModel
from profiler.evidence import ASSUMED, BY_ROOFLINE, Part, parts_of
from profiler.roofline.constants import RooflineConstants
from profiler.specs.dtypes import dtype_bytes
from profiler.specs.hardware import Hardware
from profiler.specs.model_spec import ModelSpec
from profiler.specs.shape_columns import Column, ShapeColumns


@dataclass(frozen=True)
class DraftingPrices:
    """What drafting costs beside the passes of a drafting model; assumed where nobody measured it.

    step_us: launches and sampling of one drafted token, on the device's time line (a model's k passes follow each
    other). request_us, context_ns: host time of looking n-grams up, per request and per token that is searched.
    """

    step_us: float = 60.0
    request_us: float = 2.0
    context_ns: float = 1.0


class SpeculatingCost:
    """A cost model of batches whose decodes verify drafts, after each of which tokens are drafted.

    drafter: the cost model of the draft model or of EAGLE's head; None for n-grams, which the host looks up.
    pair_ns, kv_ns: of every stage, time of one query-key pair in attention, and of reading one token's keys and values.
    """

    def __init__(
        self,
        inner: CostModel,
        drafter: CostModel | None,
        prices: DraftingPrices,
        pair_ns: tuple[float, ...],
        kv_ns: tuple[float, ...],
        method: str,
    ) -> None:
        self.inner, self.drafter, self.prices, self.method = inner, drafter, prices, method
        self.kind, self.calibrated, self.stages, self.tile = inner.kind, inner.calibrated, inner.stages, inner.tile
        self.name = f"{inner.name}, speculating by {method if drafter is None else drafter.name}"
        self._pair_ns, self._kv_ns = pair_ns, kv_ns
        # Whose executor computes every draft as a decode of its own, which reads all of its context.
        self._apart: bool = getattr(inner, "drafts_are_decodes", False)

    @classmethod
    def of(
        cls,
        inner: CostModel,
        method: str,
        prices: DraftingPrices,
        spec: ModelSpec,
        hardware: Hardware,
        *,
        drafter: CostModel | None = None,
        dtype: str = "bfloat16",
        kv_dtype: str = "auto",
        tp: int = 1,
        layers: tuple[int, ...] = (),
    ) -> SpeculatingCost:
        """For a model on a device: query-key pairs at the share of the peak that attention reaches."""
        constants = RooflineConstants()
        layers = layers or (spec.layers,)
        flops_per_ns = hardware.peak(dtype) * constants.attention_efficiency / 1e9
        bytes_per_ns = hardware.memory_bandwidth * constants.kv_efficiency / 1e9
        held = dtype if kv_dtype == "auto" else kv_dtype
        held = held if dtype_bytes(held) >= 1 else dtype
        pair = 4.0 * (spec.q_size // tp) / flops_per_ns
        kv = spec.kv_bytes_per_token(held, tp, layers=1) / bytes_per_ns
        return cls(inner, drafter, prices, tuple(pair * n for n in layers), tuple(kv * n for n in layers), method)

    def __getattr__(self, name: str) -> Any:
        # What a cost model may offer in addition, where the inner one does.
        if name in ("layer_split", "aftermath", "ranks", "graph_rows"):
            return getattr(self.inner, name)
        if name == "ranks_ns":
            together = self.inner.ranks_ns  # type: ignore[attr-defined]
            return lambda shapes: [
                ns + self.verifying_ns(shape) + self.drafting_ns(shape)
                for ns, shape in zip(together([self.plain(shape) for shape in shapes]), shapes, strict=True)
            ]
        if name == "perturbed":
            drawn = self.inner.perturbed  # type: ignore[attr-defined]
            return lambda seed, *more: SpeculatingCost(
                drawn(seed, *more), self.drafter, self.prices, self._pair_ns, self._kv_ns, self.method
            )
        raise AttributeError(name)

    # What is added

    def plain(self, shape: BatchShape) -> BatchShape:
        """The batch with as many rows that a model without drafts knows."""
        drafts = shape.draft_tokens
        if not drafts:
            return shape._replace(draft_context_total=0, drafting=0) if shape.drafting else shape
        if self._apart:
            return shape._replace(
                decodes=shape.decodes + drafts,
                decode_context_total=shape.decode_context_total + shape.draft_context_total,
                draft_tokens=0,
                draft_context_total=0,
                drafting=0,
            )
        return shape._replace(
            dummy_tokens=shape.dummy_tokens + drafts, draft_tokens=0, draft_context_total=0, drafting=0
        )

    def verifying_ns(self, shape: BatchShape, stage: int = 0) -> Ns:
        """Attention of the drafts' queries beyond what reading the keys takes."""
        if self._apart or not shape.draft_tokens:
            return 0
        pairs = shape.decode_context_total + shape.draft_context_total
        return int(max(0.0, pairs * self._pair_ns[stage] - shape.decode_context_total * self._kv_ns[stage]) + 0.5)

    def drafting_ns(self, shape: BatchShape) -> Ns:
        """Device time of drafting after a batch: all of its rows through the drafting model for the first token, then a
        decode of every request that sampled for each further one."""
        requests = shape.requests_sampled
        if self.drafter is None or not shape.drafting or not requests:
            return 0
        ns = int(shape.drafting * self.prices.step_us * 1e3 + 0.5)
        first = BatchShape(
            shape.chunks,
            shape.decodes,
            shape.decode_context_total,
            shape.decode_context_max,
            shape.dummy_tokens + shape.draft_tokens,
            requests,
        )
        ns += self.drafter.stage_ns(first)
        if shape.drafting > 1:
            total, largest = _contexts(shape, requests)
            ns += (shape.drafting - 1) * self.drafter.stage_ns(BatchShape((), requests, total, largest, 0, requests))
        return ns

    def _lookup_ns(self, shape: BatchShape) -> Ns:
        """Host time of looking n-grams up in the tokens of every request that sampled."""
        requests = shape.requests_sampled
        if self.drafter is not None or not shape.drafting or not requests:
            return 0
        total, _ = _contexts(shape, requests)
        return int(requests * self.prices.request_us * 1e3 + total * self.prices.context_ns + 0.5)

    # CostModel

    def host_ns(self, shape: BatchShape) -> tuple[Ns, Ns]:
        plain = self.plain(shape)
        if self._apart:
            # Planning and handing over are by request, whatever its width.
            plain = plain._replace(decodes=shape.decodes)
        before, after = self.inner.host_ns(plain._replace(sampled=shape.requests_sampled))
        return before, after + self._lookup_ns(shape)

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> Ns:
        ns = self.inner.stage_ns(self.plain(shape), stage) + self.verifying_ns(shape, stage)
        return ns + self.drafting_ns(shape) if stage == self.stages - 1 else ns

    def send_ns(self, shape: BatchShape, stage: int) -> Ns:
        return self.inner.send_ns(self.plain(shape), stage)

    def repeat_ns(self, shape: BatchShape, steps: int, stage: int = 0) -> Column:
        """stage_ns of `steps` iterations in which every decode's context grows by one a step."""
        found = []
        for step in range(steps):
            grown = shape._replace(
                decode_context_total=shape.decode_context_total + step * shape.decodes,
                decode_context_max=shape.decode_context_max + step * (shape.decodes > 0),
                draft_context_total=shape.draft_context_total + step * shape.draft_tokens,
            )
            found.append(self.stage_ns(grown, stage))
        return np.array(found, np.int64)

    def predict_ns(self, shapes: object, stage: int = 0) -> Column:
        """stage_ns of many shapes."""
        given = ShapeColumns.of(shapes).shapes()
        found: Column = self.inner.predict_ns([self.plain(shape) for shape in given], stage)
        last = stage == self.stages - 1
        added = [self.verifying_ns(shape, stage) + (self.drafting_ns(shape) if last else 0) for shape in given]
        return found + np.array(added, np.int64)

    def breakdown(self, shape: BatchShape) -> Mapping[str, Ns]:
        """The inner model's parts, verification and drafting; sums exactly to host_ns + stage_ns + send_ns."""
        plain = self.plain(shape)
        parts = {name: ns for name, ns in self.inner.breakdown(plain).items() if not name.startswith("host_")}
        before, after = self.host_ns(shape)
        return {
            name: ns
            for name, ns in {
                "host_before": before,
                **parts,
                "draft_attention": sum(self.verifying_ns(shape, stage) for stage in range(self.stages)),
                "drafting": self.drafting_ns(shape),
                "host_after": after,
            }.items()
            if ns
        }

    def evidence(self, shapes: object) -> list[Part]:
        """The inner model's operators, and what is added, which nobody measured."""
        given = ShapeColumns.of(shapes).shapes()
        parts = parts_of(self.inner, [self.plain(shape) for shape in given])
        verifying = [sum(self.verifying_ns(shape, stage) for stage in range(self.stages)) for shape in given]
        drafting = [self.drafting_ns(shape) + self._lookup_ns(shape) for shape in given]
        parts.append(Part("draft_attention", np.array(verifying, np.int64), False, BY_ROOFLINE))
        parts.append(Part("drafting", np.array(drafting, np.int64), False, ASSUMED))
        return parts

    def inside(self, shape: BatchShape) -> bool:
        return self.inner.inside(self.plain(shape))

    def provenance(self) -> Mapping[str, object]:
        return {
            **self.inner.provenance(),
            "name": self.name,
            "speculation": {
                "method": self.method,
                "drafting": asdict(self.prices),
                "drafter": None if self.drafter is None else dict(self.drafter.provenance()),
            },
        }


DRAFT_VOCAB = 32_000
"""Tokens that the published EAGLE-3 heads draft from, whatever the model's vocabulary."""


def eagle_head(spec: ModelSpec) -> ModelSpec:
    """A head that drafts from the model's hidden states: one layer of the model's own width, and an output head over
    the tokens that it drafts from (Li et al., EAGLE-3, 2025)."""
    return replace(spec, name=f"{spec.name} head", layers=1, vocab=min(spec.vocab, DRAFT_VOCAB))


def _contexts(shape: BatchShape, requests: int) -> tuple[int, int]:
    """Context, total and largest, of the requests that sampled: the decodes', and that of prompts that ended here."""
    total, largest = shape.decode_context_total, shape.decode_context_max
    prompts = requests - shape.decodes
    if prompts > 0 and shape.chunks:
        ends = sorted([tokens + prefix for tokens, prefix in shape.chunks])
        total += sum(ends) * prompts // len(ends)
        largest = max(largest, ends[-1])
    return total, largest
