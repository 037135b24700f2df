"""The front end: what a client waits for before and behind the engine, worked out by hand."""

import numpy as np
import pytest

from metrics.measures.latencies import finished_latencies
from profiler.operators.engine_terms import EngineTerms
from simulator import replay
from simulator.errors import SimulationError
from simulator.replica.front_end import FrontEnd, FrontEndTimes
from workloads import Trace

MS = 1_000_000


def trace(arrivals_ms, prompts=None, outputs=None, **more):
    n = len(arrivals_ms)
    return Trace(
        "t", np.array(arrivals_ms) * MS, np.array(prompts or [16] * n), np.array(outputs or [4] * n),
        np.array(outputs or [4] * n), **more,
    )  # fmt: skip


def test_no_term_no_front_end():
    assert FrontEndTimes.of(EngineTerms()) is None


def test_requests_queue_for_one_processor_and_then_travel_at_their_own_time():
    # 2 ms a request and 0.1 ms a prompt token of the processor, 5 ms on the way: 3 requests of 10 tokens at 0, 1, 9 ms.
    front = FrontEnd(FrontEndTimes(5 * MS, 0, 2 * MS, 0.1 * MS, 0), 1)
    reached = front.into_engine(trace([0, 1, 9], prompts=[10, 10, 10])).arrival_ns
    assert reached.tolist() == [8 * MS, 11 * MS, 17 * MS]
    assert front.sent_ns == {0: 0, 1: MS, 2: 9 * MS}


def test_each_replica_has_a_processor_of_its_own():
    front = FrontEnd(FrontEndTimes(0, 0, 4 * MS, 0, 0), 2)
    assert front.into_engine(trace([0, 0, 0])).arrival_ns.tolist() == [4 * MS, 4 * MS, 8 * MS]


def test_delays_add_to_ttft_and_e2e_once_and_leave_the_gaps_alone():
    requests = trace([0, 400, 800], prompts=[64, 128, 32], outputs=[5, 9, 3])
    plain = finished_latencies(replay(requests).tables)
    served = finished_latencies(replay(requests, terms={"front_before_us": 3000, "front_after_us": 2000}).tables)
    np.testing.assert_allclose(served["ttft"], plain["ttft"] + 0.005, atol=1e-9)
    np.testing.assert_allclose(served["e2e"], plain["e2e"] + 0.005, atol=1e-9)
    np.testing.assert_allclose(served["tpot"], plain["tpot"], atol=1e-9)


def test_a_closed_loop_waits_for_the_front_end_on_both_sides():
    after, think = np.array([-1, 0, 1]), np.zeros(3, np.int64)
    loop = trace([0, 0, 0], after_row=after, think_ns=think)
    plain = replay(loop).tables
    served = replay(loop, terms={"front_before_us": 3000, "front_after_us": 2000}).tables
    ends = [max(tables.column("requests", "finished_s")) for tables in (plain, served)]
    assert ends[1] - ends[0] == pytest.approx(3 * 0.005, abs=1e-9)
    arrival, finished = served.column("requests", "arrival_s"), served.column("requests", "finished_s")
    np.testing.assert_allclose(np.sort(arrival)[1:], np.sort(finished)[:-1], atol=1e-9)


def test_a_detokeniser_slower_than_the_engine_sets_the_pace():
    # One token takes 50 ms behind the engine, whose steps take less: 20 tokens come 50 ms apart.
    served = replay(trace([0], outputs=[20]), terms={"front_token_us": 50_000})
    gaps = np.diff(np.sort(served.tables.column("tokens", "time_s")))
    np.testing.assert_allclose(gaps, 0.05, atol=1e-9)


def test_the_reference_simulator_agrees_behind_a_front_end():
    requests = trace([0, 3, 4, 90], prompts=[64, 300, 20, 8], outputs=[8, 3, 12, 2])
    terms = {"front_before_us": 700, "front_request_us": 2500, "front_token_us": 40}
    fast, plain = (replay(requests, terms=terms, reference=reference) for reference in (False, True))
    for name in ("arrival_s", "first_token_s", "finished_s"):
        assert fast.tables.column("requests", name).tolist() == plain.tables.column("requests", name).tolist()


def test_the_reference_simulator_refuses_a_closed_loop_behind_a_front_end():
    loop = trace([0, 0], after_row=np.array([-1, 0]), think_ns=np.zeros(2, np.int64))
    with pytest.raises(SimulationError, match="front end"):
        replay(loop, terms={"front_before_us": 1}, reference=True)
