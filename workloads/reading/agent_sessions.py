"""Recorded sessions of coding agents (callanjfox/kv-cache-tester's form): one JSON file a session, or a folder of them.

A session holds its calls in order: `t` (s since its start), `in` and `out` (tokens), `hash_ids` (blocks of `block_size`
tokens, numbered within the session), `think_time` (tools and the user, before the call) and `api_time` (how long the
answer took). A session is a program: its prompts grow by what its tools returned.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policies.edges.input_file import parse_json
from policies.edges.settings import shown
from workloads.cells import MAX_SPAN_S, MAX_TOKENS
from workloads.generating.arrival_processes import ArrivalProcess, spelled
from workloads.generating.random_streams import random_stream
from workloads.ragged import RaggedColumn
from workloads.source import MAX_WHOLE, open_source
from workloads.trace import Trace, TraceError

_PROBE = 4096
_START_STREAM = 12
_MARKS = (b'"hash_id_scope"', b'"requests"')


def is_agent_sessions(path: str | os.PathLike[str]) -> bool:
    """Whether this is a session's file, or a folder whose first JSON file is one."""
    place = Path(path)
    try:
        file = min(place.glob("*.json"), default=None) if place.is_dir() else place
        if file is None or file.suffix != ".json":
            return False
        with file.open("rb") as opened:
            head = opened.read(_PROBE)
    except (OSError, ValueError):
        return False
    return all(mark in head for mark in _MARKS)


def read_agent_sessions(
    path: str | os.PathLike[str], *, closed: bool, process: ArrivalProcess | None = None, seed: int = 0
) -> Trace:
    """The calls of all sessions, which begin together, or by an arrival process.

    closed: a call waits for the answer before it and for its recorded think time; else it comes at its recorded time.
    Raises TraceError naming file, call, what was found and what was expected.
    """
    place = Path(path)
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not files:
        raise TraceError(f"{place}: found no .json file, expected sessions of agents, one a file")
    sessions = [_session(file) for file in files]
    sizes = {session.block_size for session in sessions}
    if len(sizes) > 1:
        raise TraceError(f"{place}: found block sizes {sorted(sizes)}, expected the same in all sessions")
    starts_s = np.zeros(len(sessions))
    if process is not None:
        if process.kind not in ("poisson", "gamma", "uniform", "burst"):
            raise TraceError(f"{place}: found {process.kind} arrivals, expected poisson, gamma, uniform or burst")
        starts_ns = process.times_ns(len(sessions), random_stream(seed, _START_STREAM)) if process.rate else None
        starts_s = starts_s if starts_ns is None else starts_ns / 1e9
    rows: list[tuple[int, int, int, dict[str, Any]]] = []
    offset = inferred = 0
    hashes: dict[tuple[int, int], list[int]] = {}
    for number, session in enumerate(sessions):
        calls = session.calls
        earliest = starts_s[number]
        for turn, call in enumerate(calls):
            if turn and call["think"] is None:
                before = calls[turn - 1]
                call["think"] = max(0.0, call["t"] - before["t"] - (before["api"] or 0.0))
                inferred += 1
            earliest = starts_s[number] + call["t"] if not closed or not turn else earliest + call["think"]
            rows.append((round(earliest * 1e9), number, turn, call))
            hashes[number, turn] = [offset + block for block in call["hash_ids"]]
        offset += 1 + max((block for call in calls for block in call["hash_ids"]), default=0)
    rows.sort(key=lambda row: row[:3])
    row_of = {(number, turn): row for row, (_, number, turn, _) in enumerate(rows)}
    outputs = np.array([call["out"] for *_, call in rows])
    notes = [f"{len(sessions)} agents' sessions, {'closed loops' if closed else 'calls at their recorded times'}."]
    if left_out := sum(session.left_out for session in sessions):
        notes.append(f"{left_out} calls left out: they failed (no output tokens).")
    if inferred and closed:
        notes.append(f"{inferred} calls without a think_time to go by: the recorded gap less the recorded answer time.")
    waits = closed and len(rows) > len(sessions)
    return Trace(
        place.name.removesuffix(".json"),
        np.array([row[0] for row in rows]),
        np.array([call["in"] for *_, call in rows]),
        outputs,
        outputs,
        prefix_hashes=RaggedColumn.of(hashes[number, turn] for _, number, turn, _ in rows),
        hash_tokens=sizes.pop(),
        session=[sessions[number].name for _, number, _, _ in rows],
        turn=np.array([turn for _, _, turn, _ in rows]),
        after_row=np.array([row_of.get((number, turn - 1), -1) for _, number, turn, _ in rows]) if waits else None,
        think_ns=np.array([round((call["think"] or 0.0) * 1e9) if turn else 0 for _, _, turn, call in rows])
        if waits
        else None,
        source_format="agent_sessions",
        notes=tuple(notes),
        provenance={"path": os.fspath(path), "format": "agent_sessions", "sessions": len(sessions)}
        | ({"arrivals": spelled(process), "arrivals_seed": seed} if process is not None else {}),
    )


