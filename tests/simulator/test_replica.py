"""The simulated engine against hand-worked times, and its leaps against the plain path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import Recorder
from policies import BatchShape
from simulator.config import ReplayConfig
from simulator.simulation import Engine, replay, simulate
from tests.simulator.constant_cost import ConstantCost, trace_of

S = 1_000_000_000


def run(trace, cost, policy="chunked", **options):
    knobs = options.pop("knobs", {})
    config = ReplayConfig(policy=policy, knobs=knobs, num_blocks=options.pop("num_blocks", 1000), **options)
    return replay(trace, config, cost=cost)


def contents(tables, name):
    """A table as text: NaN equals NaN there."""
    return {column: repr(values) for column, values in tables.table(name).to_pydict().items()}


def test_one_request_takes_one_iteration_per_token():
    """A prompt of 5 in chunks of 2 takes 3 iterations, the third gives the first token; 3 more tokens, 3 more."""
    result = run(trace_of([(0, 5, 4)]), ConstantCost(device_ns=S), knobs={"chunk_size": 2})
    summary = result.summary
    assert (summary["iterations"], summary["ttft_s_max"], summary["e2e_s_max"]) == (6, 3.0, 6.0)
    assert summary["tbt_s_mean"] == summary["tpot_s_mean"] == 1.0


def test_host_time_is_charged_before_and_after_the_device():
    cost = ConstantCost(device_ns=S, before_ns=S // 4, after_ns=S // 2)
    result = run(trace_of([(0, 4, 2)]), cost)
    column = result.tables.column
    assert column("iterations", "start_s").tolist() == [0.25, 2.0]
    assert column("iterations", "end_s").tolist() == [1.75, 3.5]


def test_an_arrival_in_the_middle_of_an_iteration_waits_for_its_end():
    """The first request decodes alone from 1 s on; one arriving at 3.5 s is planned at 4 s, one at 5 s at 5 s."""
    result = run(trace_of([(0, 4, 100), (3.5, 4, 2), (5, 4, 2)]), ConstantCost(device_ns=S))
    assert result.tables.column("requests", "admitted_s")[np.argsort(result.tables.column("requests", "request"))][
        1:
    ].tolist() == [4.0, 5.0]


def test_planning_one_step_ahead_hides_the_host():
    """0.5 s of host time a step costs 1.5 s an iteration in turn, 1 s when the next step is planned meanwhile."""
    cost = ConstantCost(device_ns=S, before_ns=S // 2)
    in_turn = run(trace_of([(0, 4, 11)]), cost, policy="vllm_v1", knobs={"async_scheduling": False})
    ahead = run(trace_of([(0, 4, 11)]), cost, policy="vllm_v1", knobs={"async_scheduling": True})
    assert in_turn.summary["e2e_s_max"] == 16.5
    assert ahead.summary["e2e_s_max"] == 11.5
    assert ahead.summary["iterations"] == 11


def test_a_request_that_can_never_run_is_rejected_with_its_reason():
    result = run(trace_of([(0, 30, 3), (0, 400, 3)]), ConstantCost(device_ns=S), num_blocks=10)
    summary = result.summary
    assert (summary["requests"], summary["finished"], summary["rejected"]) == (2, 1, 1)
    reasons = set(result.tables.column("requests", "reason")) - {""}
    assert reasons == {"needs 26 KV blocks, the pool has 10, 1 of them kept free by the watermark"}


def test_a_client_that_gives_up_frees_its_blocks():
    trace = trace_of([(0, 16, 500), (0, 16, 3)]).with_timeout(5.5)
    result = run(trace, ConstantCost(device_ns=S))
    summary = result.summary
    assert (summary["finished"], summary["aborted"]) == (1, 1)
    tables = result.tables
    aborted = tables.column("requests", "status") == "aborted"
    assert tables.column("requests", "output_tokens")[aborted].tolist() == [5]
    assert tables.column("requests", "finished_s")[aborted].tolist() == [5.5]


def test_the_same_config_gives_the_same_values():
    trace = trace_of([(0.3 * i, 20 + 7 * i % 50, 5 + i % 9) for i in range(40)])
    one, two = (run(trace, ConstantCost(device_ns=S, per_row_ns=1000)) for _ in range(2))
    assert contents(one.tables, "iterations") == contents(two.tables, "iterations")
    assert one.summary == two.summary


@st.composite
def workloads(draw):
    rows = draw(st.lists(st.tuples(st.floats(0, 12), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12))
    at = 0.0
    requests = []
    for gap, prompt, output in rows:
        at += gap
        requests.append((at, prompt, output))
    return trace_of(requests)


@given(
    workloads(),
    st.sampled_from(["prefill_priority", "chunked", "decode_maximal", "dynamic_chunk", "vllm_v1"]),
    st.integers(10, 60),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_a_leaping_run_writes_the_very_tables_of_a_plain_one(trace, policy, num_blocks, impatient, leaving):
    if impatient:
        trace = trace.with_timeout(9.7)
    cost = (Leaving if leaving else ConstantCost)(
        device_ns=S // 3, per_row_ns=1_000_003, per_context_ns=10_007, after_ns=777
    )
    tables = []
    for leaps in (True, False):
        config = ReplayConfig(policy=policy, num_blocks=num_blocks, block_size=4, leaps=leaps)
        tables.append(replay(trace, config, cost=cost).tables)
    for name in ("requests", "iterations", "tokens", "segments", "stages"):
        assert contents(tables[0], name) == contents(tables[1], name), name


class Leaving(ConstantCost):
    """Chunks leave something to the three steps after them."""

    def aftermath(self, shape: BatchShape) -> list[int]:
        return [10_000_000, 20_000_000, 1_000_000 * shape.prefill_tokens]


def test_what_chunks_leave_is_paid_by_the_decodes_after_them():
    # One prompt of 40 tokens, then 6 decodes: the first three pay 40, 20 and 10 ms more than a second.
    run_of_one = run(trace_of([(0, 40, 7)]), Leaving(device_ns=S)).tables
    device = run_of_one.column("iterations", "device_s")
    assert device.tolist() == [1.0, 1.04, 1.02, 1.01, 1.0, 1.0, 1.0]


def test_leaps_do_happen():
    """Otherwise the test above would compare the plain path with itself."""
    config = ReplayConfig(num_blocks=1000)
    trace = trace_of([(0, 4, 500)])
    calls = []

    class Watched(ConstantCost):
        def repeat_ns(self, shape: BatchShape, steps: int, stage: int = 0):
            calls.append(steps)
            return super().repeat_ns(shape, steps, stage)

    cost = Watched(device_ns=S)
    from policies import make_policy

    recorder = Recorder()
    simulate(trace, Engine(make_policy("chunked"), cost, 1000, 504, config), recorder)
    assert calls == [499]
    assert recorder.tables().rows("iterations") == 500


def test_an_unknown_option_is_refused():
    with pytest.raises(ValueError, match="no knob 'chunksize'"):
        run(trace_of([(0, 4, 5)]), ConstantCost(device_ns=S), knobs={"chunksize": 3})


def test_a_request_beyond_the_models_positions_is_rejected_unless_a_longer_context_is_allowed():
    """LLaMA-2 has 4,096 positions; a decode pool would meet the second request only after its prompt."""
    trace = trace_of([(0, 10_000, 100), (0, 4_000, 100), (1, 3_000, 100)])
    for pools in ((), ({"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 1})):
        bounded = run(trace, ConstantCost(S), model="llama-2-7b", pools=pools)
        assert bounded.tables.frame("requests")["status"].tolist() == ["rejected", "rejected", "finished"]
        reason = bounded.tables.column("requests", "reason")[0]
        assert "10100 tokens, more than the longest allowed 4096 (positions of the model; --max-model-len" in reason
        assert (
            run(trace, ConstantCost(S), model="llama-2-7b", pools=pools, max_model_len=20_000).summary["rejected"] == 0
        )
