"""Measurements that travel with the project: profiles, real runs, step logs, published numbers, traces.

`data/facts` holds tables in the project's own forms; its sources.toml says of each where it comes from, under which
licence, how it was read and what is not known. docs/facts.py made them. Nothing else is read without being asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from profiler.errors import ProfileError

if TYPE_CHECKING:
    from profiler.measurements.profile import Profile

FACTS = Path(__file__).parents[1] / "data" / "facts"
PROFILES = FACTS / "profiles"
VLLM_RUNS = FACTS / "vllm_runs"
STEP_LOGS = FACTS / "vllm_cpu_steps"
TRACES = FACTS / "traces"
LIVE_RUNS = FACTS / "live_runs"


def carried_profiles() -> list[str]:
    """Names that `carried_profile` knows: GPU, or GPU_MODEL where operators of one model were measured."""
    return sorted(path.stem for path in PROFILES.glob("*.parquet"))


def carried_profile(name: str) -> Profile:
    """The whole public profile behind a fit that ships, e.g. "h100" or "rtx4090_llama-3.1-8b"; or ProfileError."""
    from profiler.measurements.profile import read_profile

    if name not in carried_profiles():
        raise ProfileError(f"profile {name!r}: not carried, expected one of {', '.join(carried_profiles())}")
    return read_profile(PROFILES / f"{name}.parquet")
