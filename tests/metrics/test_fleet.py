"""Shares of devices are taken over the replicas that were there, worked out by hand on clusters."""

from __future__ import annotations

import pytest

from metrics.measures.summary import summarise
from simulator import replay
from tests.simulator.constant_cost import ConstantCost, trace_of

S = 1_000_000_000
PEAK = {"peak_flops": 1.0, "peak_bytes_per_s": 1.0}
ONE_EACH = {"iteration": 1.0}


def run(rows, stages=1, **options):
    cost = ConstantCost(S, stages=stages)
    return replay(trace_of(rows), cost=cost, num_blocks=1000, **options)


def shares(done):
    """device_busy_share, mfu and mfu_busy where each iteration is one FLOP and a device does one a second."""
    done.tables.config["peaks"] = {**done.tables.config["peaks"], **PEAK}
    done.tables.config["model_flops"] = done.tables.config["model_bytes"] = ONE_EACH
    summary = summarise(done.tables)
    return summary["device_busy_share"], summary["mfu"], summary["mfu_busy"]


def test_replicas_that_have_nothing_to_do_count():
    """One request of five iterations on four replicas: one of them is busy all the time, three never are."""
    assert shares(run([(0, 4, 5)])) == (1, 1, 1)
    assert shares(run([(0, 4, 5)], replicas=4)) == (1 / 4, 1 / 4, 1)
    # Two devices a stage do the same iterations, so each of them does half a FLOP a second.
    assert shares(run([(0, 4, 5)], replicas=4, tp=2)) == (1 / 4, 1 / 8, 1 / 2)


def test_a_pipeline_is_busy_stage_by_stage():
    """One request at a time visits two stages of a second each: each of them is busy half of the time."""
    assert shares(run([(0, 4, 5)], stages=2, pp=2)) == (1 / 2, 1 / 4, 1 / 2)


def test_a_dead_replica_counts_until_it_died():
    """Two iterations on replica 0, dead at 2.5 s; three on replica 1, from then on: 5 of 2.5 + 5.5 seconds."""
    assert shares(run([(0, 4, 5)], replicas=2, failures=("0@2.5",))) == (5 / 8, 5 / 8, 1)


def test_a_replica_that_was_added_counts_from_its_order_on():
    grow = {"most": 3, "interval_s": 1, "startup_s": 2, "queue_high": 1}
    done = run([(0, 4, 6)] * 4, max_num_seqs=1, autoscale=grow)
    cluster = done.config["cluster"]
    assert cluster["replicas"] > 1
    iterations = done.tables.rows("iterations")
    busy, mfu, mfu_busy = shares(done)
    assert mfu_busy == 1
    assert mfu == busy == pytest.approx(iterations / cluster["device_seconds"])


def test_pools_of_unequal_width_lose_device_time_each_by_its_own():
    """Two pipelines of one request each, one and two devices a stage: each stage of five busy seconds waits five."""
    pools = tuple({"role": "serve", "replicas": 1, "pp": 2, "tp": tp} for tp in (1, 2))
    done = run([(0, 4, 5)] * 2, stages=2, pools=pools)
    assert done.summary["lost_device_s"] == 2 * 5 * 1 + 2 * 5 * 2


def test_an_objective_or_warm_up_that_makes_no_sense_is_refused_before_the_run():
    from executor.config import LiveConfig
    from executor.errors import ExecutorError
    from simulator import ReplayConfig, SimulationError

    for config, refusal in ((ReplayConfig, SimulationError), (LiveConfig, ExecutorError)):
        for wrong in ({"slo": "ttft=2"}, {"slo": "chat:ttft_p99=1;chat:x=2"}, {"warmup": "soon"}, {"warmup": "-3"}):
            with pytest.raises(refusal, match="found"):
                config(**wrong)
        config(slo="chat:ttft_p99=1;batch:e2e_p99=60", warmup="auto")


def test_classes_leave_the_same_warm_up_out_as_the_whole_run(tmp_path, capsys):
    """Ten requests in turn of two classes, the first four not measured: three of each are."""
    import json
    from dataclasses import replace

    from metrics.commands import _show_by, _summary
    from simulator.commands.printing import _class_summaries

    trace = replace(trace_of([(row, 4, 5) for row in range(10)]), slo=["a", "b"] * 5)
    done = replay(trace, cost=ConstantCost(S), num_blocks=1000, warmup="4", slo="e2e_p99=9")
    assert [summary["measured"] for summary in _class_summaries({"run": done}).values()] == [3, 3]
    done.write(tmp_path / "run")
    _show_by(tmp_path / "run", "slo", "", "", True)
    assert [summary["measured"] for summary in json.loads(capsys.readouterr().out).values()] == [3, 3]
    # What one option asks for anew, the others keep.
    again = _summary(tmp_path / "run", "", "e2e_p99=1")
    assert (again["measured"], again["slo"], done.summary["measured"]) == (6, "e2e_p99=1", 6)
    assert _summary(tmp_path / "run", "2", "")["slo"] == "e2e_p99=9"


def test_of_an_iteration_that_runs_when_the_window_opens_only_the_part_inside_counts():
    """Five iterations of a second, the window opens in the middle of the third: it is busy all the time, not 3 / 2.5."""
    done = run([(0, 4, 5)])
    done.tables.config["peaks"] = {**done.tables.config["peaks"], **PEAK}
    done.tables.config["model_flops"] = ONE_EACH
    summary = summarise(done.tables, warmup="2.5s")
    assert (summary["iterations"], summary["device_busy_share"], summary["mfu"], summary["mfu_busy"]) == (3, 1, 1, 1)
