"""Which knobs of a policy are tuned, and in which range: what its own declaration says of them.

A number is tried from an eighth to eight times its default, on a logarithmic axis, within its declared bounds; a switch
or a choice in all its values. Two kinds are not tuned: texts, and what the objective itself says (`ttft_s`, `tbt_s`).
The engine's bound on requests that run at once is one more knob, and its bound on tokens where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policies.registry import knobs_of, policy_class

TOLD = {"ttft_s": "ttft", "tbt_s": "tbt"}
"""Knobs that take a bound of the objective."""
BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)
SEQUENCES = (64, 128, 256, 512, 1024)
ENGINE = ("token_budget", "max_num_seqs")
"""Settings of the engine that are tuned like knobs."""
SPREAD = 8.0


@dataclass(frozen=True)
class Choice:
    """One knob: its values, or a range."""

    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    log: bool = False


def knob_space(policy: str, fixed: Mapping[str, Any]) -> dict[str, Choice]:
    """Knob -> what is tried; `fixed` are those that the user has set."""
    cls = policy_class(policy)
    found: dict[str, Choice] = {}
    for name, knob in knobs_of(cls).items():
        if name in fixed or name in TOLD or knob.optional:
            continue
        if knob.choices:
            found[name] = Choice(values=tuple(knob.choices))
        elif knob.type is bool:
            found[name] = Choice(values=(False, True))
        elif knob.type in (int, float) and knob.default is not None:
            space = _range(knob)
            if space is not None:
                found[name] = space
    if "token_budget" not in fixed and cls().default_token_budget(8192) is not None:
        found["token_budget"] = Choice(values=BUDGETS)
    if "max_num_seqs" not in fixed and cls().default_max_num_seqs() is not None:
        found["max_num_seqs"] = Choice(values=SEQUENCES)
    return found


def _range(knob: Any) -> Choice | None:
    whole = knob.type is int
    default = float(knob.default)
    least = knob.least if knob.least is not None else 0.0
    most = knob.most
    if default <= 0:
        # Nothing says how large it may sensibly be, but for a share.
        return Choice(low=least, high=most, whole=whole) if most is not None and most <= 1 else None
    low, high = max(float(least), default / SPREAD), default * SPREAD
    if most is not None:
        high = min(high, float(most))
    if whole:
        low, high = max(1.0, round(low)), round(high)
    return Choice(low=low, high=high, whole=whole, log=low > 0) if high > low else None


def told_by(policy: str, slo: str) -> dict[str, float]:
    """Knobs that follow from the objective: the tightest bound on the time to first token, and on gaps."""
    from metrics import parse_slo

    known = knobs_of(policy_class(policy))
    told: dict[str, float] = {}
    for bound in parse_slo(slo):
        for name, metric in TOLD.items():
            if name in known and bound.metric == metric:
                told[name] = min(bound.bound_s, told.get(name, bound.bound_s))
    return told
