"""The command line: thin, JSON only where asked for, one line and exit code 2 for what is wrong."""

import json
from pathlib import Path

import pytest

from tests.hardening.command_line import run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    rows = "".join(f"{second},{100 + second},{10 + second}\n" for second in range(11))
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    return path


def test_describe_counts_what_is_there(trace: Path) -> None:
    result = run("workloads", "describe", str(trace), "--json")
    numbers = json.loads(result.out)
    assert result.code == 0
    assert (numbers["requests"], numbers["span_s"], numbers["rate"], numbers["gap_cv"]) == (11, 10.0, 1.0, 0.0)
    assert (numbers["prompt_tokens_p50"], numbers["output_tokens_max"]) == (105.0, 20)
    assert numbers["pd_ratio"] == 1155 / 165
    assert numbers["length_correlation"] == pytest.approx(1)
    assert numbers["shared_prompt_share"] is None


def test_describe_tells_how_much_of_the_prompts_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1, 2]}\n'
        '{"timestamp": 9, "input_length": 1000, "output_length": 1, "hash_ids": [1, 3]}\n'
    )
    numbers = json.loads(run("workloads", "describe", str(path), "--json").out)
    assert numbers["shared_prompt_share"] == 512 / 2000


def test_describe_draws_a_figure(trace: Path, tmp_path: Path) -> None:
    figure = tmp_path / "out.png"
    assert run("workloads", "describe", str(trace), "--figure", str(figure)).code == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    result = run("workloads", "describe", str(trace), "--figure", str(tmp_path / "out.wrong"))
    assert result.code == 2
    assert list(tmp_path.glob(".*partial*")) == []


def test_options_reach_the_reader(trace: Path) -> None:
    options = ["--rate-scale", "2", "--window", "2:8", "--limit", "4", "--timeout", "3", "--json"]
    numbers = json.loads(run("workloads", "describe", str(trace), *options).out)
    assert (numbers["requests"], numbers["span_s"], numbers["clients_giving_up"]) == (4, 1.5, 4)


def test_convert_and_describe_agree(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    assert run("workloads", "convert", str(trace), str(out), "--arrivals", "closed:2,1").code == 0
    numbers = json.loads(run("workloads", "describe", str(out), "--json").out)
    assert (numbers["format"], numbers["closed_loop_requests"]) == ("parquet", 9)


def test_generate_writes_the_same_file_twice(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        options = ["--duration", "60", "--arrivals", "gamma:2,2", "--prompt", "zipf:0.4,1024,4096", "--pd-ratio", "10"]
        assert run("workloads", "generate", str(tmp_path / name), *options).code == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_generate_makes_presets_and_cases(tmp_path: Path) -> None:
    out = str(tmp_path / "t.csv")
    assert run("workloads", "generate", out, "--preset", "chat", "--duration", "20", "--rate", "3").code == 0
    assert run("workloads", "generate", out, "--case", "orca_best", "--clients", "2", "--output", "fixed:9").code == 0
    numbers = json.loads(run("workloads", "describe", out, "--json").out)
    assert (numbers["requests"], numbers["output_tokens_min"]) == (20, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["describe", "nowhere.csv"], "error: nowhere.csv: cannot be read"),
        (["describe", "."], "error: .: found a folder"),
        (["generate", "t.xls", "--requests", "3"], "found the ending '.xls', expected"),
        (["generate", "t.csv"], "expected either a number of requests or a duration"),
        (["generate", "t.csv", "--preset", "chat", "--prompt", "fixed:3"], "found --prompt with --preset"),
        (["generate", "t.csv", "--preset", "poetry"], "expected one of summarization"),
        (["generate", "t.csv", "--case", "orca_mean"], "expected orca_best or orca_worst"),
        (
            ["generate", "t.csv", "--requests", "3", "--clients", "3"],
            "found --clients without the --preset, --programs or --case",
        ),
        (["generate", "/dev/null/t.csv", "--requests", "3"], "cannot be written"),
    ],
)
def test_wrong_use_ends_in_one_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("workloads", *arguments)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""
    assert list(tmp_path.iterdir()) == []
