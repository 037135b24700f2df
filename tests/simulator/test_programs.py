"""Programs in runs: calls come when their answers are there, in both simulators and live."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator import ReplayConfig, replay
from tests.simulator.constant_cost import ConstantCost
from tests.workloads.test_programs import tree
from workloads.generating.programs import ProgramKind, generate_programs

S = 1_000_000_000


def small(seed: int = 0):
    """Six programs of forks and joins, small enough to be worked through in a moment."""
    kind = ProgramKind(
        *("uniform:1,3", "uniform:1,3", "uniform:1,3", "fixed:8", "uniform:4,20", "uniform:1,9", "uniform:1,9"),
        tool="exponential:2",
    )
    return generate_programs(kind, programs=6, arrivals="poisson:0.2", hash_tokens=4, seed=seed)


def test_a_join_comes_when_the_last_of_its_answers_has_ended() -> None:
    """Every iteration takes 1 s: 0 ends at 2, when 5 comes by itself and is planned; 1 and 2, which come with the end
    of 0, begin at 3 and end at 5; 3 comes a second later and ends at 8, and with it comes 4."""
    done = replay(tree(), ReplayConfig(num_blocks=60), cost=ConstantCost(S))
    arrived = done.tables.column("requests", "arrival_s").tolist()
    ended = done.tables.column("requests", "finished_s").tolist()
    assert ended[:3] == [2, 5, 5]
    assert arrived[:4] == [0, 2, 2, 6]
    assert ended[3] == 8
    assert arrived[4:] == [8, 2]


@pytest.mark.parametrize("policy", ["chunked", "least_attained", "program_fcfs", "vtc"])
@pytest.mark.parametrize("seed", [0, 1])
def test_leaps_and_the_reference_agree(policy: str, seed: int) -> None:
    trace = small(seed)
    for more in ({}, {"prefix_caching": True}, {"replicas": 2, "router": "session_affinity"}):
        options = {"policy": policy, "num_blocks": 60, "block_size": 4, "max_num_seqs": 4, **more}
        runs = [replay(trace, ReplayConfig(leaps=leaps, **options), cost=ConstantCost(S)) for leaps in (True, False)]
        if policy == "chunked":
            runs.append(replay(trace, ReplayConfig(reference=True, **options), cost=ConstantCost(S)))
        for run in runs:
            assert run.tables.requests.equals(runs[0].tables.requests)
            assert run.summary["finished"] == len(trace)


def test_a_program_lasts_from_its_first_arrival_to_its_last_end() -> None:
    """p: from 0 until 4 ends, two seconds after it came at 8; row 5 belongs to none."""
    summary = replay(tree(), ReplayConfig(num_blocks=60), cost=ConstantCost(S)).summary
    assert (summary["programs"], summary["programs_finished"], summary["program_s_p99"]) == (1, 1, 10)
    sessions = replace(tree(), program=None, session=["a", "a", "a", "a", "a", "b"])
    summary = replay(sessions, ReplayConfig(num_blocks=60), cost=ConstantCost(S)).summary
    assert (summary["programs"], summary["program_s_mean"]) == (2, (10 + 2) / 2)
    failed = replace(tree(), abort_ns=np.array([-1, 1, -1, -1, -1, -1]))
    summary = replay(failed, ReplayConfig(num_blocks=60), cost=ConstantCost(S)).summary
    assert (summary["programs"], summary["programs_finished"], summary["program_s_mean"]) == (1, 0, None)


def test_nobody_starts_before_all_that_it_waits_for() -> None:
    trace = small(2)
    done = replay(trace, ReplayConfig(policy="least_attained", num_blocks=60, max_num_seqs=3), cost=ConstantCost(S))
    ended = done.tables.column_ns("requests", "finished_s")
    arrived = done.tables.column_ns("requests", "arrival_s")
    assert trace.after_row is not None
    assert trace.joins is not None
    assert trace.think_ns is not None
    for row, before in enumerate(trace.after_row.tolist()):
        if before >= 0:
            assert arrived[row] == max(ended[other] for other in (before, *trace.joins[row])) + trace.think_ns[row]


def test_a_join_also_follows_answers_that_failed() -> None:
    """A helper that gives up, or is longer than the engine allows, holds nobody up."""
    trace = replace(tree(), abort_ns=np.array([-1, 1, -1, -1, -1, -1]), prompt_tokens=np.array([8, 8, 8, 8, 8, 900]))
    done = replay(trace, ReplayConfig(num_blocks=60), cost=ConstantCost(S))
    assert done.tables.column("requests", "status").tolist()[4] == "finished"
    assert done.summary["finished"] + done.summary["aborted"] + done.summary["rejected"] == 6


def test_live_calls_come_in_the_order_of_their_programs() -> None:
    pytest.importorskip("torch")
    from executor.model.loading import load_model
    from executor.serving.replay import replay_live

    trace = tree()
    for policy in ("least_attained", "program_fcfs"):
        run = replay_live(trace, loaded=load_model("tiny", device="cpu"), policy=policy, as_fast_as_possible=True)
        ended, arrived = (run.tables.column("requests", name) for name in ("finished_s", "arrival_s"))
        assert run.summary["finished"] == 6
        assert arrived[4] >= max(ended[1], ended[3])
        assert arrived[1] >= ended[0]
        assert run.tables.column("requests", "program").tolist() == trace.program
