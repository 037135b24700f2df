"""What defines a validation, as plain data: it goes into the folder, and a folder of other settings is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import ExperimentError
from experiments.running.stage_files import read_json, write_json
from experiments.validation.comparing.live_side import EngineChoice, PolicyChoice
from metrics.run_folder.folder import versions_of
from policies.edges.input_digests import changed_inputs, digests_of
from policies.edges.input_file import checked_file

if TYPE_CHECKING:
    from workloads import Trace

VERSION = 1
"""Of a validation's folder."""


@dataclass(frozen=True)
class Settings:
    """Everything that defines a validation. rows: [first, last) of the trace. ensemble: models behind intervals.

    bounds: largest chunk, decodes and context to profile beyond what the trace visits, for a model that is to be used
    with other traces too.
    """

    trace: str
    policies: tuple[str, ...]
    engine: EngineChoice = field(default_factory=EngineChoice)
    rows: tuple[int, int] = (0, 40)
    loads: tuple[float, ...] = (0.6,)
    repeats: int = 3
    budget_s: float = 120.0
    ensemble: int = 31
    trace_format: str = "auto"
    bounds: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if not self.policies:
            raise ExperimentError("--policies: found none, expected names such as chunked,vllm_v1")
        for name, given in (("--policies", self.policies), ("--load", self.loads)):
            if len({each.strip() if isinstance(each, str) else each for each in given}) < len(given):
                raise ExperimentError(f"{name}: found one twice, expected each once")
        if not 0 <= self.rows[0] < self.rows[1]:
            raise ExperimentError(
                f"rows: found {self.rows[0]} to {self.rows[1]}, expected a first and a later last one"
            )
        if self.repeats < 1:
            raise ExperimentError(f"--repeats: found {self.repeats}, expected at least 1")
        for load in self.loads:
            if not 0 < load < 10:
                raise ExperimentError(f"--load: found {load:g}, expected a share of capacity such as 0.6")
        if len({load_name(load) for load in self.loads}) < len(self.loads):
            raise ExperimentError("--load: found two that agree to six digits, expected loads that can be told apart")

    def as_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def load_name(load: float) -> str:
    """A load as people and files name it: 0.6 is "60%", 0.625 is "62.5%"."""
    return f"{100 * load:g}%"


def claim_folder(out: Path, settings: Settings, profile: Path | None, anyway: bool = False) -> None:
    """Make `out` the folder of these settings, or see that it is; ExperimentError if it is something else's.

    profile: one that is to be used instead of measuring. It is known by its content, wherever it lies. anyway: take a
    folder whose trace, policy or model files had another content, or that another version of Charioteer made.
    """
    digest = None
    if profile is not None:
        digest = hashlib.sha256(checked_file(profile, ExperimentError).read_bytes()).hexdigest()[:16]
    file = out / "settings.json"
    ours = {"version": VERSION, "profile": digest, **settings.as_dict()}
    ours.pop("repeats")  # more repeats may be asked for later
    named = [PolicyChoice.parse(text).name for text in settings.policies]  # without their knobs
    inputs = digests_of({**settings.as_dict(), "policies": named})
    version = versions_of(("charioteer",))["charioteer"]
    if file.exists():
        found = read_json(file)
        if not isinstance(found, dict) or not isinstance(found.get("engine", {}), dict):
            raise ExperimentError(f"{file}: found something else, expected the settings of a validation")
        then, made_by = found.pop("inputs", {}), found.pop("made_by", None)
        theirs = {"profile": None, **found}  # older ones lack new fields
        theirs["engine"] = {**asdict(EngineChoice()), **found.get("engine", {})}
        if theirs != ours:
            key = next(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
            raise ExperimentError(
                f"{out}: holds a validation with another {key} ({theirs.get(key)}, now {ours.get(key)}); "
                "choose another --out or remove it"
            )
        changed = changed_inputs(then if isinstance(then, dict) else {}, inputs)
        if made_by not in (None, version):
            changed.append(f"charioteer ({made_by} then, {version} now)")
        if changed and not anyway:
            raise ExperimentError(
                f"{out}: holds a validation of other inputs: {', '.join(changed)}; choose another --out, or take "
                "--anyway to go on with what is there"
            )
        return
    if out.exists() and any(out.iterdir()):
        raise ExperimentError(f"{out}: found a folder with something else in it; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(file, {**ours, "inputs": inputs, "made_by": version})


def slice_of(settings: Settings) -> Trace:
    """The rows of the trace, from time 0; nobody gives up."""
    from workloads import read_trace

    trace = read_trace(settings.trace, trace_format=settings.trace_format)
    first, last = settings.rows
    if first >= len(trace):
        raise ExperimentError(f"{trace.name}: found {len(trace)} requests, expected more than {first}")
    part = trace.take(slice(first, last))
    if part.closed_loop:
        raise ExperimentError(
            f"{trace.name}: found a closed-loop trace, whose load cannot be set; expected an open one"
        )
    part = part.rearranged(np.arange(len(part)), part.arrival_ns - part.arrival_ns[0])
    return replace(part, abort_ns=None)
