"""Small runs, written out by hand, that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterable

from metrics import Recorder, RunTables
from policies.work.batch import BatchShape
from policies.work.request import Request

S = 1_000_000_000


def record_small_run(recorder: Recorder) -> None:
    """Two requests on two stages: a mixed batch, then a batch with a chunk and a decode."""
    recorder.iteration(
        0,
        0,
        0,
        S,
        3 * S,
        BatchShape(chunks=((8, 0), (4, 16)), sampled=1),
        ((0, 8, 0, True), (1, 4, 16, False)),
        (),
        0,
        2,
        5,
        90,
        16,
        S,
        0,
        2 * S,
        True,
        stages=((S, 2 * S, 7), (2 * S + 7, 3 * S, 0)),
    )
    recorder.iteration(
        0,
        1,
        3 * S,
        3 * S,
        5 * S,
        BatchShape(((6, 20),), 1, 9, 9, 1, 2, 8),
        [(1, 6, 20, True)],
        [(4, 0, 1)],
        1,
        2,
        4,
        89,
        0,
        0,
        0,
        2 * S,
        False,
        0.25,
        0.125,
    )
    recorder.cohort_times(0, 4, [3 * S, 5 * S])
    recorder.request(Request(1, 5, 26, 9), 0, "aborted", "client gave up", 1, 0, 5 * S, 6 * S, 1, 16, [])
    chat = Request(0, 0, 8, 2, (), 0, "chat", 3, "fast", "acme", "p")
    recorder.request(chat, 0, "finished", "", 2, 0, 3 * S, 5 * S, 0, 0, [(4, 0, 2)])


def three_requests() -> RunTables:
    """Three requests that finish and one that cannot run; the numbers of test_summary are worked out from this.

    Seconds:  0     1           3        4           6   6.5      7.5   8
              | R0  | R0+R1     | R0 R1  | R2        |host| R1    |host|
    R0 (prompt 8) gets tokens at 1, 3, 4; R1 (prompt 4) at 3, 4 and, preempted by R2, at 8; R2 (prompt 6) one at 6.
    """
    recorder = Recorder()
    recorder.iteration(
        0, 0, 0, 0, S, BatchShape(((8, 0),), sampled=1), ((0, 8, 0, True),), (), 0, 1, 0, 8, 0, 0, 0, S, True
    )
    recorder.iteration(
        0,
        1,
        S,
        S,
        3 * S,
        BatchShape(((4, 0),), 1, 8, 8, 3, 2, 10),
        ((1, 4, 0, True),),
        ((0, 1, 1),),
        0,
        2,
        1,
        6,
        2,
        0,
        0,
        2 * S,
        True,
    )
    recorder.iteration(
        0,
        2,
        3 * S,
        3 * S,
        4 * S,
        BatchShape((), 2, 13, 9, 0, 2),
        (),
        ((0, 2, 2),),
        0,
        2,
        1,
        5,
        0,
        0,
        0,
        S,
        True,
    )
    recorder.iteration(
        0,
        3,
        4 * S,
        4 * S,
        6 * S,
        BatchShape(((6, 0),), sampled=1),
        ((2, 6, 0, True),),
        (),
        1,
        1,
        1,
        4,
        0,
        0,
        0,
        2 * S,
        True,
    )
    recorder.iteration(
        0,
        4,
        6 * S,
        6 * S + S // 2,
        8 * S,
        BatchShape(((6, 0),), sampled=1),
        ((1, 6, 0, True),),
        (),
        0,
        1,
        0,
        3,
        0,
        S // 2,
        S // 2,
        S,
        False,
    )
    recorder.cohort_times(0, 0, [S, 3 * S, 4 * S])
    recorder.cohort_times(0, 1, [6 * S])
    recorder.cohort_times(0, 2, [8 * S])
    fast, slow = "fast", "slow"
    recorder.request(Request(0, 0, 8, 3, slo=fast), 0, "finished", "", 3, 0, S, 4 * S, 0, 0, ((0, 0, 3),))
    recorder.request(Request(2, S, 6, 9, slo=slow), 0, "finished", "", 1, 4 * S, 6 * S, 6 * S, 0, 0, ((1, 0, 1),))
    recorder.request(Request(3, 2 * S, 900, 9, slo=slow), -1, "rejected", "too long", 0, -1, -1, 2 * S, 0, 0, ())
    recorder.request(Request(1, S, 4, 3, slo=fast), 0, "finished", "", 3, S, 3 * S, 8 * S, 1, 2, ((0, 1, 3), (2, 0, 1)))
    return recorder.tables()


def assert_same_tables(found: RunTables, expected: RunTables, names: Iterable[str]) -> None:
    """Equal types and values; NaN equals NaN."""
    for name in names:
        assert found.table(name).schema.equals(expected.table(name).schema)
        assert repr(found.table(name).to_pylist()) == repr(expected.table(name).to_pylist())
