"""Programs: trees of calls with waits and joins, read and generated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.shared_data import DATA
from workloads import Trace, TraceError, read_trace
from workloads.follow_ups import FollowUps
from workloads.generating.programs import PROGRAMS, ProgramKind, generate_programs
from workloads.write import write_trace

NS = 1_000_000_000


def tree() -> Trace:
    """Row 0 forks 1 and 2; 3 follows 2; 4 joins 1 and 3; 5 is nobody's."""
    return Trace(
        "tree",
        np.array([0, 0, 0, 1, 1, 2]) * NS,
        np.full(6, 8),
        np.full(6, 2),
        np.full(6, 2),
        after_row=np.array([-1, 0, 0, 2, 3, -1]),
        joins=[(), (), (), (), (1,), ()],
        think_ns=np.array([0, 0, 0, 1, 0, 0]) * NS,
        program=["p", "p", "p", "p", "p", None],
    )


def test_a_join_waits_for_all_of_its_answers() -> None:
    for ends in ([0, 2, 3, 1], [0, 1, 2, 3]):
        follow = FollowUps(tree())
        freed = [list(follow.free(row)) for row in ends]
        assert freed[0] == [1, 2]
        assert freed[-1] == [4]
        assert [row for rows in freed for row in rows] == [1, 2, 3, 4]
    assert FollowUps(tree()).waiting() == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("after", "joins"), [([-1, -1, -1], [(), (), (0,)]), ([-1, 0, 1], [(), (), (2,)]), ([-1, 0, 1], [(), (), (1,)])]
)
def test_joins_that_cannot_be_are_refused(after: list[int], joins: list[tuple[int, ...]]) -> None:
    three = np.ones(3)
    with pytest.raises(TraceError, match="column joins: found"):
        Trace("t", np.zeros(3), three, three, three, after_row=np.array(after), think_ns=np.zeros(3), joins=joins)


def test_a_part_of_a_program_keeps_what_it_can() -> None:
    part = tree().take(np.array([1, 3, 4]))
    assert part.after_row is not None
    assert part.after_row.tolist() == [-1, -1, 1]
    assert part.joins == [(), (), (0,)]
    without_3 = tree().take(np.array([0, 1, 4]))
    assert without_3.after_row is not None
    assert (without_3.after_row.tolist(), without_3.joins) == ([-1, 0, 1], [(), (), ()])


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_programs_are_written_and_read_back(tmp_path: Path, ending: str) -> None:
    again = read_trace(write_trace(tree(), tmp_path / f"t{ending}"))
    assert again.joins is not None
    assert replace(again, joins=[tuple(row) for row in again.joins]).same_requests(tree())


def test_a_join_of_a_later_row_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,after_row,joins\n0,5,5,-1,\n1,5,5,0,2\n2,5,5,0,1\n")
    with pytest.raises(TraceError, match=r"row 2 \(line 3\), column 'joins': expected earlier rows, counted from 0"):
        read_trace(path)


