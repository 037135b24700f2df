"""What a validation found, for its report and its figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from experiments.validation.comparing.batch_agreement import Agreement
from experiments.validation.comparing.fed_with_measured_times import Fed
from experiments.validation.comparing.machine_drift import Probe
from experiments.validation.comparing.pipeline_bubbles import BubbleComparison
from experiments.validation.comparing.settings import Settings
from experiments.validation.comparing.statistics import Comparison, Iterations, Ranking

if TYPE_CHECKING:
    from metrics import RunTables
    from profiler.iterations.iteration_model import IterationModel


@dataclass
class Result:
    """What a validation found; everything that its report says.

    fed: the simulator with measured durations, or why not. gauged: of each live run how slow the machine was by its
    gauge, and how slow the run's own iterations were, both over the model (1: as profiled).
    """

    settings: Settings
    trace_name: str
    requests: int
    capacity: float
    model: IterationModel
    probes: list[Probe]
    comparisons: list[Comparison]
    rankings: list[Ranking]
    agreements: dict[str, Agreement]
    fed: dict[str, Fed | str]
    iterations: Iterations
    lost: int
    ends: dict[str, int]
    simulated: dict[tuple[float, str], RunTables] = field(default_factory=dict)
    live: dict[tuple[float, str], list[RunTables]] = field(default_factory=dict)
    bubbles: list[BubbleComparison] = field(default_factory=list)
    gauged: dict[str, tuple[float, float]] = field(default_factory=dict)
    took_s: float = 0.0
