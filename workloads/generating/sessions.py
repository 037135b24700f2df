"""Conversations: a turn comes a thinking time after the last answer has ended, and its prompt carries the history.

Both are plain data in a trace: `after_row` and `think_ns` say when a turn comes, prompt_tokens holds the history
already. Where turns of one conversation share their beginning, prefix_hashes say so, for prefix caches and routers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from workloads.cells import MAX_TOKENS
from workloads.ragged import RangeColumn
from workloads.trace import Trace, TraceError

DURATION_FORMS = "fixed:S, uniform:LOW,HIGH, exponential:MEAN or lognormal:MEDIAN,SIGMA (seconds)"


def durations_ns(text: str, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`count` draws of a span of time (thinking, patience) from its text form, in whole microseconds, as ns."""
    kind, _, rest = text.strip().partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        numbers = [math.nan]
    values = None
    if all(0 <= number < 1e9 for number in numbers):
        match kind, numbers:
            case "fixed", [length]:
                values = np.full(count, length)
            case "uniform", [low, high] if low <= high:
                values = low + (high - low) * rng.random(count)
            case "exponential", [mean]:
                values = -mean * np.log1p(-rng.random(count))
            case "lognormal", [median, sigma] if sigma <= 10:
                values = median * np.exp(sigma * rng.standard_normal(count))
    if values is None:
        raise TraceError(f"duration: found {text[:80]!r}, expected {DURATION_FORMS}, 0 or more")
    nanoseconds: NDArray[np.int64] = np.rint(np.minimum(values, 1e8) * 1e6).astype(np.int64) * 1000
    return nanoseconds


def conversations(
    trace: Trace,
    turns: NDArray[np.int64],
    think_ns: NDArray[np.int64],
    *,
    hash_tokens: int = 16,
    context_limit: int | None = None,
) -> Trace:
    """A trace of sessions, cut out of one that holds their turns.

    trace: one row per turn, session by session, with the *new* tokens of each turn as its prompt; arrival_ns of a
        session's first row is the session's arrival, those of later rows are ignored.
    turns: turns per session (shape (sessions,), sum = len(trace)). think_ns: before each turn (first turns': ignored).
    hash_tokens: tokens per prefix hash; only whole blocks get one. 0: no hashes.
    context_limit: a session ends before the turn whose prompt and answer would exceed it.
    Returns rows in order of (earliest possible) arrival.
    """
    first = np.concatenate([[0], np.cumsum(turns)[:-1]])
    session = np.repeat(np.arange(len(turns)), turns)
    turn = np.arange(len(trace)) - first[session]
    spent = trace.prompt_tokens + trace.output_tokens
    before = np.cumsum(spent) - spent
    prompt_tokens = trace.prompt_tokens + (before - before[first[session]])
    waits_ns = np.where(turn > 0, think_ns, 0)
    waited = np.cumsum(waits_ns)
    arrival_ns = trace.arrival_ns[first[session]] + (waited - waited[first[session]])
    limit = MAX_TOKENS if context_limit is None else context_limit
    kept = np.flatnonzero(
        prompt_tokens + trace.output_tokens <= limit
    )  # totals grow: a session's kept turns are its first
    if not len(kept):
        raise TraceError(
            f"{trace.name}: found no turn within {limit} tokens of prompt and answer, expected a higher limit"
        )
    notes = trace.notes
    if len(kept) < len(trace):
        notes = (*notes, f"{len(trace) - len(kept)} turns left out: prompt and answer would exceed {limit} tokens.")
    by_time = np.argsort(arrival_ns[kept], kind="stable")
    order = kept[by_time]
    place = np.full(len(trace), -1, np.int64)
    place[order] = np.arange(len(order))
    after_row = np.where(turn[order] > 0, place[order - 1], -1)
    hashes = None
    if hash_tokens > 0:
        hashes = _shared_beginnings(session[kept], prompt_tokens[kept], hash_tokens).take(by_time)
    return replace(
        trace.rearranged(order, arrival_ns[order]),
        prompt_tokens=prompt_tokens[order],
        prefix_hashes=hashes,
        hash_tokens=hash_tokens,
        session=[f"s{number}" for number in session[order].tolist()],
        turn=turn[order],
        after_row=after_row,
        think_ns=waits_ns[order],
        notes=notes,
    )


def _shared_beginnings(session: NDArray[np.int64], prompt_tokens: NDArray[np.int64], hash_tokens: int) -> RangeColumn:
    """Block j of a session's text has one number in all its turns; no two sessions share one."""
    blocks = prompt_tokens // hash_tokens
    longest = np.zeros(int(session.max()) + 1, np.int64)
    np.maximum.at(longest, session, blocks)
    return RangeColumn((np.cumsum(longest) - longest)[session], blocks)


