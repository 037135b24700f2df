"""What one iteration costs: the one interface between whoever predicts time and whoever spends it.

All times are integer nanoseconds. Scalar and vector forms return *equal* integers, so an implementation compares and
combines with + - * / min max only and rounds once, at the end of each term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from policies.work.batch import BatchShape
from policies.work.request import Ns


@runtime_checkable
class CostModel(Protocol):
    """Costs of one engine: a model on a GPU with its parallelism, dtypes and attention backend.

    kind: "roofline" (specs alone) or "fitted" (measured profile).
    calibrated: False marks every output that rests on specs alone as `uncalibrated`.
    name: what a run folder records, e.g. "roofline llama-3.1-8b h100 tp1 bfloat16".
    stages: pipeline stages that `stage_ns` knows (1 without a pipeline).
    tile: the GEMM's M-quantum in rows (128 by default).
    """

    kind: str
    calibrated: bool
    name: str
    stages: int
    tile: int

    def host_ns(self, shape: BatchShape) -> tuple[Ns, Ns]:
        """Host time (before stage 0, after the last stage). The first is hidden when planning runs ahead."""
        ...

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> Ns:
        """Device time of one stage; embedding and output head are charged on the stages where they live."""
        ...

    def send_ns(self, shape: BatchShape, stage: int) -> Ns:
        """Time to move the hidden states from `stage` to `stage + 1` (0 on the last stage)."""
        ...

    def repeat_ns(self, shape: BatchShape, steps: int, stage: int = 0) -> NDArray[np.int64]:
        """stage_ns of `steps` iterations in a row, in each of which every decode's context is one longer.

        Element 0 is stage_ns(shape, stage) itself. Equal, element by element, to the scalar form.
        """
        ...

    def predict_ns(self, shapes: object, stage: int = 0) -> NDArray[np.int64]:
        """stage_ns of many shapes at once: a sequence of BatchShape in, an int64 column out."""
        ...

    def breakdown(self, shape: BatchShape) -> Mapping[str, Ns]:
        """Named parts (operators over all stages, host, sends) that sum exactly to host + stages + sends."""
        ...

    def inside(self, shape: BatchShape) -> bool:
        """Whether the shape lies in the measured region (always False for a roofline, which measured nothing)."""
        ...

    def provenance(self) -> Mapping[str, object]:
        """Where the numbers come from, as plain data for config.json."""
        ...


class QuickCostModel(CostModel, Protocol):
    """What a cost model may offer in addition, each alone: the same numbers in fewer calls, for hot paths."""

    def iteration_ns(self, shape: BatchShape) -> tuple[Ns, Ns, Ns, bool]:
        """host_ns before and after, stage_ns and inside, for a model with one stage."""
        ...

    def stages_ns(self, shape: BatchShape) -> Sequence[tuple[Ns, Ns]]:
        """(stage_ns, send_ns) of every stage."""
        ...

    def aftermath(self, shape: BatchShape) -> list[Ns]:
        """What a batch with chunks leaves to the iterations after it (one stage): extra device time of each, the first
        of them last. Whoever runs batches in order carries it on (`profiler.iterations.aftermath.merged`)."""
        ...

    def activated_experts(self, shapes: object) -> NDArray[np.float64]:
        """Experts that each batch is expected to touch, the mean over layers with experts; NaN for a dense model. A
        simulated run records it, so that it can be held against what a live run has counted."""
        ...

    def least_ns(self) -> Ns:
        """What no iteration of a single stage falls short of, host time included; 0 says nothing."""
        ...

    def repeat_terms(self, shape: BatchShape) -> tuple[int, int, float, float, Ns] | None:
        """(start, step, slope, offset, rest) if repeat_ns is int((start + i * step) * slope + offset) + rest.

        None where it is not.
        """
        ...


class RankedCostModel(CostModel, Protocol):
    """Costs of data-parallel ranks that meet in every step, because expert layers exchange tokens between them.

    A replica whose cost model has more than one rank and offers `ranks_ns` steps its ranks together; without that they
    never wait for each other. The scalar forms (`stage_ns`, `breakdown`, `inside`) speak of a step in which every rank
    runs the same shape.

    ranks: how many there are (data-parallel degree), each of tp devices. stages is 1. graph_rows: rows of the largest
    captured graph, 0 where none are.
    """

    ranks: int
    graph_rows: int

    def ranks_ns(self, shapes: Sequence[BatchShape]) -> Sequence[Ns]:
        """Device time of each rank's part of one step, above 0; the step ends with the largest.

        shapes: one a rank, in rank order. A rank without requests has one dummy row (`dummy_tokens=1`); where every
        rank's batch fits a captured graph, `executed_rows` of all is that of the largest.
        """
        ...

    def repeat_ranks_ns(self, shapes: Sequence[BatchShape], steps: int) -> NDArray[np.int64]:
        """[ranks, steps]: ranks_ns of `steps` steps in a row, in each of which every decode's context is one longer.

        May be left out: then ranks_ns is asked step by step.
        """
        ...
