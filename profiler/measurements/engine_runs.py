"""Measured runs of whole engines, as facts: tables of `data/facts`, each row on one side of a split made beforehand.

Half "a" may be looked at while terms of engines are fitted; half "b" judges. The half follows from the id alone, and
rows that repeat another row's times share its half, so that nothing of "b" is seen through a copy.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from profiler.errors import ProfileError
from profiler.measurements.facts import FACTS


@dataclass(frozen=True)
class ClosedLoopRun:
    """One engine under a closed loop of `concurrency` requests. Times are means in milliseconds, tokens a request.

    shortest_share: lengths were drawn evenly between this share of the stated ones and them. same_as: id of the row
    whose times this one repeats. doubt: what of the row's labels cannot be right, in words.
    """

    id: str
    half: str
    same_as: str
    model: str
    gpu: str
    engine: str
    version: str
    measured_on: str
    dtype: str
    gemm_dtype: str
    expert_dtype: str
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    shortest_share: float
    tp: int
    pp: int
    attention_dp: int
    experts_tp: int
    experts_ep: int
    ttft_ms: float
    tpot_ms: float
    doubt: str

    @property
    def e2e_ms(self) -> float:
        """TTFT + TPOT x (output - 1): what a closed loop fixes, whatever the spread of its first arrivals."""
        return self.ttft_ms + self.tpot_ms * (self.output_tokens - 1)


@dataclass(frozen=True)
class RateRun:
    """One engine behind HTTP at a constant rate of requests, as its client saw it; requests/s and seconds."""

    id: str
    half: str
    setting: str
    model: str
    gpu: str
    engine: str
    version: str
    max_num_seqs: int
    prefix_caching: int
    chunked_prefill: int
    requested_rate: float
    achieved_rate: float
    requests: int
    prompt_mean: float
    output_mean: float
    e2e_mean_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    requests_per_s: float


def half_of(identity: str) -> str:
    """ "a" (may be fitted on) or "b" (judges): the parity of the first byte of the id's SHA-256."""
    return "ab"[hashlib.sha256(identity.encode()).digest()[0] % 2]


def closed_loop_runs() -> list[ClosedLoopRun]:
    """All rows of engine_closed_loops.csv, in the order of their source."""
    return _rows(ClosedLoopRun, FACTS / "engine_closed_loops.csv")


@dataclass(frozen=True)
class Correction:
    """A label of some closed loops that cannot be right: rows whose `doubt` begins so and whose `field` says `found`
    are taken to say `taken` instead."""

    doubt: str
    field: str
    found: str
    taken: str
    reason: str


def corrections() -> list[Correction]:
    """engine_label_corrections.csv."""
    return _rows(Correction, FACTS / "engine_label_corrections.csv")


def corrected(run: ClosedLoopRun) -> ClosedLoopRun:
    """The row with labels as they have to be; times are never touched."""
    changes = {}
    for one in corrections():
        if run.doubt.startswith(one.doubt) and str(getattr(run, one.field)) == one.found:
            changes[one.field] = type(getattr(run, one.field))(one.taken)
    return replace(run, **changes)


def rate_runs() -> list[RateRun]:
    """All rows of engine_rates.csv, by rate."""
    return _rows(RateRun, FACTS / "engine_rates.csv")


Row = TypeVar("Row", ClosedLoopRun, RateRun, Correction)


def _rows(kind: type[Row], path: Path) -> list[Row]:
    kinds = {field.name: {"int": int, "float": float}.get(str(field.type), str) for field in fields(kind)}
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        if list(reader.fieldnames or ()) != list(kinds):
            raise ProfileError(f"{path}: found columns {reader.fieldnames}, expected {', '.join(kinds)}")
        return [kind(**{name: kinds[name](value) for name, value in row.items()}) for row in reader]
