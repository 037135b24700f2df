"""What must change, and how, when a run is changed: theorems about schedules that no single expected number shows."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import Recorder, summarise, summarise_classes
from metrics.measures.summary_keys import LATENCIES
from metrics.run_folder.columns import TABLES
from metrics.run_folder.tables import RunTables
from policies import PolicyError, Request, knobs_of, make_policy, make_scheduler, policy_class, policy_names
from simulator import ReplayConfig, replay
from simulator.cluster.pools import make_cluster_plan
from simulator.routers import router_names
from simulator.simulation import simulate
from tests.hardening.command_line import assert_refused, run
from tests.policies.driving import drive
from tests.simulator.constant_cost import ConstantCost, trace_of
from workloads import Trace


@dataclass(frozen=True)
class Variant:
    """A policy with knobs that bite on the small traces below; times are doubled with everything else, rates halved."""

    policy: str
    knobs: dict[str, Any] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)


VARIANTS = [
    *[Variant(name) for name in policy_names() if name not in ("slo_aware", "most_in_time", "shortest_prompt_first")],
    Variant("request_level", {"max_batch_size": 3}, {"max_delay_s": 0.07}),
    Variant("orca", {"max_batch_size": 3, "reserve": "longest"}),
    Variant("decode_maximal", {"chunk_size": 64, "align": "shrink"}),
    Variant("dynamic_chunk", {"large": 128, "middle": 96, "small": 64, "merge": True}),
    Variant("dynamic_chunk", {"rule": "tbt_slo", "largest": 256}, {"tbt_target_s": 0.006}),
    Variant("dynamic_chunk", {"rule": "prefix_aware", "first": 128}),
    Variant("dynamic_chunk", {"rule": "prefix_aware", "first": 128}, {"c_ns": 4e6, "b_ns": 1e4, "a_ns": 8.0}),
    Variant("chunked", {"chunk_size": 40}),
    Variant("vllm_v1", {"long_prefill_token_threshold": 50}),
    Variant("shortest_prompt_first", {"chunk_size": 64, "window": 4}, {}, {"ageing": 512.0}),
    Variant("most_in_time", {"chunk_size": 128}, {"ttft_s": 0.4, "tbt_s": 0.05}),
    Variant("slo_aware", {"chunk_size": 128}, {"ttft_s": 0.4, "tbt_s": 0.05}),
    Variant("slo_aware", {"chunk_size": 64, "relegate": False}, {"ttft_s": 0.1, "tbt_s": 0.005}),
]
MS = 1_000_000
LONGEST = 300


@dataclass(frozen=True)
class Setting:
    """What a run is, apart from its trace. pool: KV blocks; small ones preempt."""

    variant: Variant
    pp: int = 1
    replicas: int = 1
    router: str = "least_outstanding_requests"
    pool: int = 27

    def run(self, trace: Trace, scale: int = 1, **more: Any) -> RunTables:
        """Tables of a replay in which all costs and times are `scale` times as long."""
        knobs = dict(self.variant.knobs)
        knobs |= {name: value * scale for name, value in self.variant.times.items()}
        knobs |= {name: value / scale for name, value in self.variant.rates.items()}
        options: dict[str, Any] = {
            "policy": self.variant.policy,
            "knobs": knobs,
            "pp": self.pp,
            "replicas": self.replicas,
            "router": self.router,
            "num_blocks": self.pool,
            "max_model_len": LONGEST,
        } | more
        cost = ConstantCost(
            2 * MS * scale,
            100_000 * scale,
            50_000 * scale,
            20_000 * scale,
            10 * scale,
            30_000 * scale,
            stages=self.pp,
            tile=16,
        )
        recorder = Recorder()
        simulate(trace, make_cluster_plan(ReplayConfig(**options), trace, cost), recorder)
        return by_replica(recorder.tables())


def by_replica(tables: RunTables) -> RunTables:
    """Of several replicas each has its own order; which comes first does not matter."""
    rows = {name: tables.table(name) for name in TABLES}
    for name in ("iterations", "stages", "tokens"):
        rows[name] = rows[name].take(np.argsort(tables.column(name, "replica"), kind="stable"))
    return RunTables(rows)


def settings_of(
    variants: list[Variant] = VARIANTS, routers: list[str] | None = None, pools: tuple[int, ...] = (20, 27, 60)
) -> st.SearchStrategy[Setting]:
    return st.builds(
        Setting,
        st.sampled_from(variants),
        st.sampled_from([1, 1, 3]),
        st.sampled_from([1, 1, 3]),
        st.sampled_from(routers or router_names()),
        st.sampled_from(pools),
    )


@st.composite
def traces(draw: st.DrawFn, most: int = 14) -> Trace:
    """A few requests whole milliseconds apart, some at once."""
    prompts, outputs = st.integers(1, 200) | st.integers(60, 200), st.integers(1, 40) | st.integers(25, 40)
    row = st.tuples(st.integers(0, 40) | st.just(0), prompts, outputs, st.integers(0, 20))
    gaps, prompts, outputs, slack = np.array(
        draw(st.lists(row, min_size=1, max_size=most) | st.lists(row, min_size=6, max_size=most))
    ).T
    return Trace("drawn", np.cumsum(gaps) * MS, prompts, outputs, outputs + slack)


def few(examples: int) -> Any:
    """Always the same ones; with MORE=10 in the environment ten times as many, and others every time."""
    more = int(os.environ.get("MORE", "0"))
    return settings(max_examples=examples * max(1, more), deadline=None, derandomize=not more)


TIMES = {
    "iterations": ("planned_s", "start_s", "end_s", "device_s"),
    "stages": ("start_s", "end_s"),
    "tokens": ("time_s",),
    "requests": ("arrival_s", "finished_s"),
}
COUNTS = {
    "iterations": (
        "replica",
        "chunk_tokens",
        "num_chunks",
        "decodes",
        "decode_context_total",
        "dummy_tokens",
        "preempted",
        "running",
        "waiting",
        "free_blocks",
    ),
    "requests": ("status", "output_tokens", "preemptions"),
    "segments": ("replica", "cohort", "from_step", "to_step"),
}


def same_run(one: RunTables, other: RunTables, *, times: int = 1, later_ns: int = 0, but: tuple[str, ...] = ()) -> None:
    """Equal tables, every moment of the second one `times` as late, and `later_ns` after that."""
    for table, names in COUNTS.items():
        for name in names:
            if name not in but:
                assert one.column(table, name).tolist() == other.column(table, name).tolist(), name
    for table, names in TIMES.items():
        for name in names:
            moved = 0 if name == "device_s" else later_ns
            assert (one.column_ns(table, name) * times + moved).tolist() == other.column_ns(table, name).tolist(), name


@few(40)
@given(setting=settings_of(), trace=traces())
def test_twice_the_costs_and_twice_the_gaps_are_the_same_batches_in_twice_the_time(
    setting: Setting, trace: Trace
) -> None:
    same_run(setting.run(trace), setting.run(replace(trace, arrival_ns=trace.arrival_ns * 2), 2), times=2)


@few(25)
@given(setting=settings_of(), trace=traces(), seconds=st.sampled_from([1, 64]))
def test_everything_later_is_the_same_run_later(setting: Setting, trace: Trace, seconds: int) -> None:
    shift = seconds * 1000 * MS
    same_run(setting.run(trace), setting.run(replace(trace, arrival_ns=trace.arrival_ns + shift)), later_ns=shift)


STATELESS = ["least_outstanding_requests", "least_outstanding_tokens", "least_kv", "prefix_affinity"]
"""Routers that remember nothing once all is quiet."""


def joined(first: Trace, second: Trace, gap_ns: int) -> Trace:
    columns = {
        name: np.concatenate([getattr(first, name), getattr(second, name) + (gap_ns if name == "arrival_ns" else 0)])
        for name in ("arrival_ns", "prompt_tokens", "output_tokens", "max_output_tokens")
    }
    return replace(first, **columns)


@few(25)
@given(setting=settings_of(routers=STATELESS), first=traces(10), second=traces(10))
def test_a_trace_split_at_an_idle_gap_is_two_runs(setting: Setting, first: Trace, second: Trace) -> None:
    gap_ns = 128 * 1000 * MS
    whole, one, other = setting.run(joined(first, second, gap_ns)), setting.run(first), setting.run(second)
    assert one.column_ns("requests", "finished_s").max() < gap_ns
    for name in ("finished_s", "arrival_s"):
        parts = [one.column_ns("requests", name), other.column_ns("requests", name) + gap_ns]
        assert whole.column_ns("requests", name).tolist() == np.concatenate(parts).tolist()
    parts = [one.column("iterations", "replica"), other.column("iterations", "replica")]
    order = np.argsort(np.concatenate(parts), kind="stable")
    for name in COUNTS["iterations"]:
        parts = [one.column("iterations", name), other.column("iterations", name)]
        assert whole.column("iterations", name).tolist() == np.concatenate(parts)[order].tolist(), name


@few(25)
@given(setting=settings_of(), trace=traces(), prompt=st.integers(1, 200), output=st.integers(1, 40))
def test_who_comes_after_everything_has_ended_changes_nothing_before(
    setting: Setting, trace: Trace, prompt: int, output: int
) -> None:
    last = Trace("last", np.array([0]), np.array([prompt]), np.array([output]), np.array([output]))
    alone, more = setting.run(trace), setting.run(joined(trace, last, 128 * 1000 * MS))
    for table in ("requests", "iterations", "tokens", "stages", "segments"):
        rows = alone.rows(table)
        assert _same_floats(_in_time(more, table).slice(0, rows), _in_time(alone, table)), table


def _in_time(run: RunTables, table: str) -> Any:
    """Rows as they ended; replicas that cannot feel each other write theirs one after another."""
    by = {"iterations": "end_s", "stages": "end_s", "tokens": "time_s"}.get(table)
    rows = run.table(table)
    return rows if by is None else rows.take(np.argsort(run.column(table, by), kind="stable"))


@few(25)
@given(setting=settings_of(), trace=traces(), at=st.integers(0, 13), leaps=st.booleans())
def test_who_is_rejected_at_the_door_changes_nothing_for_the_others(
    setting: Setting, trace: Trace, at: int, leaps: bool
) -> None:
    """Too long for the engine, and in the middle of everything else."""
    at = min(at, len(trace) - 1)
    rows = np.insert(np.arange(len(trace)), at, at)
    longer = trace.take(np.arange(len(trace))).rearranged(rows, trace.arrival_ns[rows])
    longer.prompt_tokens[at] = LONGEST
    setting = replace(setting, router="least_outstanding_requests")
    alone, more = setting.run(trace, leaps=leaps), setting.run(longer, leaps=leaps)
    kept = np.delete(np.arange(len(longer)), at)
    assert more.column("requests", "status")[at] == "rejected"
    for name in ("status", "output_tokens", "preemptions", "replica"):
        assert more.column("requests", name)[kept].tolist() == alone.column("requests", name).tolist(), name
    for table in ("iterations", "tokens", "stages"):
        for name in TIMES[table]:
            assert more.column_ns(table, name).tolist() == alone.column_ns(table, name).tolist(), name


@few(25)
@given(setting=settings_of(routers=["round_robin"]), trace=traces(), replicas=st.integers(2, 4))
def test_replicas_that_take_turns_are_as_many_runs_of_their_own(setting: Setting, trace: Trace, replicas: int) -> None:
    together = replace(setting, replicas=replicas).run(trace)
    alone = replace(setting, replicas=1)
    for number in range(min(replicas, len(trace))):
        mine = np.arange(number, len(trace), replicas)
        own = alone.run(trace.take(mine))
        for name in ("status", "output_tokens", "preemptions"):
            assert together.column("requests", name)[mine].tolist() == own.column("requests", name).tolist(), name
        of_it = together.column("iterations", "replica") == number
        for name in (*COUNTS["iterations"][1:], *TIMES["iterations"]):
            assert together.column("iterations", name)[of_it].tolist() == own.column("iterations", name).tolist(), name


@few(25)
@given(setting=settings_of(), trace=traces())
def test_leaps_cross_what_the_plain_path_walks(setting: Setting, trace: Trace) -> None:
    plain, leaping = setting.run(trace, leaps=False), setting.run(trace)
    for table in ("requests", "segments"):
        assert _same_floats(plain.table(table), leaping.table(table)), table
    # Replicas that cannot feel each other write their rows one after another, others as they come.
    for table, number in (("iterations", "iteration"), ("tokens", "cohort")):
        names = [name for name in plain.table(table).column_names if name not in _NESTED.get(table, ())]
        order = [("replica", "ascending"), (number, "ascending")] + [("step", "ascending")] * (table == "tokens")
        assert _same_floats(*(run.table(table, names).sort_by(order) for run in (plain, leaping))), table


FIXED_SLOTS = [one for one in VARIANTS if one.policy not in ("decode_maximal", "dynamic_chunk")]
"""Policies whose batches do not depend on how many slots there would be."""


@few(20)
@given(setting=settings_of(FIXED_SLOTS, pools=(400,)), trace=traces())
def test_more_memory_than_everybody_needs_changes_nothing(setting: Setting, trace: Trace) -> None:
    enough = setting.run(trace)
    assert not enough.column("requests", "preemptions").any()
    same_run(enough, replace(setting, pool=4000).run(trace), but=("free_blocks",))


@few(20)
@given(setting=settings_of(pools=(400,)), trace=traces(), named=st.booleans())
def test_a_prefix_cache_without_a_shared_prefix_is_none(setting: Setting, trace: Trace, named: bool) -> None:
    if named:
        hashes = [
            tuple(range(1000 * row, 1000 * row + tokens // 16))
            for row, tokens in enumerate(trace.prompt_tokens.tolist())
        ]
        trace = replace(trace, prefix_hashes=hashes, hash_tokens=16)
    cached = setting.run(trace, prefix_caching=True)
    assert not cached.column("requests", "cached_tokens").any()
    same_run(setting.run(replace(trace, prefix_hashes=None)), cached)


@few(20)
@given(setting=settings_of(), trace=traces())
def test_limits_that_nobody_reaches_and_patience_that_does_not_end_change_nothing(
    setting: Setting, trace: Trace
) -> None:
    loose = {"max_num_seqs": 10_000, "preemption": "recompute", "ladder": "preempt"}
    same_run(setting.run(trace, max_num_seqs=5000), setting.run(trace.with_timeout(1e6), **loose))


@few(20)
@given(setting=settings_of(), trace=traces())
def test_one_replica_needs_no_router(setting: Setting, trace: Trace) -> None:
    alone = replace(setting, replicas=1, router="random")
    same_run(alone.run(trace), replace(alone, router=setting.router).run(trace))


@few(20)
@given(setting=settings_of(), trace=traces(), bound_ms=st.integers(1, 400))
def test_a_looser_objective_is_met_by_no_fewer_and_statistics_are_in_order(
    setting: Setting, trace: Trace, bound_ms: int
) -> None:
    classes = [("a", "b")[row % 2] for row in range(len(trace))]
    tables = setting.run(replace(trace, slo=classes))
    tight, loose = (summarise(tables, slo=f"ttft_p99={b / 1000},tbt_p90={b / 4000}") for b in (bound_ms, 2 * bound_ms))
    assert tight["slo_attainment"] <= loose["slo_attainment"]
    for family in LATENCIES:
        values = [tight[f"{family}_{name}"] for name in ("p50", "p90", "p95", "p99", "max")]
        assert values == sorted(values) or np.isnan(values).all()
        assert not tight[f"{family}_mean"] > values[-1] * (1 + 1e-12)
    assert 0 <= tight["goodput_requests_per_s"] <= tight["requests_per_s"] * (1 + 1e-12)
    own = summarise_classes(tables).values()
    for name in ("requests", "finished", "rejected", "measured", "prompt_tokens", "output_tokens", "preemptions"):
        assert sum(summary[name] for summary in own) == tight[name], name
    assert sum(summary["output_tokens_per_s"] for summary in own) == pytest.approx(tight["output_tokens_per_s"])


_NESTED = {"iterations": ["chunks", "cohorts"]}


def _same_floats(one: Any, other: Any) -> bool:
    """Equal tables; NaN equals NaN."""
    return repr(one.to_pylist()) == repr(other.to_pylist())


@pytest.mark.parametrize("policy", policy_names())
def test_other_names_for_the_requests_change_nothing(policy: str) -> None:
    """Where a policy breaks ties by id the new names keep the order; elsewhere they are shuffled."""
    rng = np.random.default_rng(11)
    rows = [
        (int(at), int(rng.integers(1, 60)), int(rng.integers(1, 30))) for at in np.cumsum(rng.integers(1, 4000, 14))
    ]
    by_id = policy in ("slo_aware", "most_in_time", "shortest_prompt_first")
    names = [7 * row + 3 for row in range(14)] if by_id else [int(name) for name in rng.permutation(14) + 100]

    def log_of(ids: list[int]) -> Any:
        scheduler = make_scheduler(
            make_policy(policy), num_blocks=40, block_size=4, max_model_len=100, tile=8, watermark=0.0
        )
        requests = [(Request(name, at, prompt, output), output) for name, (at, prompt, output) in zip(ids, rows)]
        return drive(scheduler, requests)

    plain, renamed = log_of(list(range(14))), log_of(names)
    assert [shape for _, _, shape, _ in plain.batches] == [shape for _, _, shape, _ in renamed.batches]
    assert {names[row]: times for row, times in plain.token_times.items()} == renamed.token_times


@pytest.mark.parametrize("policy", policy_names())
def test_a_knob_by_another_name_is_refused_with_those_that_there_are(policy: str) -> None:
    for knob in knobs_of(policy_class(policy)).values():
        with pytest.raises(PolicyError, match=rf"has no knob '{knob.name}x'; its knobs: .*{knob.name}"):
            make_policy(policy, {knob.name + "x": knob.default})


@pytest.mark.parametrize("policy", policy_names())
def test_a_knob_without_end_is_refused(policy: str) -> None:
    for knob in knobs_of(policy_class(policy)).values():
        if knob.type in (int, float):
            for value in (float("inf"), -float("inf"), float("nan"), "inf", "1e400", 10**400, 1e300):
                with pytest.raises(PolicyError, match=rf"policy {policy}, knob {knob.name}: found"):
                    make_policy(policy, {knob.name: value})


def test_a_knob_by_another_name_in_a_file_is_refused(tmp_path: Any) -> None:
    (tmp_path / "run.toml").write_text('policy = "chunked"\n[knobs]\nchunk_sise = 256\n')
    line = assert_refused(run("simulator", "replay", "examples/trace.csv", "--config", tmp_path / "run.toml"))
    assert "no knob 'chunk_sise'; its knobs: chunk_size" in line


def test_an_hour_of_load_keeps_its_memory(tmp_path: Any) -> None:
    """3,600 simulated seconds: what a replay needs beyond its records does not grow with the trace."""
    import tracemalloc

    grown = []
    for requests in (250, 1000):
        rng = np.random.default_rng(2)
        trace = trace_of(
            [
                (float(row) * 3600 / requests, int(rng.integers(1, 900)), int(rng.integers(1, 120)))
                for row in range(requests)
            ]
        )
        tracemalloc.start()
        done = replay(trace, cost=ConstantCost(3_000_000), policy="chunked", num_blocks=2000)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (done.tables.column("requests", "status") == "finished").all()
        grown.append(size)
        del done
    assert grown[1] < 4.4 * grown[0]