def bailian(path: Path) -> Path:
    """Two chats: 1 -> 2 -> 4, and 3; 5 answers a call that is not there."""
    rows = [(1, -1, 0.5), (2, 1, 10.25), (3, -1, 11), (4, 2, 31.5), (5, 99, 40)]
    lines = [
        {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": at,
            "input_length": 40,
            "output_length": 7,
            "type": "text",
            "turn": 1,
            "hash_ids": [1, 2, chat],
        }
        for chat, parent, at in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_calls_that_name_their_parents_are_sessions(tmp_path: Path) -> None:
    trace = read_trace(bailian(tmp_path / "qwen.jsonl"))
    assert trace.source_format == "bailian"
    assert trace.arrival_ns.tolist() == [NS // 2, 41 * NS // 4, 11 * NS, 63 * NS // 2, 40 * NS]
    assert trace.session == ["1", "1", "3", "1", "5"]
    assert trace.turn is not None
    assert trace.turn.tolist() == [0, 1, 0, 2, 0]
    assert trace.hash_tokens == 16
    assert any("1 calls name a parent that does not come before them" in note for note in trace.notes)
    assert not any("Not used" in note for note in trace.notes)


def test_closed_a_call_waits_for_its_parent(tmp_path: Path) -> None:
    trace = read_trace(bailian(tmp_path / "qwen.jsonl"), sessions="closed")
    assert trace.after_row is not None
    assert trace.think_ns is not None
    assert trace.after_row.tolist() == [-1, 0, -1, 1, -1]
    assert (trace.think_ns / NS).tolist() == [0, 9.75, 0, 21.25, 0]


def test_two_answers_to_one_call_both_wait_for_it(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "call_id,parent_call_id,arrival_s,prompt_tokens,output_tokens\na,,0,5,5\nb,a,1,5,5\nc,a,2,5,5\nd,b,3,5,5\n"
    )
    trace = read_trace(path, sessions="closed")
    assert trace.after_row is not None
    assert trace.after_row.tolist() == [-1, 0, 0, 1]
    assert trace.session == ["a"] * 4


def test_a_chat_id_without_parents_is_a_session(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("chat_id,arrival_s,prompt_tokens,output_tokens\na,0,5,5\na,1,5,5\n")
    assert read_trace(path).session == ["a", "a"]


def test_a_delay_counts_from_the_sessions_last_answer(tmp_path: Path) -> None:
    """aiperf's form: a first turn has a timestamp in ms, later ones a delay in ms."""
    turns = [
        {"session_id": "a", "timestamp": 1000, "input_length": 9, "output_length": 2},
        {"session_id": "a", "delay": 1500, "input_length": 20, "output_length": 2},
        {"session_id": "a", "delay": 250, "input_length": 30, "output_length": 2},
        {"session_id": "b", "timestamp": 2000, "input_length": 9, "output_length": 2},
        {"session_id": "b", "delay": 0, "input_length": 19, "output_length": 2},
    ]
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    trace = read_trace(path)
    assert trace.session == ["a", "b", "b", "a", "a"]
    assert trace.after_row is not None
    assert trace.after_row.tolist() == [-1, -1, 1, 0, 3]
    assert trace.think_ns is not None
    assert (trace.think_ns[[2, 3, 4]] / NS).tolist() == [0, 1.5, 0.25]
    assert (trace.arrival_ns / NS).tolist() == [1, 2, 2, 2.5, 2.75]
    path.write_text(path.read_text() + '{"session_id": "c", "delay": 5, "input_length": 9, "output_length": 2}\n')
    with pytest.raises(TraceError, match=r"row 6 .*expected a time, or a delay and an earlier row of its session"):
        read_trace(path)


def agent(path: Path, name: str = "s", **more: object) -> Path:
    calls = [
        {"t": 0.0, "in": 130, "out": 5, "hash_ids": [1, 2, 3], "think_time": 0.0, "api_time": 2.0},
        {"t": 6.0, "in": 200, "out": 7, "hash_ids": [1, 2, 3, 4], "think_time": 4.0, "api_time": 3.0},
        {"t": 20.0, "in": 300, "out": 0, "hash_ids": [1, 2, 3, 4, 5], "think_time": 11.0},
        {"t": 30.0, "in": 300, "out": 9, "hash_ids": [1, 2, 3, 4, 5], "think_time": 1.0} | more,
    ]
    content = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": calls}
    file = path / f"{name}.json"
    file.write_text(json.dumps(content))
    return file


def test_agents_sessions_are_closed_loops_with_blocks_of_their_own(tmp_path: Path) -> None:
    agent(tmp_path, "x")
    agent(tmp_path, "y")
    trace = read_trace(tmp_path, sessions="closed")
    assert trace.source_format == "agent_sessions"
    assert len(trace) == 6
    assert trace.think_ns is not None
    first = [row for row, name in enumerate(trace.session or ()) if name == "x"]
    # The last call comes after one that failed: 30 - 6 - 3 s after the answer before.
    assert (trace.think_ns[first] / NS).tolist() == [0, 4, 21]
    assert trace.hash_tokens == 64
    assert trace.prefix_hashes is not None
    assert len({block for row in first for block in trace.prefix_hashes[row]}) == 5
    assert len({block for row in trace.prefix_hashes for block in row}) == 10
    assert "2 calls left out: they failed (no output tokens)." in trace.notes
    as_recorded = read_trace(tmp_path / "x.json")
    assert (as_recorded.arrival_ns / NS).tolist() == [0, 6, 30]
    assert not as_recorded.closed_loop


def test_agents_begin_by_an_arrival_process(tmp_path: Path) -> None:
    for name in "abcd":
        agent(tmp_path, name)
    trace = read_trace(tmp_path, sessions="closed", arrivals="uniform:0.1")
    assert trace.after_row is not None
    assert (trace.arrival_ns[trace.after_row < 0] / NS).tolist() == [0, 10, 20, 30]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"in": 0}, "call 4, in: found 0, expected a whole number from 1"),
        ({"t": 1.0}, "call 4, t: found 1, expected a time not before the call above"),
        ({"hash_ids": [1] * 9}, "call 4, hash_ids: found 9, expected at most one per 64 prompt tokens"),
        ({"requests": []}, "call 4: found calls within a call, expected one call; sub-agents are not read"),
    ],
)
def test_a_session_that_makes_no_sense_is_refused(tmp_path: Path, more: dict[str, object], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_trace(agent(tmp_path, **more))


def test_the_recorded_sessions_are_read_whole() -> None:
    folder = DATA / "traces/agentic"
    if not folder.is_dir():
        pytest.skip("the recorded sessions are not here")
    trace = read_trace(folder, sessions="closed")
    assert (len(trace), len(set(trace.session or ()))) == (1245, 28)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_generated_programs_are_trees_whose_prompts_hold_what_was_said(kind: str) -> None:
    trace = generate_programs(kind, programs=12, arrivals="poisson:1", seed=3)
    assert trace.after_row is not None
    assert trace.turn is not None
    assert trace.program is not None
    assert trace.session is not None
    assert len(set(trace.program)) == 12
    roots = np.flatnonzero(trace.after_row < 0)
    assert len(roots) == 12
    last: dict[str | None, int] = {}
    for row, name in enumerate(trace.session):
        before = trace.after_row[row]
        assert before < 0 or trace.program[before] == trace.program[row]
        if (earlier := last.get(name)) is not None:
            assert trace.prompt_tokens[row] >= trace.prompt_tokens[earlier] + trace.output_tokens[earlier]
            assert trace.prefix_hashes is not None
            shared = trace.prefix_hashes[earlier]
            assert trace.prefix_hashes[row][: len(shared)] == shared
        last[name] = row
    again = generate_programs(kind, programs=12, arrivals="poisson:1", seed=3)
    assert again.same_requests(trace)


def test_a_fork_and_its_join_by_hand() -> None:
    """Two rounds, three helpers of two calls: the second round waits for all three, and reads their answers."""
    kind = ProgramKind("fixed:2", "fixed:3", "fixed:2", "fixed:32", "fixed:10", "fixed:5", "fixed:4", "fixed:1")
    trace = generate_programs(kind, programs=1, arrivals="burst", hash_tokens=16)
    assert len(trace) == 1 + 3 * 2 + 1
    assert trace.joins is not None
    assert trace.after_row is not None
    ends = {int(trace.after_row[7]), *trace.joins[7]}
    assert ends == {4, 5, 6}
    # 32 + 10; a helper's second call has 42 + 4 + 5; the main agent reads its own 4 and three answers of 4.
    assert trace.prompt_tokens.tolist() == [42, 42, 42, 42, 51, 51, 51, 42 + 4 + 12]
    assert (trace.arrival_ns / NS).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert trace.prefix_hashes is not None
    assert [trace.prefix_hashes[row][:2] for row in range(8)] == [(0, 1)] * 8
    assert len({block for row in trace.prefix_hashes for block in row[2:]}) == 3 + 1


def test_a_limit_of_context_ends_an_agent() -> None:
    trace = generate_programs("agent", programs=8, arrivals="burst", context_limit=60_000, seed=1)
    assert (trace.prompt_tokens + trace.output_tokens).max() <= 60_000
    with pytest.raises(TraceError, match="expected a higher context_limit"):
        generate_programs("agent", programs=1, context_limit=100)
