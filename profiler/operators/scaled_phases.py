"""Any cost model with its device times scaled by phase: what a calibration from outside can tell of an engine.

A step with chunks takes `prefill` times as long, one of decodes alone `decode` times. Host time and sends stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.work.batch import BatchShape
from policies.work.request import Ns
from profiler.cost_model import CostModel
from profiler.evidence import Part, parts_of
from profiler.specs.shape_columns import ShapeColumns


class ScaledPhases:
    """CostModel of `cost` with factors on its stage times, rounded once more."""

    def __init__(self, cost: CostModel, prefill: float, decode: float) -> None:
        self.cost, self.prefill, self.decode = cost, prefill, decode
        self.kind, self.calibrated, self.name = cost.kind, cost.calibrated, cost.name
        self.stages, self.tile = cost.stages, cost.tile

    def __getattr__(self, name: str) -> Any:
        """What a cost model may offer besides: a draw of its error scaled alike, what chunks leave behind as it is."""
        if name == "perturbed":
            draw = self.cost.perturbed  # type: ignore[attr-defined]
            return lambda seed: ScaledPhases(draw(seed), self.prefill, self.decode)
        if name in ("aftermath", "layer_split", "ranks", "graph_rows"):
            return getattr(self.cost, name)
        if name == "ranks_ns":
            together = self.cost.ranks_ns  # type: ignore[attr-defined]
            return lambda shapes: [
                int(ns * self._scale(shape) + 0.5) for ns, shape in zip(together(shapes), shapes, strict=True)
            ]
        raise AttributeError(name)

    def _scale(self, shape: BatchShape) -> float:
        return self.prefill if shape[0] else self.decode

    def host_ns(self, shape: BatchShape) -> tuple[Ns, Ns]:
        """As without scales."""
        return self.cost.host_ns(shape)

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> Ns:
        """Scaled by the shape's phase."""
        return int(self.cost.stage_ns(shape, stage) * self._scale(shape) + 0.5)

    def send_ns(self, shape: BatchShape, stage: int) -> Ns:
        """As without scales."""
        return self.cost.send_ns(shape, stage)

    def stages_ns(self, shape: BatchShape) -> list[tuple[Ns, Ns]]:
        """(stage_ns, send_ns) of every stage."""
        return [(self.stage_ns(shape, stage), self.send_ns(shape, stage)) for stage in range(self.stages)]

    def repeat_ns(self, shape: BatchShape, steps: int, stage: int = 0) -> NDArray[np.int64]:
        """Scaled element by element, as `stage_ns` is."""
        plain = self.cost.repeat_ns(shape, steps, stage)
        return (plain * self._scale(shape) + 0.5).astype(np.int64)

    def predict_ns(self, shapes: object, stage: int = 0) -> NDArray[np.int64]:
        """Scaled element by element, as `stage_ns` is."""
        columns = ShapeColumns.of(shapes)
        plain = self.cost.predict_ns(columns, stage)
        return (plain * np.where(columns.has_chunks, self.prefill, self.decode) + 0.5).astype(np.int64)

    def breakdown(self, shape: BatchShape) -> Mapping[str, Ns]:
        """The parts of the plain costs, and what the scale adds to them or takes away."""
        parts = dict(self.cost.breakdown(shape))
        more = sum(self.stage_ns(shape, stage) - self.cost.stage_ns(shape, stage) for stage in range(self.stages))
        return {**parts, "calibrated_scale": more} if more else parts

    def evidence(self, shapes: object) -> list[Part]:
        """The operators' times scaled by phase; what each rests on is as without scales (`profiler.evidence`)."""
        columns = ShapeColumns.of(shapes)
        scale = np.where(columns.has_chunks, self.prefill, self.decode)
        return [
            part if part.name in ("host", "send") else part._replace(ns=(part.ns * scale + 0.5).astype(np.int64))
            for part in parts_of(self.cost, columns)
        ]

    def inside(self, shape: BatchShape) -> bool:
        """As without scales."""
        return self.cost.inside(shape)

    def provenance(self) -> Mapping[str, object]:
        """Of the plain costs, with the scales."""
        return {**self.cost.provenance(), "name": self.name, "scales": {"prefill": self.prefill, "decode": self.decode}}


def scaled(cost: CostModel, scales: Sequence[float]) -> CostModel:
    """The same costs where both scales are 1."""
    prefill, decode = scales
    return cost if prefill == decode == 1 else ScaledPhases(cost, prefill, decode)
