"""What an experiment is: one short file in experiments/papers/figures/ (or layouts/) that asks, runs, draws and judges.

Such a module has QUESTION (one sentence), SOURCE (the paper and figure it is about), `run(quick)` which measures and
returns a `Result`, and `draw(result, width_in)` which makes a matplotlib figure of it. The name of the file is the name
of the experiment. Published numbers stand in the module with their source; none is ever used to make ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from experiments.errors import ExperimentError

Rows = list[dict[str, Any]]

ROOMS = ("experiments.papers.figures", "experiments.papers.layouts")
"""Where experiments lie: those of papers, and those about how models lie on devices."""


@dataclass(frozen=True)
class Comparison:
    """One of our numbers beside a published one."""

    what: str
    ours: float
    paper: float
    unit: str = ""
    source: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.paper

    def within(self, share: float) -> bool:
        """Whether ours differs from the paper's by at most this share of it."""
        return abs(self.ratio - 1) <= share


@dataclass(frozen=True)
class Check:
    """One thing that the paper says, in our numbers, and whether it holds here."""

    text: str
    holds: bool


@dataclass(frozen=True)
class Result:
    """What an experiment found.

    setting: configuration as people read it. cost_models: what the costs rest on. tables: the data behind the figure,
    name -> rows. checks decide the verdict; comparisons put the paper's numbers beside ours. note: what a reader must
    know to judge a difference.
    """

    setting: Mapping[str, Any]
    cost_models: Sequence[str]
    tables: Mapping[str, Rows]
    checks: Sequence[Check]
    comparisons: Sequence[Comparison] = ()
    note: str = ""

    @property
    def verdict(self) -> str:
        """holds, holds in part, or does not hold."""
        held = sum(check.holds for check in self.checks)
        if held == len(self.checks):
            return "holds"
        return f"holds in part ({held} of {len(self.checks)})" if held else "does not hold"

    def as_dict(self) -> dict[str, Any]:
        """Everything but the tables, as plain data."""
        return {
            "verdict": self.verdict,
            "checks": [asdict(check) for check in self.checks],
            "comparisons": [{**asdict(row), "ratio": row.ratio} for row in self.comparisons],
            "setting": dict(self.setting),
            "cost_models": list(self.cost_models),
            "note": self.note,
        }


def experiment_names() -> list[str]:
    """Every experiment, in the order of its file names."""
    return sorted(name for room in ROOMS for name in _in_room(room))


def load_experiment(name: str) -> ModuleType:
    """The module of one experiment. ExperimentError, with near matches, for an unknown name."""
    known = experiment_names()
    if name not in known:
        import difflib

        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else "see `python -m experiments list`"
        raise ExperimentError(f"experiment {name!r}: no such experiment; {hint}")
    return import_module(next(f"{room}.{name}" for room in ROOMS if name in _in_room(room)))


def _in_room(room: str) -> list[str]:
    return [module.name for module in iter_modules(import_module(room).__path__)]


def within_check(comparisons: Sequence[Comparison], share: float) -> Check:
    """All numbers within a share of the paper's, and which is farthest off."""
    worst = max(comparisons, key=lambda row: abs(row.ratio - 1))
    close = sum(row.within(share) for row in comparisons)
    return Check(
        f"{close} of {len(comparisons)} numbers within {share:.0%} of the paper's; farthest: {worst.what} at "
        f"{worst.ratio - 1:+.0%}",
        close == len(comparisons),
    )
