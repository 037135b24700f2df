"""The recorder gives the rows that it was told, in memory, streamed or leapt over."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import MetricsError, Recorder
from metrics.run_folder.columns import TABLES, schema, to_ns, to_seconds
from metrics.run_folder.tables import as_numpy
from policies.work.batch import BatchShape
from policies.work.request import Request
from tests.metrics.sample_runs import assert_same_tables, record_small_run


def test_every_table_holds_what_was_recorded() -> None:
    recorder = Recorder()
    record_small_run(recorder)
    run = recorder.tables()
    for name in TABLES:
        assert run.table(name).schema.equals(schema(name))
    iterations = run.iterations.to_pylist()
    assert iterations[0]["chunks"] == [
        {"request": 0, "tokens": 8, "prefix": 0, "samples": True},
        {"request": 1, "tokens": 4, "prefix": 16, "samples": False},
    ]
    assert (iterations[0]["chunk_tokens"], iterations[0]["num_chunks"], iterations[0]["cohorts"]) == (12, 2, [])
    assert iterations[1]["cohorts"] == [{"cohort": 4, "step": 0, "size": 1}]
    assert (iterations[1]["decodes"], iterations[1]["dummy_tokens"], iterations[1]["executed_rows"]) == (1, 1, 8)
    assert (iterations[1]["wall_s"], iterations[1]["inside"]) == (0.25, False)
    assert math.isnan(iterations[0]["wall_s"])
    assert run.stages.select(["stage", "iteration", "start_s", "end_s"]).to_pylist() == [
        {"stage": 0, "iteration": 0, "start_s": 1.0, "end_s": 2.0},
        {"stage": 1, "iteration": 0, "start_s": 2.000000007, "end_s": 3.0},
        {"stage": 0, "iteration": 1, "start_s": 3.0, "end_s": 5.0},
    ]
    requests = run.requests.to_pylist()
    assert [r["request"] for r in requests] == [0, 1]
    assert (requests[0]["session"], requests[0]["slo"], requests[0]["priority"]) == ("chat", "fast", 3)
    assert (requests[0]["tenant"], requests[0]["program"]) == ("acme", "p")
    assert (requests[1]["tenant"], requests[1]["program"]) == (None, None)
    assert (requests[1]["status"], requests[1]["reason"], requests[1]["session"]) == ("aborted", "client gave up", None)
    assert run.segments.to_pylist() == [
        {"request": 0, "replica": 0, "rank": 0, "cohort": 4, "from_step": 0, "to_step": 2}
    ]
    assert run.tokens.column("time_s").to_pylist() == [3.0, 5.0]


def test_a_request_never_seen_has_no_times() -> None:
    recorder = Recorder()
    recorder.request(Request(0, 7, 10, 1), -1, "rejected", "longer than the KV pool", 0, -1, -1, 7, 0, 0, ())
    row = recorder.tables().requests.to_pylist()[0]
    assert math.isnan(row["admitted_s"])
    assert math.isnan(row["first_token_s"])
    assert row["finished_s"] == 7 / 1e9


def test_a_status_outside_the_four_is_refused() -> None:
    with pytest.raises(MetricsError, match="found status 'lost', expected one of finished, rejected, failed, aborted"):
        Recorder().request(Request(0, 0, 1, 1), 0, "lost", "", 0, -1, -1, 0, 0, 0, ())


def test_a_number_that_its_column_cannot_hold_is_refused() -> None:
    recorder = Recorder()
    recorder.request(Request(0, 7, 1 << 31, 1), 0, "rejected", "too long", 0, -1, -1, 7, 0, 0, ())
    with pytest.raises(MetricsError, match="row 0, column prompt_tokens: found 2147483648, more than 32 bits hold"):
        recorder.tables()


def test_texts_come_back_as_they_were_with_and_without_an_answer() -> None:
    recorder = Recorder()
    for row, session in enumerate([None, "", "chät", None, "x" * 300]):
        recorder.request(Request(row, 7, 10, 1, session=session), -1, "rejected", "zu groß", 0, -1, -1, 7, 0, 0, ())
    run = recorder.tables()
    assert run.requests.column("session").to_pylist() == [None, "", "chät", None, "x" * 300]
    assert run.requests.column("reason").to_pylist() == ["zu groß"] * 5
    run.requests.validate(full=True)
    run.iterations.validate(full=True)


def test_recording_ends_with_the_tables() -> None:
    recorder = Recorder()
    recorder.tables()
    with pytest.raises(MetricsError, match="second call"):
        recorder.tables()


def test_streamed_tables_equal_those_in_memory(tmp_path) -> None:
    in_memory, streamed = Recorder(), Recorder(stream_to=tmp_path, part_rows=1)
    for recorder in (in_memory, streamed):
        record_small_run(recorder)
        recorder.leap(0, 2, BatchShape((), 3, 30, 12, sampled=3), 5, [6, 7], 4, 1, 3, 0, 7, [0, 0], 0, 0, True)
    expected, found = in_memory.tables(), streamed.tables()
    assert_same_tables(found, expected, TABLES)


leap_or_plain = st.lists(st.tuples(st.sampled_from(["plain", "leap"]), st.integers(1, 5)), max_size=8)


@settings(max_examples=60, deadline=None)
@given(leap_or_plain, st.integers(1, 7), st.booleans())
def test_a_leap_gives_the_rows_of_as_many_iterations(events, part_rows, alike) -> None:
    leapt, plain = Recorder(part_rows=part_rows), Recorder()
    now, number, step, context = 0, 0, 0, 100

    def inside(i: int) -> bool:
        return alike or i % 2 == 0

    def one(recorder: Recorder, i: int) -> None:
        shape = BatchShape((), 3, context + 3 * i, 40 + step + i, 1, 3, 8)
        planned = now + 10 * i
        recorder.iteration(
            1,
            number + i,
            planned,
            planned + 2,
            planned + 10,
            shape,
            (),
            ((9, step + i, 3),),
            0,
            3,
            2,
            50 - 2 * i,
            0,
            2,
            1,
            7,
            inside(i),
        )

    for kind, k in events:
        for i in range(k):
            one(plain, i)
        if kind == "plain":
            for i in range(k):
                one(leapt, i)
        else:
            leapt.leap(
                1,
                number,
                BatchShape((), 3, context, 40 + step, 1, 3, 8),
                now,
                [now + 10 * (i + 1) for i in range(k)],
                9,
                step,
                3,
                2,
                50,
                [2] * k,
                2,
                1,
                True if alike else [inside(i) for i in range(k)],
            )
        now, number, step, context = now + 10 * k, number + k, step + k, context + 3 * k
    expected, found = plain.tables(), leapt.tables()
    assert_same_tables(found, expected, ("iterations", "stages"))


@given(st.lists(st.integers(0, 2**51 - 1), max_size=20))
def test_seconds_give_back_the_nanoseconds(times) -> None:
    assert to_ns(to_seconds(np.array(times, dtype=np.int64))).tolist() == times


@pytest.mark.parametrize(
    "column",
    [
        pa.chunked_array([[1, 2], [3]]),
        pa.chunked_array([[1, None, 3]]),
        pa.chunked_array([pa.array([True, False, True, True] * 5)[3:], [False]]),
        pa.chunked_array([pa.array(["x", None, "z", "x"])[1:], ["a"]]),
        pa.chunked_array([], pa.string()),
        pa.chunked_array([], pa.float64()),
    ],
    ids=lambda column: str(column.type),
)
def test_columns_read_straight_from_memory_are_those_of_pyarrow(column) -> None:
    found, expected = as_numpy(column), column.to_numpy()
    assert (found.dtype, repr(found.tolist())) == (expected.dtype, repr(expected.tolist()))
