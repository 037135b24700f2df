"""Step times that others published, as shapes, so that any cost model can be held against them.

Nothing here is ever fitted. A step is a whole iteration (host time included in the prediction, since a paper's clock
sees it) or the linear layers alone, where a source gives only those. `data/facts/published_steps.csv` holds them;
docs/published_forms.py says how each was read from its paper or artifact.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from policies.edges.input_file import read_text
from policies.work.batch import BatchShape
from profiler.cost_model import CostModel
from profiler.errors import ProfileError
from profiler.measurements.facts import FACTS
from profiler.measurements.profile import parse_chunks

LINEAR_PARTS = ("qkv", "attention_out", "ffn_up", "ffn_down")
PUBLISHED = FACTS / "published_steps.csv"
COLUMNS = (
    "source",
    "group",
    "what",
    "model",
    "gpu",
    "tp",
    "part",
    "chunks",
    "decodes",
    "context_total",
    "context_max",
    "sampled",
    "measured_ms",
)


@dataclass(frozen=True)
class PublishedStep:
    """One measured step. part: "iteration", or "linear" for the linear layers of all transformer layers."""

    source: str
    group: str
    what: str
    model: str
    gpu: str
    tp: int
    shape: BatchShape
    measured_ms: float
    part: str = "iteration"


def published_steps(path: str | Path = PUBLISHED) -> list[PublishedStep]:
    """Every step of a table with COLUMNS: chunks as in profiles ("512:0 128:1024x3"), times in ms; or ProfileError."""
    path = Path(path)
    rows = csv.DictReader(io.StringIO(read_text(path, ProfileError)))
    missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise ProfileError(f"{path}: missing column {missing[0]}, expected {', '.join(COLUMNS)}")
    steps = []
    try:
        for row in rows:
            counts = (int(row[name]) for name in ("decodes", "context_total", "context_max"))
            shape = BatchShape(parse_chunks(row["chunks"]), *counts, sampled=int(row["sampled"]))
            ms = float(row["measured_ms"])
            if not 0 < ms < 1e9 or row["part"] not in ("iteration", "linear"):
                raise ValueError("expected measured_ms above 0, and iteration or linear as part")
            names = (row[name] for name in ("source", "group", "what", "model", "gpu"))
            steps.append(PublishedStep(*names, int(row["tp"]), shape, ms, row["part"]))
    except (TypeError, ValueError, csv.Error, ProfileError) as error:
        raise ProfileError(f"{path}, line {rows.line_num}: {str(error)[:200]}") from None
    if not steps:
        raise ProfileError(f"{path}: found no rows, expected one a step")
    return steps


def predicted_ms(cost: CostModel, step: PublishedStep) -> float | None:
    """The prediction for one step; None where the model's breakdown cannot tell the part."""
    if step.part == "iteration":
        device = sum(cost.stage_ns(step.shape, stage) for stage in range(cost.stages))
        return (device + sum(cost.host_ns(step.shape))) / 1e6
    parts = cost.breakdown(step.shape)
    if any(name not in parts for name in LINEAR_PARTS):
        return None
    return sum(parts[name] for name in LINEAR_PARTS) / 1e6
