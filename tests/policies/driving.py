"""A tiny engine for tests: integer virtual time, any number of batches in flight, everything logged."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from policies import Batch, Chunk, Decodes, Request, Scheduler


@dataclass
class Log:
    batches: list = field(default_factory=list)  # (number, planned_ns, shape, rows)
    ends: list = field(default_factory=list)
    gaps: Counter = field(default_factory=Counter)
    first_tokens: int = 0
    finished: dict = field(default_factory=dict)
    rejected: dict = field(default_factory=dict)
    token_times: dict = field(default_factory=dict)
    leaps: int = 0


def rows_of(batch: Batch) -> list[tuple[int, int, int]]:
    """(request, tokens, context before) in batch order."""
    rows = []
    for part in batch.parts:
        if isinstance(part, Chunk):
            rows.append((part.track.request.id, part.tokens, part.prefix))
        else:
            rows.extend(
                (track.request.id, 1, track.context - (part.cohort.planned - part.step))
                for track in part.cohort.members()
                if track.decodes_from <= part.step
            )
    return rows


def duration_ns(shape) -> int:
    return 1000 + 10 * shape.rows + shape.decode_context_total // 16


def drive(
    scheduler: Scheduler,
    requests: list[tuple[Request, int]],
    *,
    depth: int = 1,
    duration=duration_ns,
    leaping: bool = False,
    each_step=lambda scheduler: None,
    planned=lambda batch: None,
    most_batches: int = 20_000,
) -> Log:
    """Run (request, true output length) pairs to the end; the engine keeps up to `depth` batches in flight."""
    log = Log()
    pending = deque(sorted(requests, key=lambda pair: pair[0].arrival_ns))
    flight: deque[tuple[Batch, int]] = deque()
    tracks = {}
    now = 0
    free_at = 0

    while True:
        while pending and pending[0][0].arrival_ns <= now:
            request, output = pending.popleft()
            track = scheduler.add(request, now, ends_after=output)
            tracks[request.id] = track
            if track.status == "rejected":
                log.rejected[request.id] = track.reason
        while len(flight) < depth:
            batch = scheduler.plan(now)
            if batch is None:
                break
            planned(batch)
            assert len(log.batches) < most_batches, "does not end"
            log.batches.append((batch.number, now, batch.shape, rows_of(batch)))
            start = max(now, free_at)
            free_at = start + duration(batch.shape)
            flight.append((batch, free_at))
            each_step(scheduler)
        if not flight:
            alarm = scheduler.alarm_ns
            if alarm is not None and (not pending or alarm < pending[0][0].arrival_ns):
                assert alarm > now, "an alarm that is due already would never ring"
                now = alarm
                continue
            if pending:
                now = max(now, pending[0][0].arrival_ns)
                if scheduler.queues.waiting and scheduler.alarm_ns is None:
                    stuck = scheduler.reject_stuck(now)
                    log.rejected[stuck.request.id] = stuck.reason
                continue
            stuck = scheduler.reject_stuck(now)
            if stuck is None:
                break
            log.rejected[stuck.request.id] = stuck.reason
            continue
        batch, end = flight.popleft()
        if leaping and not flight and (quiet := scheduler.quiet_steps(batch)):
            ends = [end]
            shape = batch.shape
            for _ in range(quiet - 1):
                shape = shape._replace(
                    decode_context_total=shape.decode_context_total + shape.decodes,
                    decode_context_max=shape.decode_context_max + 1,
                )
                ends.append(ends[-1] + duration(shape))
            if pending:
                arrival = pending[0][0].arrival_ns
                ends = [at for at in ends if at < arrival]
            if ends:
                log.leaps += 1
                size = batch.shape.decodes
                before = batch.parts[0].cohort.times[-1]
                for at in ends:
                    log.ends.append(at)
                    log.gaps[at - before] += size
                    before = at
                for step, at in enumerate(ends):
                    shape = batch.shape
                    log.batches.append(
                        (
                            batch.number + step + 1,
                            at,
                            shape._replace(
                                decode_context_total=shape.decode_context_total + (step + 1) * size,
                                decode_context_max=shape.decode_context_max + step + 1,
                            ),
                            [(i, n, c + step + 1) for i, n, c in rows_of(batch)],
                        )
                    )
                scheduler.leap(batch, ends)
                each_step(scheduler)
                end = ends[-1] + duration(batch.shape)
                free_at = end
        now = max(now, end)
        # Whoever arrives at or before this moment is seen by the plan that follows it.
        outcome = scheduler.complete(batch, now)
        log.ends.append(now)
        log.first_tokens += len(outcome.first_tokens)
        for gap, count in outcome.gaps:
            assert gap >= 0
            log.gaps[gap] += count
        for track in outcome.finished:
            log.finished[track.request.id] = now
        each_step(scheduler)

    cohorts = {cohort.number: cohort.times for cohort in scheduler.take_retired()}
    for request_id, track in tracks.items():
        log.token_times[request_id] = [
            time for number, start, end in track.segments for time in cohorts[number][start:end]
        ]
    log.tracks = tracks
    return log


def held_blocks(scheduler: Scheduler) -> int:
    """Blocks that running tracks hold, counted track by track."""
    block_size = scheduler.ledger.block_size
    return sum(
        max(track.blocks, -(-track.context // block_size)) for track in scheduler.tracks.values() if track.order >= 0
    )


def is_decodes(part) -> bool:
    return isinstance(part, Decodes)
