"""What one replay would say of its trace and settings, said once for a search that runs many.

A unit of time that makes no sense, rows that were left out, a router that looks for what no request has: whoever starts
a sweep or a capacity search hears of it before the work, on stderr, as `simulator replay` tells it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from experiments.running.workload import load_workload
from policies.edges.errors import InputError

if TYPE_CHECKING:
    from experiments.sweeps.axes import SweepSpec
    from workloads import Trace

_LOOKED_AT = ("router", "decode_router", "replicas", "pools", "autoscale", "prefix_caching", "policy", "knobs")
"""Settings that `settings_without_effect` asks for."""
_KNOBS_LOOKED_AT = ("scheduling",)
_MOST_COMBINATIONS = 200


def notes_of(trace: Trace, settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Notes of a trace, and of settings (fields of a replay, others left aside) that change nothing with it."""
    from metrics.measures.slo import doubtful_bounds
    from simulator import ReplayConfig
    from simulator.settings_without_effect import settings_without_effect

    notes = list(trace.notes)
    for each in settings:
        # What cannot be run is told by whoever tries.
        with suppress(InputError):
            values = {name: each[name] for name in _LOOKED_AT if name in each}
            knobs = {name: each[name] for name in _KNOBS_LOOKED_AT if name in each}
            config = ReplayConfig.from_dict({**values, "knobs": {**values.get("knobs", {}), **knobs}})
            notes += settings_without_effect(config, trace)
            notes += doubtful_bounds(str(each["slo"])) if each.get("slo") else []
    return list(dict.fromkeys(notes))


def notes_of_sweep(spec: SweepSpec) -> list[str]:
    """Notes of every trace file that a sweep reads, with every combination of settings that they could be about."""
    choices: dict[str, Sequence[Any]] = {axis.name: axis.values or (axis.low, axis.high) for axis in spec.axes}
    workload = {name.removeprefix("trace."): values[0] for name, values in choices.items() if name.startswith("trace.")}
    looked_at = {name: values for name, values in choices.items() if name in (*_LOOKED_AT, *_KNOBS_LOOKED_AT)}
    settings = [
        {**spec.base, **dict(zip(looked_at, values))}
        for values in islice(product(*looked_at.values()), _MOST_COMBINATIONS)
    ]
    notes: list[str] = []
    for file in choices.get("trace.file", (None,)):
        with suppress(InputError):
            notes += notes_of(load_workload({**spec.trace, **workload, **({"file": file} if file else {})}), settings)
    return list(dict.fromkeys(notes))


def notes_of_search(
    workload: Mapping[str, Any],
    base: Mapping[str, Any],
    *,
    plan: Mapping[str, Any] | None = None,
    policies: Sequence[str] = (),
) -> list[str]:
    """Those of a workload under each policy; where there is a plan of draws, of these, which have fewer columns."""
    from experiments.capacity.draws import draw_of

    settings = [{**base, "policy": policy} for policy in policies] or [base]
    with suppress(InputError):
        trace = load_workload(workload if plan is None else plan["workload"])
        return [*trace.notes, *notes_of(trace if plan is None else draw_of(plan, 0), settings)]
    return []
