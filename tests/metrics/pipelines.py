"""A pipeline small enough to draw on paper: batches in, a recorded run out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from metrics import Recorder, RunTables
from policies.work.batch import BatchShape
from policies.work.request import Request


class MicroBatch(NamedTuple):
    """times: nanoseconds on each stage. It can be planned from `ready` on (an arrival)."""

    times: Sequence[int]
    prefill: int = 0
    decodes: int = 0
    send: int = 0
    host_before: int = 0
    host_after: int = 0
    ready: int = 0


def run_pipeline(batches: Sequence[MicroBatch], *, depth: int | None = None, eager: bool = False) -> RunTables:
    """Batches in order through a pipeline that holds as many of them as it has stages, or `depth`.

    eager: a batch is planned as soon as a slot is free; otherwise only once stage 0 is free too.
    """
    recorder = Recorder()
    stages = len(batches[0].times)
    depth = depth or stages
    free = [0] * stages
    done: list[int] = []
    planned = 0
    for number, batch in enumerate(batches):
        slot = done[number - depth] if number >= depth else 0
        planned = max(planned, slot, batch.ready, 0 if eager else free[0])
        now, spans = planned + batch.host_before, []
        for stage, length in enumerate(batch.times):
            start = max(now, free[stage])
            free[stage] = start + length
            send = batch.send if stage < stages - 1 else 0
            spans.append((start, start + length, send))
            now = start + length + send
        done.append(now + batch.host_after)
        chunks = ((number, batch.prefill, 0, True),) if batch.prefill else ()
        shape = BatchShape(((batch.prefill, 0),) if batch.prefill else (), batch.decodes)
        recorder.iteration(
            0,
            number,
            planned,
            spans[0][0],
            done[-1],
            shape,
            chunks,
            (),
            0,
            0,
            0,
            0,
            0,
            batch.host_before,
            batch.host_after,
            sum(batch.times),
            True,
            stages=spans,
        )
        recorder.request(Request(number, batch.ready, 1, 1), 0, "aborted", "", 0, planned, -1, done[-1], 0, 0, ())
    run = recorder.tables()
    run.config = {"tp": 2}
    return run