class Session(NamedTuple):
    """One file: calls with an answer, in order; left_out: how many have none."""

    name: str
    block_size: int
    calls: list[dict[str, Any]]
    left_out: int


def _session(file: Path) -> Session:
    content = parse_json(open_source(file).whole(MAX_WHOLE).decode("utf-8", "replace"), str(file), TraceError)
    if not isinstance(content, dict) or not isinstance(content.get("requests"), list) or not content["requests"]:
        raise TraceError(f"{file}: found no list of requests, expected a session of an agent")
    size = content.get("block_size")
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 1_000_000:
        raise TraceError(f"{file}, block_size: found {shown(size)}, expected 1 to 1,000,000 tokens")
    calls: list[dict[str, Any]] = []
    for number, entry in enumerate(content["requests"], 1):
        where = f"{file}, call {number}"
        if not isinstance(entry, dict) or "requests" in entry:
            what = "calls within a call" if isinstance(entry, dict) else shown(entry)
            raise TraceError(f"{where}: found {what}, expected one call; sub-agents are not read")
        call = {
            "t": _number(entry, "t", where, 0, MAX_SPAN_S),
            "in": int(_number(entry, "in", where, 1, MAX_TOKENS, whole=True)),
            "out": int(_number(entry, "out", where, 0, MAX_TOKENS, whole=True)),
            "think": _perhaps(entry, "think_time", where),
            "api": _perhaps(entry, "api_time", where),
            "hash_ids": entry.get("hash_ids", []),
        }
        ids = call["hash_ids"]
        if not isinstance(ids, list) or any(type(block) is not int or not 0 <= block < 1 << 40 for block in ids):
            raise TraceError(f"{where}, hash_ids: found {shown(ids)}, expected a list of whole numbers")
        if len(ids) > -(-call["in"] // size):
            raise TraceError(f"{where}, hash_ids: found {len(ids)}, expected at most one per {size} prompt tokens")
        if calls and call["t"] < calls[-1]["t"]:
            raise TraceError(f"{where}, t: found {call['t']:g}, expected a time not before the call above")
        calls.append(call)
    answered = [call for call in calls if call["out"]]
    if not answered:
        raise TraceError(f"{file}: found no call with an answer, expected some")
    for before, call in zip(calls, calls[1:]):
        if not before["out"]:
            call["think"] = None  # counted from an answer that never came
    return Session(str(content.get("id", file.stem)), size, answered, len(calls) - len(answered))


def _perhaps(entry: dict[str, Any], key: str, where: str) -> float | None:
    return None if entry.get(key) is None else _number(entry, key, where, 0, MAX_SPAN_S)


def _number(entry: dict[str, Any], key: str, where: str, low: float, high: float, *, whole: bool = False) -> float:
    value = entry.get(key)
    kind = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not low <= value <= high:
        raise TraceError(f"{where}, {key}: found {shown(value)}, expected {kind} from {low:g} to {high:g}")
    return float(value)
