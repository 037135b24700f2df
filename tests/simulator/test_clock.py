"""Running ahead of the event queue changes nothing but the time it takes."""

from __future__ import annotations

import ast
import gc
import tomllib
from heapq import heappush
from pathlib import Path

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator
from policies.chunked import Chunked
from simulator.clock.virtual_time import Moment, VirtualTime
from simulator.config import ReplayConfig
from simulator.simulation import replay
from tests.simulator.constant_cost import ConstantCost, trace_of

S = 1_000_000_000


PRIVATE = {"_queue", "_eid", "_now", "_ok", "_value", "_defused", "_active_proc"}
"""SimPy's private names."""


def test_private_names_of_simpy_are_used_in_one_file() -> None:
    root = Path(simulator.__file__).parent
    found = {
        file.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE
    }
    assert found == {"clock/virtual_time.py"}


def test_simpy_keeps_what_the_fast_path_relies_on() -> None:
    """A queue that is a heap of (time, rank, number, event), numbered by one counter; a clock that shows its attribute;
    an event that has happened by its value and its fate; callbacks that are taken away before they are called."""
    env = simpy.Environment(5)
    assert (env._queue, env._now, env.now, next(env._eid)) == ([], 5, 5, 0)
    event, called = simpy.Event(env), []
    event.callbacks = [lambda done: called.append((done, done.callbacks))]
    event._value, event._ok, event._defused = None, True, False
    assert event.triggered
    env.schedule(event, 7, 3)
    assert env._queue == [(8, 7, 1, event)]
    heappush(env._queue, (8, 2, next(env._eid), late := simpy.Event(env)))
    late.callbacks, late._value, late._ok = [], None, True
    assert env._queue[0][3] is late
    env._now = 6
    assert env.now == 6
    env.run()
    assert (env.now, called, event.processed) == (8, [(event, None)], True)


def test_the_next_major_version_of_simpy_is_not_installed_unseen() -> None:
    project = tomllib.loads((Path(simulator.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert [entry for entry in project["project"]["dependencies"] if entry.startswith("simpy")] == ["simpy>=4.1,<5"]


def test_the_clock_moves_only_to_moments_before_the_next_event():
    env = VirtualTime()
    seen = []
    Moment(env, 10, lambda event: seen.append(env.now))
    assert not env.moved_to(10)
    assert env.moved_to(9)
    assert env.now == 9
    env.run()
    assert seen == [10]
    assert env.moved_to(1 << 60)


def test_a_run_that_stops_early_is_not_run_past():
    env = VirtualTime()
    Moment(env, 5, lambda event: seen.append(env.moved_to(7)))
    seen: list[bool] = []
    env.run(until=7)
    assert (seen, env.now) == ([False], 7)


def test_the_garbage_collector_is_left_as_it_was_found():
    before = gc.get_threshold()
    env = VirtualTime()

    def fail(event):
        assert gc.get_threshold() != before
        raise RuntimeError("stop")

    Moment(env, 1, fail)
    with pytest.raises(RuntimeError):
        env.run()
    assert gc.get_threshold() == before


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12),
    st.sampled_from([("chunked", {}), ("vllm_v1", {}), ("vllm_v1", {"async_scheduling": True})]),
    st.integers(1, 3),
    st.integers(26, 60),
)
@settings(max_examples=100, deadline=None)
def test_pipelines_and_planning_ahead_write_the_very_tables_of_the_plain_path(rows, policy, stages, num_blocks):
    """Whole seconds everywhere: arrivals, completions and time-outs often fall on the same moment."""
    name, knobs = policy
    if knobs:
        stages = 1
    at, requests = 0, []
    for gap, prompt, output in rows:
        at += gap
        requests.append((at, prompt, output))
    trace = trace_of(requests).with_timeout(60)
    cost = ConstantCost(S, before_ns=S, transfer_ns=S, stages=stages)
    tables = []
    for leaps in (True, False):
        config = ReplayConfig(policy=name, knobs=knobs, pp=stages, num_blocks=num_blocks, block_size=4, leaps=leaps)
        tables.append(replay(trace, config, cost=cost).tables)
    for table in ("requests", "iterations", "tokens", "segments", "stages"):
        one, other = (repr(each.table(table).to_pydict()) for each in tables)
        assert one == other, table


def test_a_pipeline_asks_the_policy_only_when_something_has_changed(monkeypatch):
    asked = []
    plan = Chunked.plan
    monkeypatch.setattr(Chunked, "plan", lambda self, *given: (asked.append(1), plan(self, *given)))
    trace = trace_of([(0, 8, 100), (0, 8, 100)])
    run = replay(trace, ReplayConfig(policy="chunked", pp=2, num_blocks=200), cost=ConstantCost(S, stages=2))
    assert run.tables.rows("iterations") > 100 > 3 * len(asked)
