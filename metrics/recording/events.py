"""What a recorder buffers while a run is going on: plain numbers, laid out so that columns come out of them at once.

They give the garbage collector nothing to look at, and packed rows become one array without a look at any number.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from policies.work.request import Ns

NUMBERS = (
    "replica",
    "iteration",
    "planned_s",
    "start_s",
    "end_s",
    "decodes",
    "decode_context_total",
    "decode_context_max",
    "dummy_tokens",
    "sampled",
    "executed_rows",
    "preempted",
    "running",
    "waiting",
    "free_blocks",
    "cached_tokens",
    "host_before_s",
    "host_after_s",
    "device_s",
    "inside",
)
"""The columns of iterations.parquet that a recorder keeps as flat numbers, in its order; times in nanoseconds."""

COUNTS = ("chunks", "cohorts", "stages")
"""What follows NUMBERS in the row of a plain iteration: how many of each it has."""

CHUNK_FIELDS, COHORT_FIELDS, STAGE_FIELDS = 4, 3, 3
"""Numbers of a chunk (request, tokens, prefix, samples), a cohort (cohort, step, size), a stage (start, end, send)."""

ROW_LENGTH = len(NUMBERS) + len(COUNTS) + CHUNK_FIELDS + COHORT_FIELDS

pack_row = Struct(f"{ROW_LENGTH}q").pack
"""The row of a plain iteration as bytes: NUMBERS, COUNTS, and its first chunk and cohort (zeros where it has none).

One small bytes object a row: thirty integers of their own would fill a processor's cache with a few thousand rows.
"""

STRAIGHT = (
    "end_s",
    "decodes",
    "decode_context_total",
    "decode_context_max",
    "sampled",
    "running",
    "waiting",
    "free_blocks",
    "host_before_s",
    "host_after_s",
    "request",
    "tokens",
    "prefix",
    "cohort",
    "step",
)
"""What an iteration of a stretch has of its own, with its one chunk (tokens 0: none) and cohort (decodes 0: none)."""

pack_straight = Struct(f"{len(STRAIGHT)}q").pack
"""The row of an iteration in a stretch as bytes: STRAIGHT, half of what a plain one needs."""

STRETCH = ("at", "first", "replica", "iteration", "planned_s", "inside")
"""A stretch: iterations of one replica on one stage that follow each other without a gap and are numbered one by one.

at: the row of the table that the first becomes. first: its position among the straight rows; the stretch lasts until
the next one begins. planned_s: when the first was planned; every other when the one before it ended. inside: for all.
"""

pack_stretch = Struct(f"{len(STRETCH)}q").pack

LEAP = (
    "at",
    "steps",
    "replica",
    "iteration",
    "planned_s",
    "decodes",
    "decode_context_total",
    "decode_context_max",
    "dummy_tokens",
    "sampled",
    "executed_rows",
    "running",
    "waiting",
    "free_blocks",
    "host_before_s",
    "host_after_s",
    "inside",
    "cohort",
    "step",
)
"""A leap: so many equal iterations on one stage that follow each other without a gap, as the numbers of the first.

at: the row of the table that the first becomes; free_blocks: after its plan.
"""

pack_leap = Struct(f"{len(LEAP)}q").pack

REQUEST = (
    "request",
    "replica",
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "max_output_tokens",
    "status",
    "admitted_s",
    "first_token_s",
    "finished_s",
    "preemptions",
    "cached_tokens",
    "priority",
    "segments",
)
"""A request that has ended. status: its place in STATUSES; segments: how many it has; times are -1 for never."""

pack_request = Struct(f"{len(REQUEST)}q").pack


class Plain(NamedTuple):
    """Plain iterations as a recorder buffers them.

    rows: of `pack_row`. at: the row of the table that each of them becomes. chunks, cohorts: the fields of whatever
    does not fit there, from the second of each on, as flat numbers; stages: those of every stage given. measured:
    (position in the buffer, wall_s, cpu_s, activated experts) of iterations that were timed. drafted: (position,
    draft_tokens, draft_context_total, drafting) of those that speculated; drafts: (position, request, verified,
    accepted, delivered) of their decodes.
    """

    rows: list[bytes]
    at: list[int]
    chunks: list[int]
    cohorts: list[int]
    stages: list[Ns]
    measured: list[tuple[int, float, float, float]]
    drafted: list[tuple[int, int, int, int]]
    drafts: list[tuple[int, int, int, int, int]]

    def clear(self) -> None:
        for held in self:
            held.clear()


class Straight(NamedTuple):
    """Stretches as a recorder buffers them. rows: of `pack_straight`, of all stretches; stretches: `pack_stretch`."""

    rows: list[bytes]
    stretches: list[bytes]

    def clear(self) -> None:
        for held in self:
            held.clear()


class Leaps(NamedTuple):
    """Leaps as a recorder buffers them.

    rows: of `pack_leap`. ends, taken: of all leaps' iterations, one leap after the other: when each ended, and the
    blocks that the plan of the next one took. inside: (position of its first iteration there, one flag each) of leaps
    whose iterations are not all alike in this. times: (position of its first iteration there; when each was planned,
    when it started, its device time) of leaps whose iterations are planned ahead.
    """

    rows: list[bytes]
    ends: list[Ns]
    taken: list[int]
    inside: list[tuple[int, Sequence[bool]]]
    times: list[tuple[int, Sequence[Ns], Sequence[Ns], Sequence[Ns]]]

    def clear(self) -> None:
        for held in self:
            held.clear()


class Ended(NamedTuple):
    """Requests as a recorder buffers them.

    rows: of `pack_request`; segments: of all of them, one request after the other. Rarer things by request id:
    reasons, sessions, SLO classes, tenants, programs (where they are not the session), and the replica of each segment
    where they are not all the request's own.
    """

    rows: list[bytes]
    segments: list[tuple[int, int, int]]
    reasons: dict[int, str]
    sessions: dict[int, str]
    slos: dict[int, str]
    tenants: dict[int, str]
    programs: dict[int, str]
    segment_replicas: dict[int, Sequence[int]]