def names_of_histories(trace: Trace, hash_tokens: int) -> tuple[RangeColumn | None, int, int]:
    """Prefix hashes for turns whose prompts hold their session so far, one per hash_tokens; and how many of the later
    turns do, and how many later turns there are.

    Nobody recorded what was said, but a prompt that holds all of it is longer than the prompt and answer before it.
    A turn that is not shares nothing with those before it, and the next one is compared with it.
    """
    assert trace.session is not None
    count = len(trace)
    run, shares = np.arange(count), np.ones(count, bool)
    last_row: dict[str, int] = {}
    nameless: set[str] = set()  # sessions in which a prompt has not even one block: whatever follows may look like it
    later = 0
    for row, name in enumerate(trace.session):
        if name is None:
            shares[row] = False
            continue
        if trace.prompt_tokens[row] < hash_tokens:
            nameless.add(name)
        before = last_row.get(name)
        last_row[name] = row
        if before is None:
            continue
        later += 1
        if trace.prompt_tokens[row] > trace.prompt_tokens[before] + trace.output_tokens[before]:
            run[row] = run[before]
        else:
            shares[row] = name not in nameless
    holding = int((run != np.arange(count)).sum())
    if not holding:
        return None, 0, later
    names = _shared_beginnings(run, np.where(shares, trace.prompt_tokens, 0), hash_tokens)
    return names, holding, later


def with_history(trace: Trace) -> Trace:
    """A recorded trace whose prompts hold the new tokens only: each turn's gets its session so far put before it."""
    if trace.session is None:
        raise TraceError(f"{trace.name}: found no session column, expected one whose history could be added")
    prompt_tokens = trace.prompt_tokens.copy()
    last_row: dict[str, int] = {}
    for row, name in enumerate(trace.session):
        if name is None:
            continue
        if (before := last_row.get(name)) is not None:
            prompt_tokens[row] += prompt_tokens[before] + trace.output_tokens[before]
        last_row[name] = row
    if (prompt_tokens > MAX_TOKENS).any():
        raise TraceError(
            f"{trace.name}: found a conversation of more than {MAX_TOKENS:,} tokens, expected a shorter one"
        )
    return replace(trace, prompt_tokens=prompt_tokens, prefix_hashes=None, hash_tokens=0, prompt_ids=None)


def closed(
    trace: Trace, elapsed_ns: NDArray[np.int64] | None = None, parents: NDArray[np.int64] | None = None
) -> Trace:
    """A recorded trace with sessions, made closed-loop: a turn waits for the answer before it.

    The thinking time is the recorded gap less the recorded time to the answer's end (`elapsed_ns`, -1: not known);
    where that was not recorded it is the whole gap, which is more than the user thought.

    parents: the row that called each, -1 for none, where that is known; by default a session's row before.
    """
    if trace.session is None:
        raise TraceError(
            f"{trace.name}: found no session column, expected one to close the loop on; leave sessions open"
        )
    if trace.closed_loop:
        raise TraceError(f"{trace.name}: found a closed loop already, expected recorded arrival times")
    count = len(trace)
    turn, after_row, think_ns = np.zeros(count, np.int64), np.full(count, -1), np.zeros(count, np.int64)
    arrival_ns = trace.arrival_ns.copy()
    last_row: dict[str, int] = {}
    for row, name in enumerate(trace.session):
        if name is None:
            continue
        before = last_row.get(name) if parents is None else int(parents[row])
        last_row[name] = row
        if before is None or before < 0:
            continue
        gap_ns = int(trace.arrival_ns[row] - trace.arrival_ns[before])
        if elapsed_ns is not None and elapsed_ns[before] > 0:
            gap_ns = max(gap_ns - int(elapsed_ns[before]), 0)
        turn[row], after_row[row], think_ns[row] = turn[before] + 1, before, gap_ns
        arrival_ns[row] = arrival_ns[before] + gap_ns
    order = np.argsort(arrival_ns, kind="stable")
    place = np.empty(count + 1, np.int64)
    place[order], place[-1] = np.arange(count), -1
    waiting = int((after_row >= 0).sum())
    known = elapsed_ns is not None and bool((elapsed_ns > 0).any())
    what = "the recorded gap less the recorded answer time" if known else "the whole recorded gap (an upper bound)"
    return replace(
        trace.rearranged(order, arrival_ns[order]),
        turn=turn[order],
        after_row=place[after_row[order]],
        think_ns=think_ns[order],
        notes=(
            *trace.notes,
            f"{waiting} of {count} requests wait for their session's last answer; thinking time: {what}.",
        ),
    )
