"""The arena: parts, knob spaces, verdicts by hand, and a whole small contest."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.__main__ import build
from experiments.arena.command import _entrants
from experiments.arena.knob_space import knob_space, told_by
from experiments.arena.match import Part, own_rate, parse_objective, parts_of, piece_of, workload_of
from experiments.arena.verdict import pareto, ranking
from experiments.errors import ExperimentError

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def trace_file(folder: Path, rows: int) -> Path:
    path = folder / "mine.csv"
    path.write_text(
        HEADER + "".join(f"{0.05 * row:.3f},{200 + 37 * row % 900},{5 + row % 20}\n" for row in range(rows))
    )
    return path


def test_the_first_piece_tunes_and_the_others_judge(tmp_path: Path) -> None:
    workload = workload_of(str(trace_file(tmp_path, 170)), None, 165, 0, {})
    tune, judge = parts_of(workload, 3)
    assert (tune, judge) == (Part(0, 41), (Part(41, 82), Part(82, 123), Part(123, 164)))
    piece = piece_of(workload.settings, judge[0])
    assert (len(piece), int(piece.arrival_ns[0])) == (41, 0)
    assert own_rate(piece) == pytest.approx(20.0)
    with pytest.raises(ExperimentError, match="165 requests are too few for 5 pieces of at least 40"):
        parts_of(workload, 4)


def test_a_workload_may_have_bounds_of_its_own(tmp_path: Path) -> None:
    path = trace_file(tmp_path, 10)
    assert workload_of(f"{path}@ttft_p99=30", "ttft_p99=2", 10, 0, {}).slo == "ttft_p99=30"
    assert workload_of("code", None, 10, 0, {}).slo == "ttft_p99=0.45,tbt_p99=0.04"
    assert parse_objective("goodput@ttft_p99=2,tbt_p99=0.2") == "ttft_p99=2,tbt_p99=0.2"
    assert parse_objective("goodput") is None
    with pytest.raises(ExperimentError, match="expected goodput@BOUNDS"):
        parse_objective("speed")


def test_knobs_are_tried_around_their_defaults_and_bounds_of_the_objective_are_told() -> None:
    space = knob_space("chunked", {})
    assert (space["chunk_size"].low, space["chunk_size"].high, space["chunk_size"].log) == (64, 4096, True)
    assert "max_num_seqs" in space
    assert "token_budget" not in space
    assert "token_budget" in knob_space("vllm_v1", {})
    assert "chunk_size" not in knob_space("chunked", {"chunk_size": 7})
    assert told_by("slo_aware", "ttft_p99=2,tbt_p99=0.2,tbt_p50=0.1") == {"ttft_s": 2.0, "tbt_s": 0.1}
    assert told_by("chunked", "ttft_p99=2") == {}


def test_a_lead_beyond_chance_wins_and_one_within_it_does_not() -> None:
    # Differences 0.10, 0.12, 0.08, 0.10: mean 0.10, deviation 0.016330, t(0.9875, 3) = 4.1765 for two rivals.
    a, b = [0.9, 0.92, 0.88, 0.9], [0.8, 0.8, 0.8, 0.8]
    found = ranking({"b": b, "a": a, "c": [0.95, 0.7, 0.96, 0.98]})
    assert list(found.scores) == ["a", "c", "b"]
    assert (found.wins, found.tied) == (False, ("a", "c"))
    rival = found.rivals[-1]
    assert (rival.name, rival.beaten) == ("b", True)
    assert rival.low == pytest.approx(0.10 - 4.1765 * 0.016330 / 2, abs=1e-5)
    assert ranking({"a": a, "b": b}).wins
    assert not ranking({"a": a, "b": a}).wins
    assert math.isinf(ranking({"a": [1.0], "b": [0.5]}).rivals[0].high)


def test_the_front_is_whom_nobody_beats_in_both() -> None:
    rows = {"a": (1.0, 0.3), "b": (2.0, 0.1), "c": (2.0, 0.2), "d": (3.0, 0.1)}
    assert pareto({name: {"ttft_s_p99": x, "tbt_s_p99": y} for name, (x, y) in rows.items()}) == ["a", "b"]


def test_policies_of_a_command_line_carry_their_fixed_knobs() -> None:
    entrants = _entrants("chunked:chunk_size=64,chunked,vllm_v1:token_budget=512")
    assert [(entrant.label, dict(entrant.fixed)) for entrant in entrants] == [
        ("chunked:chunk_size=64", {"chunk_size": 64}),
        ("chunked#2", {}) if entrants[1].label == "chunked#2" else (entrants[1].label, {}),
        ("vllm_v1:token_budget=512", {"token_budget": 512}),
    ]
    with pytest.raises(ExperimentError, match="expected knob=value with one of chunk_size"):
        _entrants("chunked:size=64")


def test_a_contest_is_played_goes_on_and_is_played_again(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    path, out = trace_file(tmp_path, 160), tmp_path / "arena"
    options = ["--policies", "chunked,shortest_prompt_first", "--objective", "goodput@ttft_p99=0.3,tbt_p99=0.05"]
    options += [
        "--slices",
        "3",
        "--draws",
        "1",
        "--trials",
        "3",
        "--workers",
        "0",
        "--requests",
        "160",
        "--loads",
        "1.5",
    ]
    first = CliRunner().invoke(build(), ["arena", str(path), *options, "--out", str(out), "--json"])
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert set(found["settings"]) == {"chunked", "shortest_prompt_first"}
    assert all(
        each["tried"] == 3 and each["score_tuned"] >= each["score_default"] for each in found["settings"].values()
    )
    assert found["overall"]["blocks"] == 3
    matches = (out / "matches.jsonl").read_text()
    second = CliRunner().invoke(build(), ["arena", str(path), *options, "--out", str(out), "--json"])
    assert json.loads(second.stdout) == found, "what was played is taken as it is"
    assert (out / "matches.jsonl").read_text() == matches
    assert found["sentence"] in (out / "arena.md").read_text()
    assert (out / "arena.png").stat().st_size > 5000
    again = tomllib.loads((out / "arena.toml").read_text())
    assert [row["knobs"] for row in again["policies"]] == [each["knobs"] for each in found["settings"].values()]
    third = CliRunner().invoke(
        build(), ["arena", str(out / "arena.toml"), "--out", str(tmp_path / "again"), "--workers", "0", "--json"]
    )
    assert third.exit_code == 0, third.output
    assert json.loads(third.stdout)["overall"] == found["overall"]


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for arguments, said in (
        (["nothing.csv"], "nothing.csv: found no such trace file"),
        (["chat", "--loads", "0"], "--loads: found '0'"),
        (["chat", "--budget", "soon"], "--budget: found 'soon'"),
        (["chat", "chat"], "found two workloads of one name"),
        (["chat", "--set", "speed=3"], "--set: found 'speed=3'"),
    ):
        result = CliRunner().invoke(build(), ["arena", *arguments, "--out", str(tmp_path / "x")])
        assert isinstance(result.exception, ExperimentError), arguments
        assert said in str(result.exception)
