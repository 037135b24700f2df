"""ServeGen's clients: rates, shapes and length histograms become requests."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.shared_data import ORIGINALS
from workloads import TraceError, read_trace
from workloads.reading import servegen
from workloads.reading.servegen import Client, arrival_times_s, read_client

SERVEGEN = ORIGINALS / "traces/servegen_r1"
"""Two clients, three hours of their day (from 17:00)."""


def folder(path: Path, windows: str, histograms: dict[str, dict[str, str]]) -> Path:
    (path / "chunk-3-trace.csv").write_text(windows)
    (path / "chunk-3-dataset.json").write_text(json.dumps(histograms))
    return path


def test_clients_have_about_the_expected_requests() -> None:
    trace = read_trace(SERVEGEN, seed=1)
    expected = {
        name: (read_client(SERVEGEN / f"{name}-trace.csv").rates * 600).sum() for name in ("chunk-1", "chunk-11")
    }
    counts = dict(zip(trace.provenance["clients"], trace.provenance["requests_per_client"]))
    assert trace.source_format == "servegen"
    assert trace.tenant is not None
    assert dict(Counter(trace.tenant)) == counts
    assert counts["chunk-1"] == pytest.approx(expected["chunk-1"], rel=0.05)
    assert counts["chunk-11"] == pytest.approx(expected["chunk-11"], rel=0.05)
    assert "prompt and answer lengths shared" in trace.notes[0]


def test_a_window_is_a_part_of_the_day() -> None:
    day, hour = read_trace(SERVEGEN, seed=1), read_trace(SERVEGEN, seed=1, window_s=(64_800, 68_400))
    part = day.between(64_800, 68_400)
    assert hour.same_requests(part)
    assert 3000 < len(hour) < 8000


def test_coupling_is_a_choice(tmp_path: Path) -> None:
    lengths = {"0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{1: 0.5, 2: 0.5}"}}
    path = folder(tmp_path, "0,1,1,,0,0\n600,1,1,Gamma,1,1\n", lengths)
    shared, independent = (read_trace(path, coupling=coupling) for coupling in ("shared", "independent"))
    assert (shared.prompt_tokens == 10 * shared.output_tokens).all()
    assert (shared.prompt_tokens == 10).mean() == pytest.approx(0.5, abs=0.06)
    assert (independent.prompt_tokens == 10 * independent.output_tokens).mean() == pytest.approx(0.5, abs=0.06)
    with pytest.raises(TraceError, match="expected one of shared, independent"):
        read_trace(path, coupling="other")


def test_lengths_change_with_their_window(tmp_path: Path) -> None:
    lengths = {
        "0": {"input_tokens": "{10: 1.0}", "output_tokens": "{1: 1.0}"},
        "600": {"input_tokens": "{20: 1.0}", "output_tokens": "{2: 1.0}"},
        "1200": {"input_tokens": "{}", "output_tokens": "{}"},
    }
    trace = read_trace(folder(tmp_path, "0,1,1,,0,0\n600,1,1,Weibull,2,1\n1200,0,0,,0,0\n", lengths))
    early = trace.arrival_ns < 600_000_000_000
    assert set(trace.prompt_tokens[early]) == {10}
    assert set(trace.output_tokens[~early]) == {2}
    assert trace.arrival_ns[-1] < 1_200_000_000_000


@pytest.mark.parametrize(("kind", "shape", "cv"), [("Gamma", 0.25, 2.0), ("Weibull", 0.5, 5**0.5), ("", 1.0, 1.0)])
def test_gaps_keep_shape_and_rate(kind: str, shape: float, cv: float) -> None:
    """CV of Gamma(k) is 1/sqrt(k); of Weibull(1/2) sqrt(5)."""
    client = Client("c", np.array([0.0, 20_000.0]), np.array([1.0, 2.0]), (kind, kind), np.array([shape, shape]), ())
    times = np.concatenate(list(arrival_times_s(client, np.random.default_rng(0))))
    assert (times < 20_000).sum() == pytest.approx(20_000, rel=0.06)
    assert (times >= 20_000).sum() == pytest.approx(40_000, rel=0.06)
    gaps = np.diff(times[times < 20_000])
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize(
    ("windows", "histogram", "message"),
    [
        ("0,x,1,,0,0\n", "{1: 1}", "row 1, column 2: found 'x', expected a number from 0"),
        ("0,1,1,Pareto,0,0\n", "{1: 1}", "row 1, column 4: found 'Pareto', expected Gamma, Weibull or nothing"),
        ("0,1,1\n", "{1: 1}", "row 1: found 3 cells, expected start, rate, CV"),
        ("0,1,1,Gamma,0,0\n", "{1: 1}", "row 1, column 5: found '0'"),
        ("600,1,1,,0,0\n0,1,1,,0,0\n", "{1: 1}", "row 2, column 1: found 0, expected a later start"),
        ("0,1,1,,0,0\n", "{1: }", "input_tokens: found '1:', expected a text such as"),
        ("0,1,1,,0,0\n", "__import__('os')", "expected a text such as"),
        ("0,1,1,,0,0\n", "{1: -1}", "expected lengths of 0 or more and probabilities above 0"),
        ("0,1,1,,0,0\n", "{}", "found rates but no lengths"),
        ("0,0,1,,0,0\n", "{1: 1}", "found no request in this window"),
    ],
)
def test_broken_clients_are_named(tmp_path: Path, windows: str, histogram: str, message: str) -> None:
    path = folder(tmp_path, windows, {"0": {"input_tokens": histogram, "output_tokens": "{1: 1}"}})
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert message in str(caught.value)


def test_a_missing_dataset_is_said(tmp_path: Path) -> None:
    (tmp_path / "chunk-0-trace.csv").write_text("0,1,1,,0,0\n")
    with pytest.raises(TraceError, match=r"chunk-0-dataset\.json: cannot be read"):
        read_trace(tmp_path)


def test_a_limit_and_a_window_take_a_part_of_what_is_drawn_and_only_that_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = {"0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{1: 0.5, 2: 0.5}"}}
    path = folder(tmp_path, "0,5,1,Gamma,0.5,1\n600,0,1,,0,0\n1200,20,1,,0,0\n", lengths)
    monkeypatch.setattr(servegen, "_AT_ONCE", 100)  # a client's day in many parts
    day = read_trace(path, seed=2)
    assert len(day) > 10_000
    monkeypatch.setattr(servegen, "_MAX_REQUESTS", 2_000)
    with pytest.raises(TraceError, match="more than 2,000 requests, expected fewer; pass a narrower --window, or"):
        read_trace(path, seed=2)
    assert read_trace(path, seed=2, limit=500).same_requests(day.head(500))
    window = read_trace(path, seed=2, window_s=(1250, 1300))
    assert window.same_requests(day.between(1250, 1300))
    both = read_trace(path, seed=2, window_s=(500, 1300), limit=700)
    assert both.same_requests(day.between(500, 1300).head(700))
