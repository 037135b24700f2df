"""Tenants in runs: kept by both worlds, served in turn, and measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metrics import read_run, summarise_classes, write_run
from simulator import ReplayConfig, replay
from tests.simulator.constant_cost import ConstantCost, trace_of
from workloads import Trace

S = 1_000_000_000


def three_tenants(flood: int = 30) -> Trace:
    """`flood` sends 30 requests at once; `a` and `b` send one a second."""
    rows = [(0.0, 16, 8)] * flood + [(float(at), 16, 8) for at in range(8) for _ in "ab"]
    trace = trace_of(rows)
    return replace(trace, tenant=["flood"] * flood + ["a", "b"] * 8)


@pytest.mark.parametrize("policy", ["chunked", "vtc", "weighted_fair"])
def test_both_simulators_and_leaps_keep_tenants(policy: str) -> None:
    trace = replace(three_tenants(4), program=["p", None] * 10)
    runs = [
        replay(trace, ReplayConfig(policy=policy, num_blocks=60, leaps=leaps), cost=ConstantCost(S))
        for leaps in (False, True)
    ]
    if policy == "chunked":
        runs.append(replay(trace, ReplayConfig(policy=policy, num_blocks=60, reference=True), cost=ConstantCost(S)))
    for run in runs:
        assert run.tables.column("requests", "tenant").tolist() == trace.tenant
        assert run.tables.column("requests", "program").tolist() == trace.program
        assert run.tables.requests.equals(runs[0].tables.requests)


@pytest.mark.parametrize("policy", ["vtc", "weighted_fair"])
def test_a_flood_does_not_delay_who_sends_little(policy: str) -> None:
    """Four at a time, 8 s each: behind the flood a waits for 60 s and more; with turns never for more than two rounds."""

    def longest_wait(policy: str) -> float:
        knobs = {"quantum": 32} if policy == "weighted_fair" else {}
        config = ReplayConfig(policy=policy, knobs=knobs, num_blocks=600, max_num_seqs=4)
        done = replay(three_tenants(), config, cost=ConstantCost(S))
        summaries = summarise_classes(done.tables, "tenant")
        return max(float(summaries[name]["scheduling_delay_s_max"]) for name in "ab")

    assert longest_wait("chunked") > 60
    assert longest_wait(policy) < 40


def test_a_run_folder_of_before_has_no_tenants(tmp_path: Path) -> None:
    run = replay(three_tenants(2), ReplayConfig(num_blocks=60), cost=ConstantCost(S))
    write_run(tmp_path / "run", run.tables, run.config, run.summary)
    file = tmp_path / "run/requests.parquet"
    pq.write_table(pa.table(pq.read_table(file).drop_columns(["tenant", "program"])), file)
    again = read_run(tmp_path / "run")
    assert again.column("requests", "tenant").tolist() == [None] * 18
    assert again.table("requests", ["tenant", "request"]).column_names == ["tenant", "request"]
    assert again.table("requests").schema.names == run.tables.requests.schema.names
    assert np.array_equal(again.column("requests", "output_tokens"), run.tables.column("requests", "output_tokens"))


def test_a_live_run_keeps_tenants_and_serves_in_turn() -> None:
    pytest.importorskip("torch")
    from executor.model.loading import load_model
    from executor.serving.replay import replay_live

    trace = replace(trace_of([(0, 20, 6), (0, 9, 4), (0, 9, 4)]), tenant=["x", "x", "y"], predicted_tokens=[6, 4, 4])
    loaded = load_model("tiny", device="cpu")
    for policy in ("vtc", "weighted_fair", "predicted_sjf"):
        run = replay_live(trace, loaded=loaded, policy=policy, as_fast_as_possible=True)
        assert run.tables.column("requests", "tenant").tolist() == ["x", "x", "y"]
        assert sorted(run.tables.column("requests", "output_tokens").tolist()) == [4, 4, 6]
