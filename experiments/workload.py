"""A trace from plain settings, parsed once per process: a file with `file`, or a generator's `prompt`, `output`, ...

Sweeps, capacity searches and figures describe their workloads with the same keys, so that a point can be sent to
another process as a few words instead of a million requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from experiments.errors import ExperimentError

if TYPE_CHECKING:
    from workloads import Trace

READING = ("trace_format", "on_bad_row", "on_unsorted", "arrivals", "seed", "spread_ties")
GENERATING = ("requests", "duration_s", "arrivals", "prompt", "output", "stratified", "seed")
WORKLOAD_KEYS = frozenset(("file", "first", "timeout_s", *READING, *GENERATING))


def load_workload(settings: Mapping[str, Any]) -> Trace:
    """The trace that the settings describe. first: rows that are left out at its start, or [from, to).

    Raises TraceError for a bad file or value, ExperimentError for settings that do not go together.
    """
    return _cached(json.dumps(dict(settings), sort_keys=True))


@lru_cache(maxsize=8)
def _cached(text: str) -> Trace:
    settings = json.loads(text)
    timeout_s, first = settings.pop("timeout_s", None), settings.pop("first", None)
    trace = _read(settings) if "file" in settings else _generate(settings)
    if first is not None:
        start, end = first if isinstance(first, list) else (first, len(trace))
        trace = trace.take(slice(start, end))
    return trace if timeout_s is None else trace.with_timeout(float(timeout_s))


def _read(settings: dict[str, Any]) -> Trace:
    from workloads import read_trace

    file = settings.pop("file")
    _only(settings, READING, "a trace file")
    return read_trace(file, **settings)


def _generate(settings: dict[str, Any]) -> Trace:
    from workloads import generate

    _only(settings, GENERATING, "a generated trace")
    return generate(**settings)


def _only(settings: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    for key in settings:
        if key not in known:
            raise ExperimentError(f"trace.{key}: does not belong to {what}, which takes {', '.join(known)}")
