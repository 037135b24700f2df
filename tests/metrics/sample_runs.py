"""Small runs, written out by hand, that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterable

from metrics import Recorder, RunTables
from policies.batch import BatchShape
from policies.request import Request

S = 1_000_000_000


def record_small_run(recorder: Recorder) -> None:
    """Two requests on two stages: a mixed batch, then a batch with a chunk and a decode."""
    recorder.iteration(
        0, 0, 0, S, 3 * S, BatchShape(chunks=((8, 0), (4, 16)), sampled=1), ((0, 8, 0, True), (1, 4, 16, False)), (),
        0, 2, 5, 90, 16, S, 0, 2 * S, True, stages=((S, 2 * S, 7), (2 * S + 7, 3 * S, 0)),
    )  # fmt: skip
    recorder.iteration(
        0, 1, 3 * S, 3 * S, 5 * S, BatchShape(((6, 20),), 1, 9, 9, 1, 2, 8), [(1, 6, 20, True)], [(4, 0, 1)],
        1, 2, 4, 89, 0, 0, 0, 2 * S, False, 0.25, 0.125,
    )  # fmt: skip
    recorder.cohort_times(0, 4, [3 * S, 5 * S])
    recorder.request(Request(1, 5, 26, 9), 0, "aborted", "client gave up", 1, 0, 5 * S, 6 * S, 1, 16, [])
    chat = Request(0, 0, 8, 2, (), 0, "chat", 3, "fast")
    recorder.request(chat, 0, "finished", "", 2, 0, 3 * S, 5 * S, 0, 0, [(4, 0, 2)])


def assert_same_tables(found: RunTables, expected: RunTables, names: Iterable[str]) -> None:
    """Equal types and values; NaN equals NaN."""
    for name in names:
        assert found.table(name).schema.equals(expected.table(name).schema)
        assert repr(found.table(name).to_pylist()) == repr(expected.table(name).to_pylist())
