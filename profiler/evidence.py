"""What a prediction rests on: the share of its time from measured operators, and what the rest is assumed by.

An operator was measured where its batch lies inside a cell of the operator's measured grid. Whatever says "calibrated"
says it by this share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from policies.work.batch import BatchShape
from profiler.cost_model import CostModel
from profiler.own_forms import own_form, whole_ns
from profiler.specs.shape_columns import ShapeColumns

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]

CALIBRATED = 0.9
"""Share of the predicted time from measured operators from which costs are called calibrated."""
NAMED = 3
"""Operators that the words name; all of them are in the JSON."""
WORTH_NAMING = 0.005
"""Of the time; operators below are not in the words."""

BY_LAW = "by law"
BY_ROOFLINE = "by roofline"
BY_OTHER_LAYOUT = "by another layout's law"
BY_OTHER_WIDTH = "by another width's bytes"
BY_LINK = "by the link's specification"
ASSUMED = "assumed"


class Part(NamedTuple):
    """One operator over many batches.

    ns: its time in each, over all stages. measured: where it was measured, or one answer for all. otherwise: what its
    time rests on elsewhere.
    """

    name: str
    ns: Column
    measured: Mask | bool
    otherwise: str


@dataclass(frozen=True)
class Evidence:
    """measured_share: of the predicted time, from measured operators; nan where no time was predicted.

    assumed: (operator, what it rests on) -> share of the time, largest first. specifications: costs rest on
    specifications alone.
    """

    measured_share: float
    assumed: Mapping[tuple[str, str], float]
    specifications: bool = False

    @property
    def calibrated(self) -> bool:
        return not self.specifications and not self.measured_share < CALIBRATED

    @property
    def words(self) -> str:
        """What a user reads behind the name of the costs."""
        if self.specifications:
            return "uncalibrated: specifications alone"
        if self.measured_share != self.measured_share:
            return "no time was predicted"
        # Rounded down: 89.9 % are no 90.
        share = f"{int(100 * self.measured_share + 1e-9)} %"
        kind = f"calibrated: {share} of the time measured" if self.calibrated else f"partly measured: {share}"
        kind = kind if self.measured_share else "uncalibrated: nothing of it measured"
        named = [(key, part) for key, part in self.assumed.items() if part >= WORTH_NAMING]
        if not named:
            return kind
        shown = [f"{name} {100 * part:.0f} % {why}" for (name, why), part in named[:NAMED]]
        if len(named) > NAMED:
            shown.append(f"{len(named) - NAMED} more {100 * sum(part for _, part in named[NAMED:]):.0f} %")
        return f"{kind}; {', '.join(shown)}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, the words among it."""
        return {
            "calibrated": self.calibrated,
            "measured_share": self.measured_share,
            "words": self.words,
            "assumed": [{"operator": name, "by": why, "share": part} for (name, why), part in self.assumed.items()],
        }


def parts_of(cost: CostModel, shapes: object) -> list[Part]:
    """Every part of many iterations; they sum to host, stages and sends of each.

    A cost model tells its own by `evidence`; of one that has none the whole iteration is a part, measured where it says
    that it is `inside`, if it says that it is `calibrated`.
    """
    columns = ShapeColumns.of(shapes)
    own = own_form(cost, "evidence", "host_ns", "stage_ns", "send_ns", "inside")
    if own is not None:
        found: list[Part] = own(columns)
        return found
    each = columns.shapes()
    ns = [whole_ns(cost, shape) for shape in each]
    inside = np.array([cost.calibrated and cost.inside(shape) for shape in each], bool)
    return [Part("iteration", np.array(ns, np.int64), inside, BY_LAW if cost.calibrated else ASSUMED)]


def parts_rest_on(cost: CostModel, shape: BatchShape) -> dict[str, str]:
    """For every part of a breakdown: "measured", or what it rests on."""
    names = list(cost.breakdown(shape))
    if cost.kind == "roofline":
        return dict.fromkeys(names, BY_ROOFLINE)
    told = {part.name: "measured" if np.all(part.measured) else part.otherwise for part in parts_of(cost, [shape])}
    whole = told.get("iteration", ASSUMED)
    alike = {"host_before": "host", "host_after": "host", "mixed_attention": "attention"}
    return {name: told.get(name, told.get(alike.get(name, ""), whole)) for name in names}


def evidence_of(weighed: Sequence[tuple[CostModel, object, ArrayLike]]) -> Evidence:
    """Of all batches of some cost models: (model, shapes, how often each ran)."""
    total, measured = 0.0, 0.0
    assumed: dict[tuple[str, str], float] = {}
    for cost, shapes, counts in weighed:
        if cost.kind == "roofline":
            continue
        for part in parts_of(cost, shapes):
            ns = part.ns * np.asarray(counts, float)
            whole = float(ns.sum())
            known = float(ns[np.broadcast_to(part.measured, ns.shape)].sum())
            total, measured = total + whole, measured + known
            if whole > known:
                key = (part.name, part.otherwise)
                assumed[key] = assumed.get(key, 0.0) + whole - known
    alone = bool(weighed) and all(not cost.calibrated and cost.kind == "roofline" for cost, *_ in weighed)
    for cost, shapes, counts in weighed:
        if cost.kind == "roofline" and not alone:
            columns = ShapeColumns.of(shapes)
            each = np.array([whole_ns(cost, shape) for shape in columns.shapes()], np.int64)
            whole = float((each * np.asarray(counts, float)).sum())
            total += whole
            assumed[(cost.name, BY_ROOFLINE)] = assumed.get((cost.name, BY_ROOFLINE), 0.0) + whole
    if alone:
        return Evidence(0.0, {}, True)
    if not total:
        return Evidence(float("nan"), {})
    shares = {key: ns / total for key, ns in sorted(assumed.items(), key=lambda item: -item[1])}
    return Evidence(measured / total, shares)
