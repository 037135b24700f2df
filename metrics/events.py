"""What a recorder buffers while a run is going on: plain numbers, laid out so that columns come out of them at once.

They give the garbage collector nothing to look at, and packed rows become one array without a look at any number.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from policies.request import Ns, Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

NUMBERS = (
    "replica", "iteration", "planned_s", "start_s", "end_s", "decodes", "decode_context_total", "decode_context_max",
    "dummy_tokens", "sampled", "executed_rows", "preempted", "running", "waiting", "free_blocks", "cached_tokens",
    "host_before_s", "host_after_s", "device_s", "inside",
)  # fmt: skip
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
    "end_s", "decodes", "decode_context_total", "decode_context_max", "sampled", "running", "waiting", "free_blocks",
    "host_before_s", "host_after_s", "request", "tokens", "prefix", "cohort", "step",
)  # fmt: skip
"""What an iteration of a stretch has of its own, with its one chunk (tokens 0: none) and cohort (decodes 0: none)."""

pack_straight = Struct(f"{len(STRAIGHT)}q").pack
"""The row of an iteration in a stretch as bytes: STRAIGHT, half of what a plain one needs."""

LEAP = (
    "replica", "iteration", "planned_s", "decodes", "decode_context_total", "decode_context_max", "dummy_tokens",
    "sampled", "executed_rows", "running", "waiting", "host_before_s", "host_after_s",
)  # fmt: skip

pack_leap = Struct(f"{len(LEAP)}q").pack
"""The numbers of a leap's first iteration as bytes: LEAP."""


class Plain(NamedTuple):
    """Plain iterations as a recorder buffers them.

    rows: of `pack_row`. at: the row of the table that each of them becomes. chunks, cohorts: the fields of whatever
    does not fit there, from the second of each on, as flat numbers; stages: those of every stage given. measured:
    (position in the buffer, wall_s, cpu_s) of iterations that were timed.
    """

    rows: list[bytes]
    at: list[int]
    chunks: list[int]
    cohorts: list[int]
    stages: list[Ns]
    measured: list[tuple[int, float, float]]

    def clear(self) -> None:
        for held in self:
            held.clear()


class Stretch(NamedTuple):
    """Iterations of one replica on one stage that follow each other without a gap and are numbered one by one.

    at: the row of the table that the first becomes. first: its position among the straight rows; the stretch lasts
    until the next one begins. planned_ns: when the first was planned; every other when the one before it ended. inside:
    holds for all.
    """

    at: int
    first: int
    replica: int
    number: int
    planned_ns: Ns
    inside: bool


class Leaps(NamedTuple):
    """What a recorder keeps of one leap beside its first iteration's numbers.

    at: the row of the table that its first iteration becomes. Sequences have one entry per step; a single number holds
    for all. starts_ns, device_ns: None where steps follow each other without a gap on one stage: each is planned when
    the one before it ends (the first at the `planned_s` of the numbers), and its device is busy between the host's
    times. taken: blocks that the plan of each step after the first took; None where free_blocks has them all.
    """

    at: int
    steps: int
    cohort: int
    first_step: int
    starts_ns: Ints | None
    ends_ns: Ints | Sequence[Ns]
    planned_ns: Ints | None
    free_blocks: Ints | Sequence[int] | int
    taken: Sequence[int] | None
    device_ns: Ints | Ns | None
    inside: NDArray[np.bool_] | Sequence[bool] | bool
    stages_ns: Ints | None


class RequestEvent(NamedTuple):
    """One call of `Recorder.request`."""

    request: Request
    replica: int
    status: str
    reason: str
    output_tokens: int
    admitted_ns: Ns
    first_token_ns: Ns
    finished_ns: Ns
    preemptions: int
    cached_tokens: int
    segments: Sequence[tuple[int, int, int]]
    segment_replicas: Sequence[int] | None
