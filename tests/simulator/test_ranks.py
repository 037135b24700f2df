"""Ranks of a replica: together they start each step and end with the slowest; apart they are engines of their own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import Recorder, read_run, summarise, write_run
from metrics.drawing.perfetto import write_timeline
from metrics.drawing.pipeline_figures import gantt
from metrics.measures.bubble_causes import HOST, RANK
from metrics.measures.ranks import rank_rows
from metrics.pipelines.bubbles import find_bubbles
from metrics.run_folder.columns import TABLES, schema
from policies import BatchShape
from profiler.operators.named_engines import engine_flags
from profiler.operators.scaled_phases import scaled
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.replica.fast_costs import form_of_ranks
from simulator.replica.rank_group import DUMMY, shapes_of_step
from simulator.simulation import make_cluster_plan, replay, simulate
from tests.simulator.constant_cost import ConstantCost, trace_of
from tests.simulator.test_reference import assert_same

S = 1_000_000_000


@dataclass
class Exchanging(ConstantCost):
    """Ranks that meet: each pays for its own rows, and all pay for the rows of all."""

    exchange_ns: int = 0
    ranks: int = 2
    graph_rows: int = 0

    def ranks_ns(self, shapes: list[BatchShape]) -> list[int]:
        everybody = sum(shape.rows for shape in shapes)
        return [self.stage_ns(shape) + self.exchange_ns * everybody for shape in shapes]


def run(rows: list[tuple[float, int, int]], cost: ConstantCost, **options: Any) -> Any:
    config = {"policy": "chunked", "num_blocks": 400, "block_size": 4, "dp": 2, "rank_router": "round_robin", **options}
    return replay(trace_of(rows), ReplayConfig(**config), cost=cost).tables


def test_a_step_starts_together_and_ends_with_its_slowest_rank():
    # 1 s and 0.1 s a row: rank 0 prefills 20 rows in 3 s, rank 1 waits for it with its 5 rows (1.5 s). Then both decode
    # one row, 1.1 s a step; rank 1 has had its two tokens and runs a dummy row beside rank 0's last step.
    cost = Exchanging(device_ns=S, per_row_ns=S // 10)
    tables = run([(0.0, 20, 3), (0.0, 5, 2)], cost)
    rows = tables.iterations.to_pandas().sort_values(["rank", "iteration"])
    assert rows["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    assert rows["start_s"].tolist() == pytest.approx([0.0, 3.0, 4.1] * 2)
    assert rows["end_s"].tolist() == pytest.approx([3.0, 4.1, 5.2] * 2)
    assert rows["device_s"].tolist() == pytest.approx([3.0, 1.1, 1.1, 1.5, 1.1, 1.1])
    assert rows["dummy_tokens"].tolist() == [0, 0, 0, 0, 0, 1]
    requests = tables.requests.to_pandas()
    assert requests["rank"].tolist() == [0, 1]
    assert requests["first_token_s"].tolist() == pytest.approx([3.0, 3.0])
    assert requests["finished_s"].tolist() == pytest.approx([5.2, 4.1])


def test_waiting_for_a_slower_rank_is_a_bubble_with_a_cause_of_its_own(tmp_path):
    # As above, with a host that takes 0.25 s after each step: rank 1 waits for 1.5 s of its three steps' 5.2 s.
    cost = Exchanging(device_ns=S, per_row_ns=S // 10, after_ns=S // 4)
    tables = run([(0.0, 20, 3), (0.0, 5, 2)], cost)
    first, second = find_bubbles(tables).gaps
    assert (first.rank, second.rank) == (0, 1)
    assert second.cause_ns[:, RANK].tolist() == [15 * S // 10, 0, 0]
    assert first.cause_ns[:, RANK].sum() == 0
    assert second.cause_ns[:, HOST].tolist() == first.cause_ns[:, HOST].tolist() == [S // 4] * 3
    fast, slow = rank_rows(tables)
    assert (slow["waiting_s"], slow["dummy_steps"], slow["tokens"]) == (1.5, 1, 6)
    assert slow["waiting_share"] == pytest.approx(1.5 / 5.2)
    assert fast["waiting_s"] == 0
    summary = summarise(tables)
    assert summary["rank_waiting_share"] == pytest.approx(1.5 / 10.4)
    assert summary["rank_waiting_share_max"] == pytest.approx(1.5 / 5.2)
    assert summary["bubble_share_rank"] == pytest.approx(1.5 / (2 * 5.95))
    assert summary["rank_dummy_share"] == pytest.approx(1 / 6)
    assert summary["rank_imbalance"] == pytest.approx(22 / 14)
    # A track a rank in the timeline, a row a rank in the Gantt chart.
    events = json.loads(write_timeline(tmp_path / "timeline.json", tables).read_text())["traceEvents"]
    tracks = [event["args"]["name"] for event in events if event.get("name") == "thread_name"]
    assert tracks == ["rank 0 stage 0", "rank 1 stage 0"]
    slices = [(event["tid"], event["name"]) for event in events if event["ph"] == "B"]
    assert slices.count((2, "bubble: waiting for a rank")) == 1
    assert slices.count((2, "dummy")) == 1
    axes = gantt({"run": tables}, {"run": find_bubbles(tables)}).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]


def test_the_cost_of_an_exchange_is_asked_for_all_ranks_at_once():
    # 25 rows are exchanged in the first step: 3 s + 2.5 s; 2 in the next, a dummy's among them: 1.1 s + 0.2 s.
    cost = Exchanging(device_ns=S, per_row_ns=S // 10, exchange_ns=S // 10)
    tables = run([(0.0, 20, 2), (0.0, 5, 1)], cost)
    assert tables.column("requests", "finished_s").tolist() == pytest.approx([6.8, 5.5])


def test_ranks_in_captured_graphs_run_the_rows_of_the_largest():
    small, large = BatchShape(((3, 0),), 1, 9, 9), BatchShape((), 12, 90, 9)
    assert [shape.rows for shape in shapes_of_step([small, large, None], 16)] == [12, 12, 12]
    assert [shape.executed_rows for shape in shapes_of_step([small, large, None], 16)] == [12, 0, 12]
    assert shapes_of_step([small, large, None], 8) == [small, large, DUMMY]


def test_an_arrival_at_an_idle_rank_waits_for_the_next_step():
    # Rank 0 decodes 1.1 s a step from 1.5 s on; what reaches rank 1 at 2.0 s starts with the step at 2.6 s.
    cost = Exchanging(device_ns=S, per_row_ns=S // 10)
    tables = run([(0.0, 5, 9), (2.0, 10, 1)], cost)
    assert tables.column("requests", "admitted_s").tolist() == pytest.approx([0.0, 2.6])
    assert tables.column("requests", "first_token_s").tolist() == pytest.approx([1.5, 4.6])


def test_ranks_of_a_dense_model_are_engines_of_their_own():
    trace = trace_of([(row / 3, 5 + row % 30, 1 + row % 20) for row in range(40)])
    cost = ConstantCost(S // 20, per_row_ns=S // 400)
    shared = {"policy": "chunked", "num_blocks": 60, "block_size": 4}
    ranks = ReplayConfig(dp=3, rank_router="least_kv", **shared)
    replicas = ReplayConfig(replicas=3, router="least_kv", **shared)
    apart, alike = (replay(trace, config, cost=cost).tables for config in (ranks, replicas))
    for name in ("admitted_s", "first_token_s", "finished_s"):
        assert apart.column("requests", name).tolist() == alike.column("requests", name).tolist()
    assert apart.column("requests", "rank").tolist() == alike.column("requests", "replica").tolist()
    assert set(apart.column("requests", "replica").tolist()) == {0}


def test_ranks_of_two_replicas_are_chosen_in_two_steps():
    tables = run([(0.0, 8, 4)] * 8, Exchanging(S), replicas=2, router="round_robin")
    places = list(zip(tables.column("requests", "replica"), tables.column("requests", "rank")))
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1)] * 2


def test_vllm_counts_waiting_requests_four_times_and_sees_them_late():
    # One slot a rank. At 0 s all counts are 0, and each request sent counts as one waiting: 0, 1, 0, 1. At 1 s fresh
    # counts say one running and one waiting each; at 1.05 s they still do, with what was sent since: rank 1. At 30 s
    # rank 1's requests of ten tokens have ended, those of forty on rank 0 have not.
    rows = [(0.0, 4, 40), (0.0, 4, 10), (0.0, 4, 40), (0.0, 4, 10), (1.0, 4, 40), (1.05, 4, 1), (30.0, 4, 1)]
    cost = ConstantCost(S)
    tables = run(rows, cost, rank_router="vllm_ranks", max_num_seqs=1)
    assert tables.column("requests", "rank").tolist() == [0, 1, 0, 1, 0, 1, 1]


def test_parallelism_is_spelled_as_vllm_spells_it():
    flags = engine_flags("vllm:0.19", {"tp": 4, "dp": 2, "ep": True, "token_budget": 512})
    assert flags == (
        "--tensor-parallel-size 4 --data-parallel-size 2 --enable-expert-parallel --max-num-batched-tokens 512"
    )


def test_a_run_folder_from_before_there_were_ranks_is_read_as_rank_0(tmp_path):
    made = replay(trace_of([(0.0, 8, 4)] * 3), ReplayConfig(num_blocks=40), cost=ConstantCost(S))
    folder = made.write(tmp_path / "run")
    for name in TABLES:
        table = pq.read_table(folder / f"{name}.parquet")
        pq.write_table(table.drop_columns("rank"), folder / f"{name}.parquet")
    back = read_run(folder)
    assert set(back.column("requests", "rank").tolist()) == {0}
    assert back.ranks == 1
    assert back.requests.equals(made.tables.requests)
    write_run(tmp_path / "again", back, back.config)
    assert pq.read_schema(tmp_path / "again" / "stages.parquet").names == schema("stages").names


def test_costs_of_ranks_keep_their_exchange_under_scales():
    cost = Exchanging(1000, per_row_ns=10, exchange_ns=1)
    chunk, decodes = BatchShape(((30, 0),), 0, 0, 0, 0, 1), BatchShape((), 10, 90, 9, 0, 10)
    slower = scaled(cost, (2.0, 3.0))
    assert form_of_ranks(slower)([chunk, decodes]) == [2 * (1300 + 40), 3 * (1100 + 40)]
    assert form_of_ranks(scaled(ConstantCost(1000), (2.0, 3.0))) is None


def test_a_cost_model_of_other_ranks_is_refused():
    with pytest.raises(SimulationError, match="cost model constant: found 3 ranks, expected 2, as --dp says"):
        run([(0.0, 8, 4)], Exchanging(S, ranks=3))


OPTIONS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["chunked", "vllm_v1", "orca", "prefill_priority", "decode_maximal"]),
        "dp": st.integers(2, 3),
        "replicas": st.integers(1, 2),
        "rank_router": st.sampled_from(["round_robin", "vllm_ranks", "least_kv", "least_outstanding_tokens"]),
        "num_blocks": st.sampled_from([20, 60, 400]),
        "prefix_caching": st.booleans(),
        "failures": st.sampled_from([(), ("0@4+3",)]),
        "preemption": st.sampled_from(["recompute", "recompute", "swap"]),
    }
)
ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.7]), st.integers(1, 40), st.integers(1, 25)),
    min_size=1,
    max_size=12,
)


def traced(rows: list[tuple[float, int, int]]) -> Any:
    gaps, prompts, outputs = zip(*rows)
    return trace_of(list(zip(np.cumsum(gaps).tolist(), prompts, outputs))).with_timeout(30.0)


POOLS = {
    "pools": ({"role": "prefill", "replicas": 2}, {"role": "decode"}),
    "kv_bandwidth": 5e9,
    "replicas": 1,
}
"""Prompts on ranks of two replicas, answers on the ranks of a third."""


@given(
    ROWS,
    OPTIONS,
    st.booleans(),
    st.sampled_from([0, 8]),
    st.sampled_from([{}, {}, POOLS]),
    st.booleans(),
    st.sampled_from([0, 3]),
)
@settings(max_examples=60, deadline=None)
def test_leaps_write_the_rows_of_single_steps(rows, options, ahead, graph_rows, pools, layerwise, drafts):
    options = {**options, **pools, "layerwise_kv": layerwise and bool(pools)}
    trace = traced(rows)
    cost = Exchanging(
        S // 10, S // 100, S // 200, per_row_ns=S // 1000, per_context_ns=S // 5000, exchange_ns=S // 700,
        graph_rows=graph_rows, ranks=options["dp"],
    )  # fmt: skip
    if options["policy"] == "vllm_v1":
        options = {**options, "knobs": {"async_scheduling": ahead and not drafts}}
        if drafts and not options["pools" if pools else "failures"]:
            options |= {"speculation": f"ngram:{drafts}", "acceptance": "0.6"}
    found = []
    for leaps in (True, False):
        plan = make_cluster_plan(ReplayConfig(block_size=4, leaps=leaps, **options), trace, cost)
        recorder = Recorder()
        cluster = simulate(trace, plan, recorder)
        found.append((recorder.tables(), cluster.facts()))
    (fast, facts), (plain, plain_facts) = found
    assert facts == plain_facts
    for name in TABLES:
        assert sorted(map(repr, fast.table(name).to_pylist())) == sorted(map(repr, plain.table(name).to_pylist())), name
    produced = fast.requests.to_pandas()
    assert produced["output_tokens"].tolist() == [
        output if status == "finished" else tokens
        for output, status, tokens in zip(trace.output_tokens, produced["status"], produced["output_tokens"])
    ]


@given(ROWS, OPTIONS, st.booleans(), st.sampled_from([0, 8]), st.sampled_from(["auto", "together"]))
@settings(max_examples=60, deadline=None)
def test_ranks_write_the_rows_of_the_reference_simulator(rows, options, ahead, graph_rows, steps):
    options = {**options, "failures": (), "preemption": "recompute", "ranks_step": steps}
    if options["policy"] == "vllm_v1":
        options["knobs"] = {"async_scheduling": ahead}
    times = (S // 10, S // 100, S // 200, S // 1000, S // 5000)
    cost: ConstantCost = ConstantCost(*times)
    if steps == "auto":
        cost = Exchanging(*times, exchange_ns=S // 700, graph_rows=graph_rows, ranks=options["dp"])
    assert_same(traced(rows), {"block_size": 4, **options}, cost)


def test_experts_over_ranks_write_the_rows_of_the_reference_simulator_in_its_order():
    trace = trace_of([(row / 40, 50 + 37 * row % 300, 5 + row % 30) for row in range(24)])
    model = {"model": "qwen3-30b-a3b", "gpu": "h100", "cost_model": "roofline", "policy": "vllm_v1"}
    options = {**model, "tp": 2, "dp": 2, "ep": True, "num_blocks": 200, "knobs": {"async_scheduling": False}}
    assert_same(trace, options, None)
    fast, slow = (replay(trace, ReplayConfig(reference=slowly, **options)) for slowly in (False, True))
    tables = (run.tables.iterations.drop_columns(["cohorts"]).to_pylist() for run in (fast, slow))
    assert [*map(repr, next(tables))] == [*map(repr, next(tables))]
    assert fast.config["pools"][0]["ranks_step_together"]
    assert fast.config["pools"][0]["devices_per_replica"] == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dp": 2, "pp": 2}, "--dp 2 with --pp 2: ranks that step together have one stage each"),
        ({"dp": 2, "afd": {"attention": "1", "ffn": "1"}}, "--afd with --dp 2"),
        ({"ep": True}, "--ep: llama-3.1-8b has no experts to deal over devices"),
        ({"dp": 2, "kv_store_gib": 1.0}, "--kv-store-gib with --dp"),
    ],
)
def test_what_does_not_go_with_ranks_is_refused_by_name(options, said):
    config = ReplayConfig(cost_model="roofline", ranks_step="together", **options)
    with pytest.raises(SimulationError, match=said):
        replay(trace_of([(0.0, 8, 4)]), config)
