"""Generated workloads show the distributions that they were asked for, and come out the same every time."""

from pathlib import Path

import numpy as np
import pytest

from workloads import TraceError, generate, read_trace, write_trace
from workloads.generating.example import example_trace
from workloads.generating.lengths import parse, uniform_draws
from workloads.generating.presets import PRESETS, preset
from workloads.generating.random_streams import random_stream
from workloads.generating.rate_profiles import parse as parse_profile
from workloads.generating.sarathi_cases import orca_best, orca_worst

EXAMPLE = Path(__file__).parents[2] / "examples/trace.csv"
NS = 1_000_000_000


def test_the_example_is_what_the_generator_makes(tmp_path: Path) -> None:
    again = write_trace(example_trace(), tmp_path / "trace.csv")
    assert again.read_bytes() == EXAMPLE.read_bytes()


def test_the_example_has_the_shape_of_the_azure_conversation_trace() -> None:
    trace = read_trace(EXAMPLE)
    span_s = trace.arrival_ns[-1] / 1e9
    assert 595 < span_s < 600
    assert len(trace) / span_s == pytest.approx(5.5, rel=0.03)
    assert np.percentile(trace.prompt_tokens, [50, 90, 99]) == pytest.approx([1020, 2734, 4142], rel=0.01)
    assert np.percentile(trace.output_tokens, [50, 90, 99]) == pytest.approx([129, 424, 601], rel=0.01)


def test_same_seed_same_trace_and_lengths_do_not_depend_on_the_rate() -> None:
    slow, again, fast = (
        generate(requests=500, arrivals=f"poisson:{rate}", prompt="uniform:1,4000", seed=5) for rate in (1, 1, 2)
    )
    assert slow.same_requests(again)
    assert slow.prompt_tokens.tolist() == fast.prompt_tokens.tolist()
    assert np.abs(slow.arrival_ns - 2 * fast.arrival_ns).max() <= 2000


def test_zipf_lengths_follow_their_law() -> None:
    """theta 1 over 1..3: weights 1, 1/2, 1/3 of 11/6."""
    lengths = parse("zipf:1,1,3").of(np.array([0.0, 0.545, 0.546, 0.818, 0.819, 0.999]))
    assert lengths.tolist() == [1, 1, 2, 2, 3, 3]


def test_sarathis_zipf_workload_has_its_bounds_and_ratio() -> None:
    """SARATHI, section 5: sequences of 1K to 4K tokens, theta 0.4, P:D 10."""
    trace = generate(requests=2000, arrivals="burst", total="zipf:0.4,1024,4096", pd_ratio=10)
    total = trace.prompt_tokens + trace.output_tokens
    assert total.min() >= 1024
    assert total.max() <= 4096
    assert np.median(total) < 2560
    assert trace.prompt_tokens.sum() / trace.output_tokens.sum() == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize(
    ("text", "levels", "expected"),
    [
        ("fixed:7", [0, 0.5, 0.99], [7, 7, 7]),
        ("uniform:1,4", [0, 0.25, 0.5, 0.999], [1, 2, 3, 4]),
        ("lognormal:100,1", [0.5, 0.841344746], [100, 272]),
        ("lognormal:100,1,50,200", [0.01, 0.5, 0.99], [50, 100, 200]),
        ("quantiles:0=10,50=100,100=1000", [0, 0.25, 0.5, 0.75], [10, 32, 100, 316]),
        ("geometric:2", [0, 0.49, 0.51, 0.74, 0.76], [1, 1, 2, 2, 3]),
    ],
)
def test_length_distributions_at_points_worked_by_hand(text: str, levels: list[float], expected: list[int]) -> None:
    assert parse(text).of(np.array(levels)).tolist() == expected


def test_stratified_draws_fill_every_slice_once() -> None:
    draws = uniform_draws(1000, np.random.default_rng(1), stratified=True)
    assert sorted((draws * 1000).astype(int).tolist()) == list(range(1000))


def test_empirical_lengths_and_pairs_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens\n10,1\n20,2\n30,3\n")
    trace = generate(requests=300, arrivals="burst", lengths=str(path))
    assert set(trace.prompt_tokens) == {10, 20, 30}
    assert (trace.prompt_tokens == 10 * trace.output_tokens).all()
    loose = generate(requests=300, arrivals="burst", prompt=f"empirical:{path}", output=f"empirical:{path}")
    assert set(loose.output_tokens) == {1, 2, 3}
    assert (loose.prompt_tokens != 10 * loose.output_tokens).any()


def gap_cv(arrival_ns: np.ndarray) -> float:
    gaps = np.diff(arrival_ns)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize(
    ("arrivals", "cv"), [("poisson:4", 1.0), ("gamma:4,0.5", 0.5), ("gamma:4,3", 3.0), ("uniform:4", 0)]
)
def test_arrival_processes_keep_rate_and_cv(arrivals: str, cv: float) -> None:
    trace = generate(requests=40_000, arrivals=arrivals, seed=2)
    assert len(trace) / (trace.arrival_ns[-1] / NS) == pytest.approx(4, rel=0.05)
    assert gap_cv(trace.arrival_ns) == pytest.approx(cv, rel=0.05, abs=1e-3)


