"""A cost model that can be worked out by hand, and traces from (arrival s, prompt, output) rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies import BatchShape
from workloads import Trace


@dataclass
class ConstantCost:
    """device_ns a stage, and more per row or per token of decode context if asked for."""

    device_ns: int
    before_ns: int = 0
    after_ns: int = 0
    per_row_ns: int = 0
    per_context_ns: int = 0
    transfer_ns: int = 0
    stages: int = 1
    tile: int = 128
    kind: str = "constant"
    calibrated: bool = True
    name: str = "constant"

    def host_ns(self, shape: BatchShape) -> tuple[int, int]:
        return self.before_ns, self.after_ns

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> int:
        return self.device_ns + self.per_row_ns * shape.rows + self.per_context_ns * shape.decode_context_total

    def send_ns(self, shape: BatchShape, stage: int) -> int:
        return self.transfer_ns if stage < self.stages - 1 else 0

    def repeat_ns(self, shape: BatchShape, steps: int, stage: int = 0):
        growth = self.per_context_ns * shape.decodes
        return self.stage_ns(shape, stage) + growth * np.arange(steps, dtype=np.int64)

    def predict_ns(self, shapes: Sequence[BatchShape], stage: int = 0):
        return np.array([self.stage_ns(shape, stage) for shape in shapes], dtype=np.int64)

    def breakdown(self, shape: BatchShape) -> dict[str, int]:
        return {"device": self.stage_ns(shape) * self.stages, "host": self.before_ns + self.after_ns}

    def inside(self, shape: BatchShape) -> bool:
        return shape.decode_context_total < 300

    def provenance(self) -> dict[str, object]:
        return {"kind": self.kind}


def trace_of(rows: Sequence[tuple[float, int, int]]) -> Trace:
    """A trace from (arrival in seconds, prompt tokens, output tokens)."""
    arrivals, prompts, outputs = zip(*rows)
    return Trace(
        "test",
        np.rint(np.array(arrivals) * 1e9).astype(np.int64),
        np.array(prompts),
        np.array(outputs),
        np.array(outputs),
    )
