"""Whether a simulated vLLM plans ahead of the running batch, and that its run says so."""

from __future__ import annotations

import pytest

from simulator.simulation import replay
from tests.simulator.constant_cost import ConstantCost, trace_of

S = 1_000_000_000
COST = ConstantCost(device_ns=S, before_ns=S // 2)
TRACE = trace_of([(0, 4, 11)])


def run(**options):
    return replay(TRACE, cost=COST, policy="vllm_v1", num_blocks=100, **options)


def test_on_a_gpu_it_does_by_default_and_says_so():
    result = run()
    assert result.summary["e2e_s_max"] == 11.5, "half a second of host time a step is hidden behind the step before"
    assert result.config["ahead"] is True
    assert "policy vllm_v1: plans ahead of the running batch, as version 0.32 does; --sync does not" in result.notes


@pytest.mark.parametrize("knobs", [{"engine_version": "0.13"}, {"async_scheduling": False}])
def test_before_0_14_and_where_it_is_told_not_to_it_does_not(knobs):
    result = run(knobs=knobs)
    assert (result.summary["e2e_s_max"], result.config["ahead"]) == (16.5, False)
    assert not any("plans ahead" in note for note in result.notes)


def test_on_a_cpu_it_does_not(tmp_path):
    device = tmp_path / "host.toml"
    device.write_text('base = "h100"\nprocessor = "cpu"\n', "utf-8")
    assert run(gpu=str(device)).summary["e2e_s_max"] == 16.5


def test_in_a_pipeline_it_does_not_and_says_what_is_missing():
    result = replay(TRACE, cost=ConstantCost(device_ns=S, stages=2), policy="vllm_v1", num_blocks=100, pp=2)
    assert result.config["ahead"] is False
    assert any(
        "from 0.16 on the engine also plans ahead in pipelines, which is not simulated" in x for x in result.notes
    )