def test_a_fixed_number_of_clients_is_a_closed_loop() -> None:
    trace = generate(requests=5, arrivals="closed:2,1.5")
    assert trace.after_row.tolist() == [-1, -1, 0, 1, 2]
    assert trace.think_ns.tolist() == [0, 0, 3 * NS // 2, 3 * NS // 2, 3 * NS // 2]
    assert trace.arrival_ns.tolist() == [0, 0, 3 * NS // 2, 3 * NS // 2, 3 * NS]
    assert trace.followers() == {0: [2], 1: [3], 2: [4]}


def test_arrivals_of_another_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n1,1,1\n2.5,1,1\n")
    assert generate(requests=2, arrivals=f"trace:{path}").arrival_ns.tolist() == [NS, 5 * NS // 2]
    with pytest.raises(TraceError, match="has 2 arrival times, expected at least 3"):
        generate(requests=3, arrivals=f"trace:{path}")


@pytest.mark.parametrize(
    ("profile", "edges_s", "expected"),
    [
        ("constant", [0, 50, 100], [500, 500]),
        ("step:50,3", [0, 50, 100], [500, 1500]),
        ("spike:40,10,5", [0, 40, 50, 100], [400, 500, 500]),
        ("spike:40,10,0", [0, 40, 50, 100], [400, 0, 500]),
        (
            "diurnal:100,1",
            [0, 25, 75, 100],
            [250 - 1000 / (2 * np.pi), 500 + 2000 / (2 * np.pi), 250 - 1000 / (2 * np.pi)],
        ),
    ],
)
def test_rate_profiles_put_requests_where_they_say(profile: str, edges_s: list[float], expected: list[float]) -> None:
    trace = generate(duration_s=100, arrivals="uniform:10", profile=profile)
    counts, _ = np.histogram(trace.arrival_ns / NS, bins=edges_s)
    assert counts == pytest.approx(expected, abs=2)


@pytest.mark.parametrize("text", ["constant", "step:50,3", "spike:40,10,5", "diurnal:100,0.7"])
def test_a_profile_and_its_inverse_agree(text: str) -> None:
    profile = parse_profile(text)
    ticks = np.linspace(0, 400, 50)
    assert [profile.ticks_at(time) for time in profile.times_at(ticks)] == pytest.approx(ticks.tolist(), abs=1e-6)


def test_orca_worst_case_ends_all_together_and_best_case_one_by_one() -> None:
    worst, best = orca_worst(4, 3, 1024, 8), orca_best(4, 3, 1024, 8)
    assert worst.output_tokens.tolist() == [8] * 12
    assert best.output_tokens.tolist() == [2, 4, 6, 8] + [8] * 8
    for trace in (worst, best):
        assert trace.after_row.tolist() == [-1, -1, -1, -1, 0, 1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(TraceError, match="expected at least the 9 clients"):
        orca_best(9, 1, 1024, 8)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_make_the_workload_that_they_describe(name: str) -> None:
    chosen = preset(name)
    trace = chosen.trace(duration_s=600)
    assert len(trace) == pytest.approx(600 * chosen.rate, rel=0.25)
    assert set(chosen.slo) == {"ttft_p99", "tbt_p99"}
    assert len(chosen.source) > 100


def test_preset_ratios_tell_the_jobs_apart() -> None:
    ratios = {}
    for name in PRESETS:
        trace = preset(name).trace(duration_s=1000, seed=1)
        ratios[name] = trace.prompt_tokens.sum() / trace.output_tokens.sum()
    assert ratios["code"] > 50 > ratios["summarization"] > ratios["chat"] > 2 > ratios["translation"] > 0.9
    assert ratios["reasoning"] < 0.5
    with pytest.raises(TraceError, match="expected one of summarization, chat, translation, code, reasoning"):
        preset("poetry")


def test_classes_and_patience() -> None:
    trace = generate(requests=4000, arrivals="poisson:1", slo="fast=3,slow=1", timeout="fixed:2.5")
    assert trace.slo.count("fast") / 4000 == pytest.approx(0.75, abs=0.03)
    assert set(trace.abort_ns - trace.arrival_ns) == {5 * NS // 2}
    assert trace.timeout_ns(7) == 5 * NS // 2


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"requests": 5, "duration_s": 5},
        {"requests": 0},
        {"duration_s": 5, "arrivals": "burst"},
        {"duration_s": float("nan")},
        {"duration_s": 1e9, "arrivals": "poisson:1000"},
        {"requests": 5, "arrivals": "poisson:0"},
        {"requests": 5, "arrivals": "gamma:1"},
        {"requests": 5, "arrivals": "closed:0.5"},
        {"requests": 5, "prompt": "fixed:0"},
        {"requests": 5, "prompt": "uniform:5,4"},
        {"requests": 5, "prompt": "zipf:0.4,1"},
        {"requests": 5, "prompt": "zipf:0.4,1,1e12"},
        {"requests": 5, "prompt": "quantiles:50=10,40=20"},
        {"requests": 5, "prompt": "normal:5"},
        {"requests": 5, "prompt": "empirical:/nowhere"},
        {"requests": 5, "pd_ratio": 0.0},
        {"requests": 5, "total": "fixed:100"},
        {"requests": 5, "total": "fixed:1", "pd_ratio": 1.0},
        {"requests": 5, "profile": "sawtooth:3"},
        {"requests": 5, "profile": "step:1,0"},
        {"requests": 5, "slo": "fast"},
        {"requests": 5, "timeout": "fixed:-1"},
        {"requests": 5, "turns": "fixed:2", "think": "soon"},
        {"requests": 5, "turns": "fixed:2", "arrivals": "closed:2"},
        {"requests": 5, "seed": -1},
    ],
)
def test_what_cannot_be_generated_is_said(wrong: dict[str, object]) -> None:
    with pytest.raises(TraceError, match=r"expected|cannot be read"):
        generate(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, True, 0.5, "1"])
def test_a_seed_that_numpy_would_not_take_is_refused_in_one_line(seed: object) -> None:
    with pytest.raises(TraceError, match=r"seed: found .*, expected a whole number of 0 or more"):
        random_stream(seed, 3)  # type: ignore[arg-type]
    assert random_stream(5, 3).random() == np.random.default_rng([5, 3]).random()
