"""Every number of a summary, worked out by hand from three requests (see sample_runs.three_requests)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics import SUMMARY_KEYS, MetricsError, Recorder, parse_slo, summarise, summarise_classes
from metrics.measures.bubble_causes import CAUSES
from metrics.measures.memory_keys import MEMORY_KEYS
from metrics.measures.slo import requests_within
from metrics.measures.statistics import percentiles, statistics
from metrics.measures.summary import pd_optimum
from metrics.measures.summary_keys import keys_table
from metrics.measures.token_times import TokenTimes
from metrics.run_folder.columns import TABLES, columns_table
from metrics.run_folder.drafts import SPECULATION_KEYS
from policies.work.request import Request
from simulator.config import ReplayConfig
from simulator.simulation import replay
from tests.metrics.sample_runs import S, three_requests
from tests.simulator.constant_cost import ConstantCost, trace_of

CONFIG = {
    "world": "simulated",
    "policy": "chunked",
    "model": "tiny",
    "gpu": "cpu",
    "cost_model": {"name": "fitted tiny"},
    "calibrated": True,
    "token_budget": 10,
    "num_blocks": 10,
    "slots": 3,
    "knobs": {"chunk_size": 8},
}


def summary_of_three(**options):
    run = three_requests()
    run.config = CONFIG
    return summarise(run, **options)


def test_latencies_of_three_requests() -> None:
    summary = summary_of_three()
    expected = {
        "ttft_s": (8 / 3, 2, 4.4, 4.7, 4.94, 5),  # 1, 2, 5
        "tbt_s": (2, 1.5, 3.4, 3.7, 3.94, 4),  # 1, 1, 2, 4: the 4 is the preempted request's wait
        "tpot_s": (2, 2, 2.4, 2.45, 2.49, 2.5),  # 3/2, 5/2
        "e2e_s": (16 / 3, 5, 6.6, 6.8, 6.96, 7),  # 4, 5, 7
        "normalized_latency_s": (26 / 9, 7 / 3, 67 / 15, 71 / 15, 74.2 / 15, 5),  # 4/3, 7/3, 5
        "scheduling_delay_s": (1, 0, 2.4, 2.7, 2.94, 3),  # 0, 0, 3
        "iteration_s": (1.5, 1.5, 2, 2, 2, 2),  # 1, 2, 1, 2, 1.5
    }
    for name, values in expected.items():
        found = [summary[f"{name}_{s}"] for s in ("mean", "p50", "p90", "p95", "p99", "max")]
        assert found == pytest.approx(values, abs=1e-12), name


def test_counts_and_rates_of_three_requests() -> None:
    summary = summary_of_three(stall_bound_s=1.5, slo="ttft_p99=2,tbt_p99=3")
    expected = {
        "world": "simulated",
        "policy": "chunked",
        "model": "tiny",
        "gpu": "cpu",
        "cost_model": "fitted tiny",
        "calibrated": True,
        "measured_share": None,
        "cost_basis": "fitted: the run does not say to what share",
        "requests": 4,
        "finished": 3,
        "rejected": 1,
        "failed": 0,
        "aborted": 0,
        "warmup_requests": 0,
        "measured": 4,
        "measured_finished": 3,
        "window_start_s": 0,
        "window_end_s": 8,
        "duration_s": 8,
        "overloaded": False,
        "load": None,
        "stall_bound_s": 1.5,
        "stalls": 2,
        "stall_s_total": 6,
        "stall_s_longest": 4,
        "stalled_requests": 2,
        "requests_per_s": 3 / 8,
        "output_tokens_per_s": 7 / 8,
        "total_tokens_per_s": 25 / 8,
        # R0 meets it; R1's own P99 TBT is 3.97; R2's TTFT is 5; the rejected one counts as missed.
        "slo": "ttft_p99=2,tbt_p99=3",
        "slo_met": False,
        "slo_attainment": 1 / 4,
        "goodput_requests_per_s": 1 / 8,
        # 3/4, 3/7 and 1/5 tokens/s
        "fairness_jain": (3 / 4 + 3 / 7 + 1 / 5) ** 2 / (3 * (9 / 16 + 9 / 49 + 1 / 25)),
        "preemptions": 1,
        "preempted_requests": 1,
        "prompt_tokens": 918,
        "output_tokens": 7,
        "cached_tokens": 2,
        "cached_share": 2 / 918,
        "pd_ratio": 918 / 7,
        "pd_optimum": 3,
        "iterations": 5,
        "tokens_per_iteration": 27 / 5,
        "decodes_per_iteration": 3 / 5,
        "chunk_tokens_total": 24,
        "token_budget": 10,
        "token_budget_use": 0.54,
        "dummy_tokens": 3,
        "dummy_share": 0.1,
        "graph_padding_rows": 2,
        "running_mean": 11 / 8,
        "running_max": 2,
        "waiting_mean": 5 / 8,
        "waiting_max": 1,
        "kv_blocks": 10,
        "kv_use_mean": (0.2 + 2 * 0.4 + 0.5 + 2 * 0.6 + 2 * 0.7) / 8,
        "kv_use_max": 0.7,
        "host_s_total": 1,
        "device_s_total": 7,
        "device_busy_share": 7 / 8,
        "inside_share": 4 / 5,
        "bubble_share": None,
        "lost_device_s": None,
        **{f"bubble_share_{cause}": None for cause in CAUSES},
        **dict.fromkeys(key for key in SUMMARY_KEYS if key.startswith(("rank", "activated_experts"))),
        **dict.fromkeys(("tenants", "fairness_jain_tenants", "light_tenants_ttft_s_p99")),
        **dict.fromkeys(key for key in SUMMARY_KEYS if key.startswith("program")),
        "mfu": None,
        "mfu_busy": None,
        "mbu": None,
        "mbu_busy": None,
        **dict.fromkeys(MEMORY_KEYS),
        **dict.fromkeys(SPECULATION_KEYS),
        "prefix_hit_requests": 1,
    }
    for key, value in expected.items():
        assert summary[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    families = {
        f"{n}_s_" for n in ("ttft", "tbt", "tpot", "e2e", "normalized_latency", "scheduling_delay", "iteration")
    }
    assert {key for key in summary if not any(key.startswith(f) for f in families)} == expected.keys()


def test_utilisation_counts_useful_work_against_the_peak() -> None:
    peaks = {"peak_flops": 10, "peak_bytes_per_s": 5, "devices": 2}
    # 27 tokens; 36 + (10 + 9) + 15 + 21 + 21 = 112 query-key pairs
    flops = {"token": 2, "pair": 1}
    summary = summary_of_three(peaks=peaks, model_flops=flops, model_bytes={"iteration": 3})
    assert summary["mfu"] == pytest.approx((54 + 112) / (10 * 2 * 8))
    assert summary["mfu_busy"] == pytest.approx((54 + 112) / (10 * 2 * 7))
    assert summary["mbu"] == pytest.approx(15 / (5 * 2 * 8))
    by_function = summary_of_three(peaks=peaks, model_flops=lambda run: np.full(run.rows("iterations"), 16.6 * 2))
    assert by_function["mfu"] == pytest.approx(summary["mfu"])
    with pytest.raises(MetricsError, match="found coefficient 'tokens', expected some of iteration, token"):
        summary_of_three(peaks=peaks, model_flops={"tokens": 1})


def test_the_warm_up_is_left_out_by_requests_or_seconds() -> None:
    by_count = summary_of_three(warmup=1)
    assert (by_count["warmup_requests"], by_count["measured"], by_count["requests"]) == (1, 3, 4)
    assert by_count["ttft_s_mean"] == 3.5
    assert by_count["tbt_s_mean"] == 2.5  # R1 alone: 1 and 4
    assert (by_count["window_start_s"], by_count["duration_s"]) == (1, 7)
    assert by_count["output_tokens_per_s"] == pytest.approx(7 / 7)  # R0's tokens count: the machine delivered them
    by_seconds = summary_of_three(warmup="2s")
    assert (by_seconds["measured"], by_seconds["measured_finished"], by_seconds["iterations"]) == (1, 0, 4)
    assert math.isnan(by_seconds["ttft_s_mean"])
    with pytest.raises(MetricsError, match=r"found '-3', expected a number of requests \(100\) or seconds \(30s\)"):
        summary_of_three(warmup="-3")


def test_classes_have_their_own_objectives_and_summaries() -> None:
    run = three_requests()
    slo = {"fast": "ttft_p99=1.5", "slow": "e2e_max=5"}
    assert summarise(run, slo=slo)["slo_attainment"] == 2 / 4
    classes = summarise_classes(run, slo=slo)
    assert list(classes) == ["fast", "slow"]
    assert [classes[name]["measured"] for name in classes] == [2, 2]
    assert [classes[name]["slo_attainment"] for name in classes] == [1 / 2, 1 / 2]
    assert classes["slow"]["ttft_s_mean"] == 5
    # fast: R0 and R1 with prompts of 8 and 4 and three tokens each; slow: R2 with one of 6, and the rejected one.
    counts = [(summary["requests"], summary["finished"], summary["rejected"]) for summary in classes.values()]
    assert counts == [(2, 2, 0), (2, 1, 1)]
    assert [summary["requests_per_s"] for summary in classes.values()] == [2 / 8, 1 / 8]
    assert [summary["total_tokens_per_s"] for summary in classes.values()] == [18 / 8, 7 / 8]
    assert [summary["iterations"] for summary in classes.values()] == [5, 5]


def test_who_has_no_objective_is_neither_held_to_it_nor_counted() -> None:
    """R0 and R1 are fast, with first tokens after 1 and 2 s; slow ones have no objective, and nobody is a chta."""
    run = three_requests()
    one = summarise(run, slo={"fast": "ttft_max=1.5", "chta": "e2e_max=5"})
    assert (one["slo_attainment"], one["slo_met"], one["goodput_requests_per_s"]) == (1 / 2, False, 1 / 8)
    other = summarise(run, slo={"fast": "ttft_mean=1.5,tbt_p50=1.5"})
    assert (other["slo_attainment"], other["slo_met"]) == (1 / 2, True)
    nobody = summarise(run, slo={"chta": "ttft_mean=1.5"})
    assert math.isnan(nobody["slo_attainment"])
    assert nobody["slo_met"] is None


def test_an_empty_run_has_a_summary() -> None:
    summary = summarise(Recorder().tables(), slo="ttft_p99=1")
    assert (summary["requests"], summary["duration_s"], summary["slo_met"]) == (0, 0, False)
    assert math.isnan(summary["tbt_s_p99"])
    assert summary.keys() == SUMMARY_KEYS.keys()


def test_a_lost_token_is_an_error() -> None:
    recorder = Recorder()
    recorder.cohort_times(0, 0, [S, 2 * S])
    recorder.request(Request(7, 0, 8, 3), 0, "finished", "", 3, 0, S, 2 * S, 0, 0, ((0, 0, 2),))
    with pytest.raises(MetricsError, match="request 7: found 3 output tokens, expected the 2 that its segments"):
        summarise(recorder.tables())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ttft=2", "found 'ttft=2', expected metric_statistic=seconds"),
        ("ttft_p99=2;tbt_p99=1", "found bound '2;tbt_p99=1'"),
        ("ttft_p99=nan", "found bound 'nan', expected seconds above 0"),
        ("ttft_p99=-1", "found bound '-1'"),
        ("tbt_p101=1", "found percentile 101, expected at most 100"),
        ("latency_p99=1", "found 'latency_p99=1'"),
        ("", "found '', expected"),
    ],
)
def test_a_wrong_objective_is_explained(text, complaint) -> None:
    with pytest.raises(MetricsError, match=complaint.replace("(", r"\(")):
        parse_slo(text)


def test_optimum_pd_ratio_fills_every_chunk_with_decodes() -> None:
    # SARATHI: chunk 256 and 18 slots: 239 prefill tokens beside 17 decodes
    assert pd_optimum(256, 18) == 239 / 17
    assert math.isnan(pd_optimum(256, 1))


@pytest.mark.parametrize("config", [{"world": "live"}, {"world": "simulated", "calibrated": False}])
def test_a_run_without_a_measured_region_has_no_share_inside_it(config: dict[str, object]) -> None:
    run = three_requests()
    assert summarise(run)["inside_share"] == 4 / 5
    run.config = {**CONFIG, **config}
    assert math.isnan(summarise(run)["inside_share"])


def test_every_key_and_every_column_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert keys_table() in page
    assert all(columns_table(table) in page for table in TABLES)


values = st.lists(st.integers(0, 50), min_size=1, max_size=30)


@given(values, st.lists(st.integers(1, 4), min_size=30, max_size=30), st.floats(0, 100))
def test_weighted_percentiles_equal_those_of_the_expanded_list(numbers, weights, q) -> None:
    data, count = np.array(numbers) / 7, np.array(weights[: len(numbers)])
    expanded = np.repeat(data, count)
    assert percentiles(data, [q], count) == [np.percentile(expanded, q)]
    assert statistics(data, count)["mean"] == pytest.approx(expanded.mean())


@st.composite
def token_histories(draw):
    """Cohorts with rising times, and requests whose segments follow one another in time."""
    cohorts = [np.cumsum(draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))) for _ in range(3)]
    segments = []
    for _ in range(draw(st.integers(1, 6))):
        now, own = 0, []
        for _ in range(draw(st.integers(0, 3))):
            cohort = draw(st.integers(0, 2))
            first = int(np.searchsorted(cohorts[cohort], now, side="right"))
            if first < len(cohorts[cohort]):
                last = draw(st.integers(first + 1, len(cohorts[cohort])))
                own.append((cohort, first, last))
                now = cohorts[cohort][last - 1]
        segments.append(own)
    return cohorts, segments


@settings(max_examples=150, deadline=None)
@given(token_histories(), st.integers(1, 9), st.sampled_from(["p50", "p90", "p99", "max", "p37.5"]))
def test_gaps_by_cohort_equal_gaps_token_by_token(history, bound, statistic) -> None:
    cohorts, segments = history
    recorder = Recorder()
    own = []
    for number, times in enumerate(cohorts):
        recorder.cohort_times(0, number, times)
    for request, parts in enumerate(segments):
        times = np.concatenate([cohorts[c][a:b] for c, a, b in parts]) if parts else np.empty(0, dtype=np.int64)
        own.append(times)
        recorder.request(Request(request, 0, 1, 99), 0, "finished", "", len(times), 0, 0, 0, 0, 0, parts)
    tokens = TokenTimes(recorder.tables())
    assert tokens.tokens_per_request().tolist() == [len(times) for times in own]
    gaps = tokens.gaps(np.ones(len(own), dtype=bool))
    expected = np.concatenate([np.diff(times) for times in own])
    assert sorted(np.repeat(gaps.ns, gaps.count).tolist()) == sorted(expected.tolist())
    assert tokens.gaps_above(bound).tolist() == [int((np.diff(times) > bound).sum()) for times in own]
    assert tokens.delivered(bound) == sum(int((times >= bound).sum()) for times in own)
    percent = 100 if statistic == "max" else float(statistic[1:])
    within = [len(t) < 2 or np.percentile(np.diff(t) / 1e9, percent) <= bound / 1e9 for t in own]
    nobody = np.full(len(own), np.nan)
    met = requests_within(parse_slo(f"tbt_{statistic}={bound}e-9"), {"tpot": nobody}, tokens)
    assert met.tolist() == within


def test_the_parts_of_a_run_have_the_token_times_of_the_run_and_no_more() -> None:
    """Requests dealt to parts in turn: each part's gaps are those that the whole finds for it, and together the parts
    hold no more times than tokens were delivered, so that thousands of classes cost what one does."""
    trace = trace_of([(0.1 * i, 20 + 7 * i % 50, 5 + i % 9) for i in range(40)])
    config = ReplayConfig(num_blocks=24, block_size=4, policy="vllm_v1")
    run = replay(trace, config, cost=ConstantCost(device_ns=300_000_000, per_row_ns=1_000_003)).tables
    assert run.column("requests", "preemptions").sum() > 0
    whole = TokenTimes(run)
    parts = [np.arange(start, 40, 7) for start in range(7)]
    held = 0
    for rows, part in zip(parts, whole.split(parts)):
        wanted = np.zeros(40, dtype=bool)
        wanted[rows] = True
        expected, found = whole.gaps(wanted), part.gaps(np.ones(len(rows), dtype=bool))
        assert (found.ns.tolist(), found.count.tolist()) == (expected.ns.tolist(), expected.count.tolist())
        assert part.tokens_per_request().tolist() == whole.tokens_per_request()[rows].tolist()
        assert part.gaps_above(400_000_000).tolist() == whole.gaps_above(400_000_000)[rows].tolist()
        assert part.delivered(2_000_000_000) == whole.delivered(2_000_000_000, wanted)
        assert part.of_request(1).tolist() == whole.of_request(int(rows[1])).tolist()
        held += len(part.times_ns)
    assert held <= whole.tokens_per_request().sum()
