"""Conversations: turns wait for answers, prompts carry the history, shared beginnings are known."""

from pathlib import Path

import numpy as np
import pytest

from workloads import Trace, TraceError, generate, read_trace
from workloads.generating.sessions import closed, conversations, with_history

NS = 1_000_000_000


def turns_of_two_sessions() -> Trace:
    """Session 0 arrives at 5 s with two turns of 10 + 3 and 20 + 4 tokens, session 1 at 1 s with one of 7 + 2."""
    return Trace("two", np.array([1, 5, 5]) * NS, np.array([7, 10, 20]), np.array([2, 3, 4]), np.array([2, 3, 4]))


def test_a_conversation_worked_by_hand() -> None:
    trace = conversations(turns_of_two_sessions(), np.array([1, 2]), np.array([9, 9, 2]) * NS, hash_tokens=4)
    assert trace.arrival_ns.tolist() == [1 * NS, 5 * NS, 7 * NS]
    assert trace.prompt_tokens.tolist() == [7, 10, 10 + 3 + 20]
    assert trace.session == ["s0", "s1", "s1"]
    assert trace.turn.tolist() == [0, 0, 1]
    assert trace.after_row.tolist() == [-1, -1, 1]
    assert trace.think_ns.tolist() == [0, 0, 2 * NS]
    assert [trace.request(row).prefix_hashes for row in range(3)] == [(0,), (1, 2), (1, 2, 3, 4, 5, 6, 7, 8)]
    assert trace.closed_loop


def test_sessions_end_within_the_context_limit() -> None:
    trace = conversations(turns_of_two_sessions(), np.array([1, 2]), np.zeros(3, np.int64), context_limit=36)
    assert trace.prompt_tokens.tolist() == [7, 10]
    assert trace.notes == ("1 turns left out: prompt and answer would exceed 36 tokens.",)
    with pytest.raises(TraceError, match="no turn within 8 tokens"):
        conversations(turns_of_two_sessions(), np.array([1, 2]), np.zeros(3, np.int64), context_limit=8)


def test_generated_sessions_are_consistent() -> None:
    trace = generate(
        requests=200, arrivals="poisson:2", prompt="uniform:5,50", output="uniform:1,9", turns="geometric:3", seed=4
    )
    assert len(trace) / 200 == pytest.approx(3, rel=0.2)
    rows = np.flatnonzero(trace.after_row >= 0)
    before = trace.after_row[rows]
    assert (trace.turn[rows] == trace.turn[before] + 1).all()
    new = trace.prompt_tokens[rows] - trace.prompt_tokens[before] - trace.output_tokens[before]
    assert new.min() >= 5
    assert new.max() <= 50
    assert (trace.arrival_ns[rows] == trace.arrival_ns[before] + trace.think_ns[rows]).all()
    for row in rows[:50].tolist():
        shorter = trace.request(int(trace.after_row[row])).prefix_hashes
        longer = trace.request(row).prefix_hashes
        assert longer[: len(shorter)] == shorter
        assert len(longer) == trace.prompt_tokens[row] // 16
        assert trace.session[row] == trace.session[trace.after_row[row]]


BURST = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
0,a,4,ChatGPT,100,10,110,Conversation log
1,b,1,ChatGPT,50,5,55,Conversation log
6,a,3,ChatGPT,130,20,150,Conversation log
7,,3,ChatGPT,9,9,18,API log
7.5,a,3,ChatGPT,160,20,180,Conversation log
"""


@pytest.fixture
def burst(tmp_path: Path) -> Path:
    path = tmp_path / "burst.csv"
    path.write_text(BURST)
    return path


def test_recorded_sessions_can_be_closed(burst: Path) -> None:
    """Row a/1 comes 6 - 0 - 4 = 2 s after the answer to a/0; a/2 came before that answer had ended, so at once."""
    trace = read_trace(burst, sessions="closed")
    assert trace.session == ["a", "b", "a", "a", None]
    assert trace.arrival_ns.tolist() == [0, NS, 2 * NS, 2 * NS, 7 * NS]
    assert trace.after_row.tolist() == [-1, -1, 0, 2, -1]
    assert trace.think_ns.tolist() == [0, 0, 2 * NS, 0, 0]
    assert trace.prompt_tokens.tolist() == [100, 50, 130, 160, 9]
    assert trace.notes[-1].startswith("2 of 5 requests wait")


def test_recorded_sessions_stay_open_unless_asked(burst: Path) -> None:
    trace = read_trace(burst)
    assert not trace.closed_loop
    assert trace.arrival_ns.tolist() == [0, NS, 6 * NS, 7 * NS, 15 * NS // 2]


def test_history_is_added_where_prompts_hold_new_tokens_only(burst: Path) -> None:
    trace = closed(with_history(read_trace(burst)))
    assert trace.prompt_tokens.tolist() == [100, 50, 100 + 10 + 130, 9, 240 + 20 + 160]
    assert "upper bound" in trace.notes[-1]


def test_closing_needs_sessions_and_recorded_times(burst: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    with pytest.raises(TraceError, match="no session column"):
        read_trace(path, sessions="closed")
    with pytest.raises(TraceError, match="closed sessions and an arrival process"):
        read_trace(burst, sessions="closed", arrivals="burst")


def test_cutting_a_closed_loop_keeps_what_waits_for_kept_rows(burst: Path) -> None:
    trace = read_trace(burst, sessions="closed")
    assert trace.head(3).after_row.tolist() == [-1, -1, 0]
    late = trace.between(1, 10)
    assert late.after_row.tolist() == [-1, -1, 1, -1]
    assert late.arrival_ns.tolist() == [0, NS, NS, 6 * NS]
    assert trace.scaled(2).think_ns.tolist() == [0, 0, NS, 0, 0]


def test_timeouts_move_with_arrivals(burst: Path) -> None:
    trace = read_trace(burst, timeout_s=3).scaled(2)
    assert trace.arrival_ns[2] == 3 * NS
    assert [trace.timeout_ns(row) for row in range(5)] == [3 * NS] * 5
    assert trace.with_timeout(1).abort_ns[2] == 4 * NS
