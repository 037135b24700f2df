"""Capacity searches: against closed forms, with common random numbers, and what they do at the edges."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from experiments.capacity.cluster_size import run_task as smallest_cluster
from experiments.capacity.command import _held
from experiments.capacity.draws import draw_of, draw_plan
from experiments.capacity.prices import Price, prices_for, read_prices
from experiments.capacity.search import Objective, Probe, find_rate, judge, search_draw
from experiments.capacity.study import CapacityStudy, SettingCapacity, find_capacities
from experiments.errors import ExperimentError
from metrics import MetricsError
from simulator import ReplayConfig
from simulator.studies.compare_draws import Spread
from tests.hardening.command_line import run
from tests.simulator.constant_cost import ConstantCost, trace_of

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"prompt": "uniform:200,1500", "output": "uniform:20,120"}
BASE = {"model": "llama-3.1-8b", "gpu": "a100", "cost_model": "roofline"}


def step_at(limit: float) -> Callable[[float], Probe]:
    return lambda rate: Probe(rate, {"x": rate / limit})


@pytest.mark.parametrize("guess", [0.01, 3.0, 7.0, 900.0])
def test_a_search_brackets_the_limit_from_any_guess(guess: float) -> None:
    found = find_rate(step_at(7.0), guess, tolerance=0.01)
    assert found.low <= 7.0 < found.high
    assert found.high / found.low <= 1.01


def test_what_never_holds_has_a_capacity_of_nothing_and_what_always_holds_is_an_error() -> None:
    assert find_rate(lambda rate: Probe(rate, {"x": 2.0}), 5.0, least=0.01).low == 0.0
    with pytest.raises(ExperimentError, match="depend on the rate"):
        find_rate(lambda rate: Probe(rate, {"x": 0.5}), 5.0)


def test_who_is_turned_away_because_of_overload_is_not_served() -> None:
    """Thirty prompts at once at 4,096 tokens a second, nobody to wait above 0.3 s: most are turned away at the door."""
    import numpy as np

    from simulator import replay

    trace = trace_of([(0.0, 100, 1)] * 30)
    options = {"policy": "orca", "max_num_seqs": 1, "num_blocks": 1000, "ladder": "preempt,reject", "max_wait_s": 0.3}
    run = replay(trace, cost=ConstantCost(2 * 10**9), max_model_len=101, **options)
    assert run.summary["rejected"] > 10
    probe = judge(run.tables, Objective.of("ttft_p99=1000"), np.ones(30, dtype=bool), 1.0)
    assert (probe.holds, probe.tightest, probe.rejected) == (False, "requests that did not finish", 0)


def test_all_who_can_be_served_in_time_are_all_of_them() -> None:
    """A share of all times their number may fall short of the whole number that it stands for."""
    import numpy as np

    from simulator import replay

    for able in (1, 4, 27):
        trace = trace_of([(float(row), 16 if row < able else 5000, 3) for row in range(49)])
        run = replay(trace, cost=ConstantCost(10**6), num_blocks=1000, max_model_len=100)
        assert judge(run.tables, Objective.of("ttft_mean=1", 1.0), np.ones(49, dtype=bool), 1.0).holds, able


@pytest.mark.parametrize("attainment", [None, 0.9])
def test_who_is_too_long_arrives_but_brings_no_tokens_and_costs_no_money(attainment: float | None) -> None:
    """Every second prompt is too long. One fixed service time: twice as many may arrive as can be served."""
    from workloads import Trace

    lengths = [16, 5000] * 100
    trace = trace_of([(0.1 * row, prompt, 3) for row, prompt in enumerate(lengths)])
    config = ReplayConfig(max_num_seqs=1, num_blocks=1000, max_model_len=100)
    task = {"objective": asdict(Objective.of("ttft_mean=1", attainment)), "tolerance": 0.01, "draws": {}, "draw": 0}
    assert isinstance(trace, Trace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.capacity.draws.draw_of", lambda plan, number: trace)
        found = search_draw(task, config, ConstantCost(10**8))
    assert found["rejected"] == 70
    assert found["measured"] == 140
    assert found["served_requests_per_s"] == pytest.approx(found["rate"] / 2)
    assert found["output_tokens_per_s"] == pytest.approx(3 * found["rate"] / 2)
    assert 3 < found["served_requests_per_s"] < 3.7  # three steps of 0.1 s each; a short run ends in a queue


def test_a_draw_of_which_nothing_can_be_served_is_one_clear_line() -> None:
    draws = draw_plan({"prompt": "fixed:500", "output": "fixed:5"}, arrivals="poisson", requests=100, draws=2, seed=0)
    base = {**BASE, "max_model_len": 100}
    with pytest.raises(ExperimentError, match=r"none of 100 requests can be served, the first: .*100"):
        find_capacities({"policy": ["chunked"]}, base, draws, Objective.of("tbt_p99=0.2"), count=2)


def setting(label: str, *brackets: tuple[float, float], error: str = "") -> SettingCapacity:
    draws = tuple({"low": low, "high": high} for low, high in brackets)
    rates = tuple(math.sqrt(low * high) for low, high in brackets)
    return SettingCapacity(
        label, {}, rates, 0.1, "tbt", 1, 1.0, 1.0, "roofline", {"cost_basis": "by hand"}, 10, draws=draws, error=error
    )


def test_a_ratio_is_no_sharper_than_the_brackets_of_its_two_rates() -> None:
    one, two = setting("one", (1.0, 1.02), (2.0, 2.04)), setting("two", (1.0, 1.02), (2.0, 2.04))
    assert two.ratio_to(one) == pytest.approx((1.0, 1 / 1.02, 1.02))  # true rates may lie at opposite ends
    assert one.ratio_to(one) == (1.0, 1.0, 1.0)


def test_settings_are_compared_with_the_first_that_can_be_run() -> None:
    failed, one, two = setting("failed", error="too large"), setting("one", (1.0, 1.0)), setting("two", (2.0, 2.0))
    study = CapacityStudy(Objective.of("tbt_p99=1"), {}, 0.01, (failed, one, two))
    assert study.reference is one
    assert [row["ratio"] for row in study.rows()[1:]] == pytest.approx([1.0, 2.0])


SERVICE_S = 0.1


def md1_wait_within(t: float, load: float) -> float:
    """P(W <= t) of the M/D/1 queue with service time SERVICE_S (Erlang 1909)."""
    rate = load / SERVICE_S
    terms = ((rate * (k * SERVICE_S - t), k) for k in range(int(t / SERVICE_S) + 1))
    return (1 - load) * sum(x**k / math.factorial(k) * math.exp(-x) for x, k in terms)


def md1_rate_with_p90_wait(t: float) -> float:
    low, high = 0.01, 0.999
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if md1_wait_within(t, middle) > 0.9 else (low, middle)
    return low / SERVICE_S


@pytest.mark.parametrize(
    ("slo", "known"),
    [
        # W = rho D / (2 (1 - rho)), so a mean wait of 2 D means a load of 4/5.
        ("ttft_mean=0.3", 0.8 / SERVICE_S),
        ("ttft_p90=0.5", md1_rate_with_p90_wait(0.4)),
    ],
)
def test_the_capacity_of_an_md1_queue_lies_within_the_stated_interval(slo: str, known: float) -> None:
    config = ReplayConfig(max_num_seqs=1, num_blocks=1000)
    cost = ConstantCost(round(SERVICE_S * 1e9))
    draws = draw_plan({"prompt": "fixed:16", "output": "fixed:1"}, arrivals="poisson", requests=1000, draws=4, seed=3)
    task = {"draws": draws, "objective": asdict(Objective.of(slo)), "tolerance": 0.01}
    found = [search_draw({**task, "draw": number, "guess": 7.0}, config, cost) for number in range(4)]
    spread = Spread.of([row["rate"] for row in found])
    bracket = max(row["high"] - row["low"] for row in found) / 2
    assert abs(spread.mean - known) <= spread.half_width + bracket
    assert spread.half_width < 0.1 * known


def test_settings_are_compared_on_the_same_draws() -> None:
    draws = draw_plan(GENERATED, arrivals="poisson", requests=150, draws=3, seed=0)
    axes = {"policy": ["chunked", "chunked", "prefill_priority"]}
    study = find_capacities(axes, BASE, draws, Objective.of("ttft_p90=0.3,tbt_p99=0.05"), count=3, tolerance=0.05)
    chunked, prefill = study.settings
    assert chunked.rate > prefill.rate
    assert prefill.limited_by == "tbt_p99"
    ratio, low, high = prefill.ratio_to(chunked)
    assert low <= ratio <= high < 1
    assert chunked.ratio_to(chunked) == (1.0, 1.0, 1.0)
    assert study.rows()[0]["gpu_seconds_per_request"] == pytest.approx(1 / chunked.rate)
    again = find_capacities(axes, BASE, draws, study.objective, count=3, tolerance=0.05)
    assert again.rows() == study.rows()


def test_draws_are_pieces_of_a_long_trace_and_resampled_from_a_short_one() -> None:
    file = str(ROOT / "examples/trace.csv")
    long = draw_plan({"file": file}, arrivals=None, requests=500, draws=3, seed=0)
    first, second = draw_of(long, 0), draw_of(long, 1)
    assert long["arrivals"] == "own"
    assert len(first) == len(second) == 500
    assert second.arrival_ns[0] == 0
    assert not (first.prompt_tokens == second.prompt_tokens).all()
    short = draw_plan({"file": file, "first": [0, 200]}, arrivals=None, requests=500, draws=3, seed=0)
    assert short["arrivals"] == "poisson:1"
    assert len(draw_of(short, 2)) == 500
    assert draw_of(short, 2).same_requests(draw_of(short, 2))


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [("own", "too few for 5 pieces"), ("often", "expected own, poisson, uniform or gamma:CV")],
)
def test_draws_that_cannot_be_made_are_one_clear_line(arrivals: str, message: str) -> None:
    workload = {"file": str(ROOT / "examples/trace.csv"), "first": [0, 200]}
    with pytest.raises(ExperimentError, match=message):
        draw_plan(workload, arrivals=arrivals, requests=1000, draws=5, seed=0)


def test_an_objective_on_gaps_alone_gets_a_rule_for_the_queue() -> None:
    assert Objective.of("tbt_p99=0.2").queue_delay_s == 2.0
    assert Objective.of("tbt_p99=0.2,ttft_p50=9").queue_delay_s is None
    assert "95% of requests meet" in Objective.of("e2e_p50=1", 0.95).spoken()
    with pytest.raises(ExperimentError, match="--attainment"):
        Objective.of("ttft_p99=1", 1.5)
    with pytest.raises(MetricsError):
        Objective.of("ttft=1")


def test_the_smallest_cluster_meets_the_objective_and_one_replica_less_does_not() -> None:
    trace = {"requests": 150, "arrivals": "poisson:40", **GENERATED}
    objective = asdict(Objective.of("ttft_p90=0.6,tbt_p99=0.06"))
    task: dict[str, Any] = {"trace": trace, "config": {**BASE, "knobs": {}}, "objective": objective}
    found = smallest_cluster(task)
    replicas = found["replicas"]
    assert replicas > 1
    assert found["tried"][str(replicas)]["holds"]
    assert not found["tried"][str(replicas - 1)]["holds"]
    never = smallest_cluster({**task, "objective": asdict(Objective.of("tbt_p50=0.000001"))})
    assert never["replicas"] is None


def test_a_price_is_spoken_with_its_date_and_source_and_a_band(tmp_path: Path) -> None:
    book = tmp_path / "prices.toml"
    book.write_text(
        '[[price]]\ngpu = "h100"\namount = 3.6\ncurrency = "EUR"\nper = "GPU-hour"\nprovider = "Somebody"\n'
        'region = "eu"\ncommitment = "none"\ndate = 2026-01-31\nsource = "a quote"\n'
    )
    (price,) = read_prices(None, book)
    assert price.band(1000) == "1.00 EUR (0.70 to 1.30)"
    assert price.spoken() == "3.6 EUR per GPU-hour (Somebody, eu, none), 2026-01-31, source: a quote"
    assert prices_for([price], "a100") == []
    assert read_prices("2 USD", None) == [Price(2.0, "USD", source="given as --price")]
    for text, message in [
        ("cheap", "key=value"),
        ("amount=-1,currency=EUR", "amount: found -1"),
        ("amount=1", "no currency"),
    ]:
        with pytest.raises(ExperimentError, match=message):
            read_prices(text, None)
    book.write_text('[[price]]\ngpu = "h100"\namount = 3.6\ncurrency = "EUR"\n')
    with pytest.raises(ExperimentError, match="found no date"):
        read_prices(None, book)


def test_the_command_prints_a_capacity_with_its_interval_and_money_only_when_asked() -> None:
    command = [
        sys.executable,
        "-m",
        "experiments",
        "capacity",
        "--prompt",
        "fixed:500",
        "--output",
        "fixed:30",
        "--gpus",
        "a100",
        "--slo",
        "ttft_p90=0.2,tbt_p99=0.05",
        "--requests",
        "100",
        "--draws",
        "2",
        "--tolerance",
        "0.1",
        "--workers",
        "0",
        "--set",
        "cost_model=roofline",
    ]
    plain = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "requests/s" in plain
    assert "uncalibrated" in plain
    assert "USD" not in plain
    priced = subprocess.run(
        [*command, "--price", "2 USD", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    content = json.loads(priced)
    assert content["settings"][0]["requests_per_s"] > 1
    assert "per GPU-hour" in content["prices"][0]["price"]


def test_draws_are_made_long_enough_to_see_a_queue_that_never_ends() -> None:
    draws = draw_plan(GENERATED, arrivals="poisson", requests=100, draws=2, seed=0)
    objective = Objective.of("ttft_p90=0.4")
    study = find_capacities({"policy": ["chunked"]}, BASE, draws, objective, count=2, tolerance=0.1)
    assert objective.span_s() == pytest.approx(12)
    # As many requests as arrive in 12 s at saturation; at capacity they take a little longer.
    assert 12 <= study.draws["requests"] / study.settings[0].rate < 20


def test_the_report_of_the_smallest_cluster_holds_every_size_that_was_tried(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from typer.testing import CliRunner

    from experiments.__main__ import build

    page = tmp_path / "smallest.html"
    done = CliRunner().invoke(
        build(),
        ["capacity", "examples/trace.csv", "--gpus", "a100", "--smallest", "--engine", "local", "--report", str(page)],
    )
    assert done.exit_code == 0, done.output
    assert "Sizes that were tried" in page.read_text()
    assert "a100: 2 replicas" in page.read_text()


def test_the_smallest_cluster_heeds_the_seed_of_arrivals_and_refuses_what_it_does_not_use() -> None:
    command = [
        "experiments",
        "capacity",
        "examples/trace.csv",
        "--smallest",
        "--workers",
        "0",
        "--json",
        "--gpus",
        "h100",
        "--set",
        "cost_model=roofline",
    ]
    poisson = ["--arrivals", "poisson:5", "--seed"]
    sizes = [json.loads(run(*command, *poisson, seed).out)["settings"][0]["tried"]["1"] for seed in ("1", "2", "1")]
    assert sizes[0] == sizes[2] != sizes[1]
    ended = run(*command, "--draws", "3")
    assert ended.code == 2
    assert "--draws: found beside --smallest" in ended.err


def test_what_no_label_says_is_said_once_above_the_settings() -> None:
    command = [
        "experiments",
        "capacity",
        "examples/trace.csv",
        "--gpus",
        "a100,h100",
        "--workers",
        "0",
        "--set",
        "cost_model=roofline",
    ]
    ended = run(*command, "--smallest")
    assert ended.out.splitlines()[1] == "of policy chunked, model llama-3.1-8b, tp 1, pp 1, cost model roofline"
    assert _held({"policy": ["orca"], "gpu": ["a100"]}, {"model": "m", "gpu": "h100", "tp": 2}) == (
        "policy orca, model m, gpu a100, tp 2"
    )


def test_a_chunk_size_is_said_of_the_policies_that_have_one() -> None:
    base = {"model": "m", "tp": 1}
    assert (
        _held({"policy": ["chunked", "vllm_v1"], "chunk_size": [512]}, base)
        == "chunk size 512 for chunked alone, model m, tp 1"
    )
    assert (
        _held({"policy": ["chunked", "decode_maximal"], "chunk_size": [512]}, base) == "chunk size 512, model m, tp 1"
    )
    assert _held({"policy": ["vllm_v1"], "chunk_size": [512]}, base) == "policy vllm_v1, model m, tp 1"
    assert _held({"policy": ["chunked", "vllm_v1"]}, base) == "model m, tp 1"
