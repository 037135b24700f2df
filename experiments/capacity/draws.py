"""Draws of a workload for capacity searches: independent, seeded, the same for every setting.

A draw is either a piece of the trace with its own arrivals (pieces do not overlap), or requests drawn from the trace
with replacement, or from the generator, that arrive by a seeded process. Its rate means nothing: searches stretch it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import ExperimentError
from experiments.running.workload import load_workload
from policies.edges.input_digests import digests_of

if TYPE_CHECKING:
    from workloads import Trace

LEAST_REQUESTS = 100
MOST_DRAWS = 10_000
MOST_REQUESTS = 10_000_000
_ROW_STREAM = 11
OWN = "own"


def draw_plan(
    workload: Mapping[str, Any], *, arrivals: str | None, requests: int, draws: int, seed: int
) -> dict[str, Any]:
    """How draws are made, as plain data for `draw_of`. arrivals: own (the trace's gaps), poisson, gamma:CV or uniform;
    by default own where the trace is long enough for pieces of it, poisson otherwise.

    Raises ExperimentError where the trace cannot give so many draws.
    """
    if requests < LEAST_REQUESTS:
        raise ExperimentError(f"--requests: found {requests}, expected at least {LEAST_REQUESTS} a draw")
    if not 2 <= draws <= MOST_DRAWS:
        raise ExperimentError(
            f"--draws: found {draws}, expected 2 (or nothing can be said of chance) to {MOST_DRAWS:,}"
        )
    if requests > MOST_REQUESTS:
        raise ExperimentError(f"--requests: found {requests:,}, expected at most {MOST_REQUESTS:,}")
    if "file" not in workload:
        process = _process(arrivals or "poisson")
        return {
            "workload": {**workload, "requests": requests, "arrivals": process},
            "arrivals": process,
            "requests": requests,
            "seed": seed,
        }
    trace = load_workload(workload)
    if trace.closed_loop:
        raise ExperimentError(f"{trace.name}: its requests wait for answers (closed loop), so it has no rate to vary")
    piece = min(requests, len(trace) // draws)
    if arrivals is None:
        arrivals = OWN if piece >= min(requests, 4 * LEAST_REQUESTS) else "poisson"
    if arrivals == OWN and piece < LEAST_REQUESTS:
        raise ExperimentError(
            f"{trace.name}: {len(trace)} requests are too few for {draws} pieces of at least {LEAST_REQUESTS} with "
            "their own arrivals; take fewer --draws, or --arrivals poisson"
        )
    return {
        "workload": dict(workload),
        "arrivals": OWN if arrivals == OWN else _process(arrivals),
        "requests": piece if arrivals == OWN else requests,
        "seed": seed,
    }


def draw_of(plan: Mapping[str, Any], number: int) -> Trace:
    """Draw `number` of a plan."""
    return _draw(json.dumps(dict(plan), sort_keys=True), number, tuple(digests_of(dict(plan)).items()))


@lru_cache(maxsize=32)
def _draw(plan_text: str, number: int, inputs: tuple[tuple[str, str], ...]) -> Trace:
    from workloads.generating.arrival_processes import retimed
    from workloads.generating.random_streams import random_stream

    plan = json.loads(plan_text)
    workload, requests, seed = plan["workload"], plan["requests"], plan["seed"] + number
    if "file" not in workload:
        return load_workload({**workload, "seed": seed})
    trace = load_workload(workload)
    if plan["arrivals"] == OWN:
        first = number * requests
        piece = trace.take(slice(first, first + requests))
        return _shifted(piece)
    rows = random_stream(seed, _ROW_STREAM).integers(len(trace), size=requests)
    drawn = replace(
        trace,
        arrival_ns=np.zeros(requests, np.int64),
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        max_output_tokens=trace.max_output_tokens[rows],
        prefix_hashes=None,
        hash_tokens=0,
        session=None,
        turn=None,
        priority=None if trace.priority is None else trace.priority[rows],
        slo=None if trace.slo is None else [trace.slo[row] for row in rows.tolist()],
        tenant=None if trace.tenant is None else [trace.tenant[row] for row in rows.tolist()],
        program=None,
        predicted_tokens=None if trace.predicted_tokens is None else trace.predicted_tokens[rows],
        abort_ns=None,
        prompt_ids=None,
        after_row=None,
        joins=None,
        think_ns=None,
    )
    return retimed(drawn, plan["arrivals"], seed)


def _shifted(trace: Trace) -> Trace:
    """The same requests, the first of them at 0."""
    start = int(trace.arrival_ns[0])
    abort_ns = trace.abort_ns
    if abort_ns is not None:
        abort_ns = np.where(abort_ns >= 0, abort_ns - start, -1)
    return replace(trace, arrival_ns=trace.arrival_ns - start, abort_ns=abort_ns)


def _process(text: str) -> str:
    """An arrival process at one request per second; a rate in the text is not needed and not used."""
    kind, _, rest = text.partition(":")
    if kind in ("poisson", "uniform"):
        return f"{kind}:1"
    if kind == "gamma":
        cv = rest.split(",")[-1]
        try:
            if 0.01 <= float(cv) <= 100:
                return f"gamma:1,{float(cv):g}"
        except ValueError:
            pass
    raise ExperimentError(f"--arrivals: found {text!r}, expected own, poisson, uniform or gamma:CV (no rate is needed)")
