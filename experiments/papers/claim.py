"""A claim: a sentence with numbers that somebody makes about scheduling, and what we find when we run it.

Each module in experiments/papers/claims/ has CLAIM (the sentence) and `run(quick)`, which returns a `Finding`. Where
a claim names no setting, the module takes the mildest one under which it can be judged, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from experiments.papers.chosen_costs import costs_from

HOLDS, FAILS = "holds", "does not hold"


def holds_under(condition: str) -> str:
    """The verdict on a claim that needs a condition which it does not name."""
    return f"holds under {condition}"


@dataclass(frozen=True)
class Finding:
    """What we found. setting: as people read it. ours: the sentence in our numbers. verdict: holds, holds under ...,
    does not hold. numbers: what the verdict rests on."""

    setting: str
    ours: str
    verdict: str
    cost_models: Sequence[str]
    numbers: Mapping[str, Any] = field(default_factory=dict)


def claim_names() -> list[str]:
    """Every claim, in the order of its file names."""
    import experiments.papers.claims

    return sorted(module.name for module in iter_modules(experiments.papers.claims.__path__))


def judge(name: str, *, quick: bool = False, cost_model: str = "auto") -> dict[str, Any]:
    """Run one claim; plain data. cost_model: auto, roofline or a file, where a claim leaves the choice."""
    module = import_module(f"experiments.papers.claims.{name}")
    with costs_from(cost_model):
        finding: Finding = module.run(quick)
    return {"claim": name, "says": module.CLAIM, "quick": quick, **asdict(finding)}


def run_task(task: Mapping[str, Any]) -> dict[str, Any]:
    """One claim as work for another process."""
    return judge(task["claim"], quick=task["quick"], cost_model=task["cost_model"])
