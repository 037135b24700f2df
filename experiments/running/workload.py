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
from policies.edges.input_digests import digests_of

if TYPE_CHECKING:
    from workloads import Trace

READING = (
    *("trace_format", "on_bad_row", "on_unsorted", "arrivals", "seed", "spread_ties"),
    *("sessions", "history", "coupling", "hash_tokens", "time_unit", "predict"),
)
GENERATING = ("requests", "duration_s", "arrivals", "prompt", "output", "tenants", "stratified", "seed")
WORKLOAD_KEYS = frozenset(("file", "first", "limit", "timeout_s", *READING, *GENERATING))


def load_workload(settings: Mapping[str, Any]) -> Trace:
    """The trace that the settings describe. limit: only its first so many requests, as `--limit` of a replay; first:
    rows that are left out at its start, or [from, to).

    Raises TraceError for a bad file or value, ExperimentError for settings that do not go together.
    """
    return _cached(json.dumps(dict(settings), sort_keys=True), tuple(digests_of(dict(settings)).items()))


@lru_cache(maxsize=8)
def _cached(text: str, inputs: tuple[tuple[str, str], ...]) -> Trace:
    """inputs: digests of the files that the settings name; an edited trace is another one."""
    settings = json.loads(text)
    timeout_s, first, limit = (settings.pop(key, None) for key in ("timeout_s", "first", "limit"))
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ExperimentError(f"trace.limit: found {limit!r}, expected a whole number of requests, at least 1")
    trace = _read(settings) if "file" in settings else _generate(settings)
    if first is not None:
        start, end = first if isinstance(first, list) else (first, len(trace))
        trace = trace.take(slice(start, end))
    if limit is not None:
        trace = trace.head(limit)
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
