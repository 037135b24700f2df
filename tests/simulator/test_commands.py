"""The command line: what it prints, what it refuses, and that a refusal is one line and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from policies.registry import BUILT_IN
from simulator.commands.options import read_config_file
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.simulation import replay as replay_trace
from tests.hardening.command_line import assert_refused
from tests.hardening.command_line import run as run_command
from tests.simulator.constant_cost import trace_of
from workloads import read_trace

ROOT = Path(__file__).resolve().parents[2]
GOOD = "arrival,prompt,output\n0,100,5\n0.5,200,7\n1.5,50,3\n"


def simulator(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "simulator", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(GOOD)
    return path


def test_json_is_all_that_json_prints(trace, tmp_path):
    done = simulator(
        "replay", trace, "--json", "--policy", "vllm_v1", "--async", "--cost-model", "roofline", cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert (summary["requests"], summary["finished"], summary["policy"]) == (3, 3, "vllm_v1")
    assert summary["calibrated"] is False


def test_the_config_of_a_run_makes_the_same_run_again(trace, tmp_path):
    flags = ("--policy", "decode_maximal", "--align", "shrink", "--chunk-size", "128", "--tp", "2", "--gpu", "a100")
    first = simulator("replay", trace, *flags, "--cost-model", "roofline", "--out", "one", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    second = simulator("replay", "--config", "one/config.json", "--out", "two", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    one, two = (json.loads((tmp_path / run / "config.json").read_text()) for run in ("one", "two"))
    assert one == two
    assert one["knobs"] == {"chunk_size": 128, "align": "shrink"}
    assert (tmp_path / "one/summary.json").read_text() == (tmp_path / "two/summary.json").read_text()


def test_a_toml_config_takes_every_flag_and_a_given_flag_wins(trace, tmp_path):
    (tmp_path / "run.toml").write_text(
        f'trace = "{trace}"\npolicy = "chunked"\ncost-model = "roofline"\ntp = 2\nmax_num_seqs = 7\n[knobs]\nchunk_size = 99\n'
    )
    done = simulator("replay", "--config", "run.toml", "--tp", "1", "--out", "run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert (config["tp"], config["max_num_seqs"], config["knobs"]["chunk_size"]) == (1, 7, 99)


@pytest.mark.parametrize(
    ("top", "replay", "refused"),
    [
        ({}, {"limit": 2}, None),
        ({"token_budget": 77}, {}, "token_budget"),
        ({"policy": "orca"}, {"limit": 2}, "policy"),
        ({"limit": 2}, {}, "limit"),
        ({"chunk_size": 9}, {}, "chunk_size"),
        ({"tp": 2}, {"tp": 2}, None),
    ],
)
def test_a_setting_of_a_runs_config_that_was_changed_where_nothing_reads_it_is_refused(
    trace, tmp_path, top, replay, refused
):
    config = {**json.loads(json.dumps(_ran(trace, tmp_path / "run"))), **top}
    config["replay"].update(replay)
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    if refused is None:
        assert replay.items() <= read_config_file(tmp_path / "run").items()
        return
    with pytest.raises(
        SimulationError, match=rf"{refused} was changed outside the table `replay`, which alone is read"
    ):
        read_config_file(tmp_path / "run")


def _ran(trace, out):
    read, config = read_trace(trace), ReplayConfig(cost_model="roofline")
    run = replay_trace(read, config)
    run.write(out)
    return json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("package", ["simulator", "executor"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "chunk_size = 3\n[knobs]\nchunk_size = 4\n",
            "found chunk_size 3 and knobs.chunk_size 4, expected one of them",
        ),
        ("max-num-seqs = 3\nmax_num_seqs = 4\n", "found 'max_num_seqs' twice, as max_num_seqs and max-num-seqs"),
    ],
)
def test_a_setting_that_stands_twice_in_a_file_is_refused(trace, tmp_path, package, content, words):
    (tmp_path / "run.toml").write_text(content)
    assert words in assert_refused(run_command(package, "replay", trace, "--config", tmp_path / "run.toml"))


def test_files_of_a_config_are_those_beside_it_and_else_those_of_the_working_folder(
    trace, tmp_path, monkeypatch, capsys
):
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "run.toml").write_text('trace = "mine.csv"\npolicy = "p.py:Mine"\ngpu = "h100"\n')
    (tmp_path / "p.py").touch()
    (beside / "mine.csv").touch()
    (beside / "h100").touch()
    monkeypatch.chdir(tmp_path)
    read = read_config_file(beside / "run.toml")
    assert read == {"trace": str(beside / "mine.csv"), "policy": "p.py:Mine", "gpu": "h100"}
    (beside / "p.py").touch()
    assert capsys.readouterr().err == ""
    assert read_config_file(beside / "run.toml")["policy"] == f"{beside / 'p.py'}:Mine"
    assert capsys.readouterr().err.startswith(
        "note: p.py is the one beside the settings file, not the one in the working"
    )
    monkeypatch.chdir(beside)
    assert read_config_file(Path("run.toml"))["trace"] == "mine.csv", "named alike from both"


def test_a_run_is_not_made_again_from_files_that_have_changed(trace, tmp_path):
    (tmp_path / "my.py").write_text(MINE.format(size=16))
    done = simulator("replay", trace, "--policy", "my.py:Mine", "--out", "one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = ("replay", "--config", "one", "--out", "two")
    assert simulator(*again, cwd=tmp_path).returncode == 0
    (tmp_path / "my.py").write_text(MINE.format(size=64))
    trace.write_text(GOOD + "9,9,9\n")
    refused = simulator(*again, cwd=tmp_path)
    assert refused.returncode == 2
    assert "my.py (sha256" in refused.stderr
    assert "trace.csv (sha256" in refused.stderr
    assert simulator(*again, "--anyway", cwd=tmp_path).returncode == 0
    (tmp_path / "other.csv").write_text(GOOD)  # another trace that is asked for by name is no change, the policy is
    assert "trace" not in simulator("replay", "other.csv", *again[1:], cwd=tmp_path).stderr
    other = simulator("replay", "other.csv", *again[1:], "--policy", "orca", cwd=tmp_path)
    assert other.returncode == 0, other.stderr


MINE = """
import dataclasses
from policies import Policy, knob
from policies.chunked import Chunked


@dataclasses.dataclass(frozen=True)
class Mine(Chunked):
    chunk_size: int = knob({size}, "Prefill tokens of an iteration.")
"""


def test_policies_of_one_name_are_two_rows_and_two_folders(trace, tmp_path):
    for version, size in (("v1", 16), ("v2", 64)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "my.py").write_text(MINE.format(size=size))
    both = "v1/my.py:Mine,v2/my.py:Mine"
    done = simulator("compare", trace, "--policies", both, "--out", "study", "--figures", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert list(rows) == both.split(",")
    first, second = (row["iterations"] for row in rows.values())
    assert first > second
    folders = sorted(path.name for path in (tmp_path / "study").iterdir())
    assert folders == ["figures", "v1-my.py-Mine", "v2-my.py-Mine"]
    draws = simulator("compare", trace, "--policies", both, "--seeds", 2, "--json", cwd=tmp_path)
    assert all(f'"{label}"' in draws.stdout for label in both.split(","))


def test_compare_gives_each_policy_the_knobs_that_it_has(trace, tmp_path):
    done = simulator(
        "compare",
        trace,
        "--policies",
        "chunked,vllm_v1",
        "--chunk-size",
        "64",
        "--json",
        "--cost-model",
        "roofline",
        "--out",
        "runs",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == {"chunked", "vllm_v1"}
    assert json.loads((tmp_path / "runs/chunked/config.json").read_text())["knobs"]["chunk_size"] == 64


def test_classes_have_objectives_and_summaries_of_their_own(tmp_path):
    rows = [f"{0.2 * i},400,20,{'chat' if i % 2 else 'batch'}" for i in range(40)]
    (tmp_path / "mixed.csv").write_text("arrival,prompt,output,slo\n" + "\n".join(rows) + "\n")
    objective = "chat:ttft_p99=1,tbt_p99=0.1;batch:e2e_p99=0.001"
    flags = ("--cost-model", "roofline", "--slo", objective, "--out", "run")
    done = simulator("replay", "mixed.csv", "--policy", "slo_aware", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "by SLO class" in done.stdout
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    # Every chat request meets its objective, no batch request meets one millisecond.
    assert summary["slo_attainment"] == 0.5
    shown = subprocess.run(
        [sys.executable, "-m", "metrics", "show", "run", "--by", "slo", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert {name: row["slo_attainment"] for name, row in json.loads(shown.stdout).items()} == {
        "batch": 0.0,
        "chat": 1.0,
    }


def test_an_overloaded_run_says_so(tmp_path):
    rows = [f"{0.001 * i},4000,20" for i in range(200)]
    (tmp_path / "busy.csv").write_text("arrival,prompt,output\n" + "\n".join(rows) + "\n")
    done = simulator("replay", "busy.csv", "--cost-model", "roofline", cwd=tmp_path)
    assert "overloaded" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "chunkd"], ["chunkd", "chunked"]),
        (["--algin", "pad"], ["chunked has no knob 'algin'", "chunk_size"]),
        (["--polcy", "chunked"], ["found no flag --polcy", "did you mean --policy?"]),
        (["--max-num-batched-tokens", "512"], ["did you mean --token-budget?"]),
        (["--policy", "vllm_v1", "--chunk-size", "512"], ["no knob 'chunk_size'", "--token-budget"]),
        (["--policy", "decode_maximal", "--align", "sideways"], ["align", "sideways", "shrink, pad, none"]),
        (["--chunk-size", "0"], ["chunk_size", "found 0", "at least 1"]),
        (["--model", "llama-9"], ["llama-9"]),
        (["--gpu", "h1000"], ["h1000"]),
        (["--cost-model", "no/such/model.json"], ["no/such/model.json"]),
        (["--tp", "0"], ["--tp", "found 0"]),
        (["--tp", "3"], ["3"]),
        (["--rate-scale", "nan"], ["--rate-scale", "nan"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization", "1.5"]),
        (["--warmup", "soon"], ["soon"]),
        (["--slo", "ttft=fast"], ["ttft"]),
        (["--layer-split", "a,b"], ["--layer-split", "a,b"]),
        (["--config", "no.toml"], ["no.toml"]),
        (["--num-blocks", "1", "--out", "trace.csv"], ["trace.csv"]),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(trace, tmp_path, arguments, words):
    done = simulator("replay", trace, *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.csv"]


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("compare", ("--policy", "chunked"), "found no flag --policy; did you mean --policies?"),
        ("compare", ("--policies", "chunked,orca", "--enough", "3"), "none of chunked, orca has a knob 'enough'"),
        ("advise", ("--policy", "chunked"), "--policy: advise finds the policy"),
        ("advise", ("--chunk-size", "512"), "--chunk-size: advise finds the policy"),
        ("advise", ("--async",), "--async: advise finds the policy"),
        ("advise", ("--align", "pad"), "--align: advise finds the policy"),
    ],
)
def test_a_flag_of_another_command_is_named_and_advise_ignores_none(trace, command, arguments, words):
    assert words in assert_refused(run_command("simulator", command, trace, *arguments))


def test_bounds_too_long_to_be_seconds_are_doubted(trace):
    flags = ("replay", trace, "--cost-model", "roofline", "--slo")
    told = run_command("simulator", *flags, "ttft_p99=2000,tbt_p99=200")
    assert told.code == 0
    assert told.err.splitlines() == [
        "note: SLO: ttft_p99=2000 is 2,000 seconds; if milliseconds are meant, write ttft_p99=2",
        "note: SLO: tbt_p99=200 is 200 seconds; if milliseconds are meant, write tbt_p99=0.2",
    ]
    assert (
        run_command("simulator", *flags, "chat:tpot_mean=50;batch:ttft_p99=60,e2e_max=3600").err.count("note: SLO") == 1
    )
    assert run_command("simulator", *flags, "ttft_p99=2,tbt_p99=0.2").err == ""


def test_a_run_in_place_of_another_ones_says_so(trace, tmp_path):
    flags = ("replay", trace, "--cost-model", "roofline", "--out", tmp_path / "run")
    assert [run_command("simulator", *flags).err for _ in range(2)] == ["", ""]
    assert run_command("simulator", *flags, "--policy", "orca").err == (
        f"note: {tmp_path / 'run'}: the run there (simulated, chunked, llama-3.1-8b, h100, trace) is replaced by this one\n"
    )


def test_listed_rules_and_knobs_keep_their_indent_over_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")  # no title is so long, rules and knobs are
    lines = run_command("simulator", "policies").out.splitlines()
    assert [line.partition(" ")[0] for line in lines if not line.startswith("  ")] == list(BUILT_IN)
    assert any(line.startswith("    ") and not line.strip().startswith("--") for line in lines)
    assert any(line.startswith('    --classes ""  targets per SLO class') for line in lines)


def test_a_warm_up_of_all_requests_and_a_timeline_after_the_end_say_so(trace, tmp_path):
    flags = ("replay", trace, "--cost-model", "roofline")
    assert (
        "chunked: nothing was measured: all 3 requests are warm-up"
        in run_command("simulator", *flags, "--warmup", "3").out
    )
    assert "nothing was measured" not in run_command("simulator", *flags, "--warmup", "2").out
    ended = run_command("simulator", *flags, "--timeline", "500:600", "--out", tmp_path / "run")
    assert ended.err == "note: timeline: nothing ran from 500 s on: the run ended at 1.5 s\n"
    assert run_command("metrics", "timeline", tmp_path / "run", "--window", "500:").err == ended.err
    assert run_command("metrics", "timeline", tmp_path / "run", "--window", "1:600").err == ""


def test_settings_and_runs_given_as_a_trace_are_told_where_they_belong(trace, tmp_path):
    assert (
        run_command("simulator", "replay", trace, "--cost-model", "roofline", "--out", tmp_path / "all/run").code == 0
    )
    (tmp_path / "sweep.toml").write_text("[trace]\nrequests = 3\n")
    for given, words in (
        (
            "all/run/config.json",
            "one JSON object over several lines, expected one request per line; settings and a run's ",
        ),
        ("sweep.toml", "found a TOML file, expected a file of requests; settings go to --config"),
        (
            "all/run",
            f"found a folder, expected a file of requests; those of a run are {tmp_path / 'all/run/requests.parquet'}",
        ),
    ):
        assert words in assert_refused(run_command("simulator", "replay", tmp_path / given))
    assert "is no run folder but holds some: run; name one, as" in assert_refused(
        run_command("metrics", "show", tmp_path / "all")
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x01\x02\xff" * 50,
        b"arrival,prompt,output\n0,-5,5\n",
        b"arrival,prompt,output\n0,0,5\n",
        b"arrival,prompt,output\n0,,5\n",
        b"arrival,prompt,output\n0,many,5\n",
        b"arrival,prompt,output\n0,nan,5\n",
        b"arrival,prompt,output\n0,1e30,5\n",
        b"arrival,prompt,output\n5,10,5\n1,10,5\n",
        b"0,10,5\n1,10,5\n",
        b"arrival,prompt,prompt,output\n0,10,10,5\n",
        b'{"timestamp": 0, "input_length": 10, "output_le',
    ],
    ids=[
        "empty",
        "binary",
        "negative",
        "zero",
        "missing",
        "text",
        "nan",
        "1e30",
        "unsorted",
        "headless",
        "twice",
        "cut",
    ],
)
def test_a_bad_trace_is_one_line_that_names_the_file(tmp_path, content):
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    done = simulator("replay", path, "--out", "run", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "bad.csv" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbf" + GOOD.encode(), GOOD.replace("\n", "\r\n").encode(), GOOD.encode()[:-1]]
)
def test_a_byte_order_mark_crlf_and_a_missing_last_newline_are_fine(tmp_path, content):
    path = tmp_path / "fine.csv"
    path.write_bytes(content)
    done = simulator("replay", path, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"] == 3


def test_a_directory_is_no_trace(tmp_path):
    done = simulator("replay", tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_compare_goes_on_when_a_policy_fails_and_says_so_at_the_end(trace, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from policies.chunked import Chunked\n\n\nclass Breaks(Chunked):\n"
        "    def plan(self, queues, draft, kv, host, now_ns):\n        raise ZeroDivisionError('my own')\n"
    )
    flags = ("--gpu", "h100", "--json")
    done = simulator("compare", trace, "--policies", "mine.py:Breaks,orca", *flags, cwd=tmp_path)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["orca"]["finished"] == 3
    assert "ZeroDivisionError: my own" in found["Breaks"]["error"]
    assert "error: Breaks failed and is left out:" in done.stderr
    alone = simulator("compare", trace, "--policies", "mine.py:Breaks", *flags, cwd=tmp_path)
    assert alone.returncode == 1
    assert "ZeroDivisionError: my own" in alone.stderr
    assert not alone.stdout


@pytest.mark.parametrize("policy", BUILT_IN)
def test_prompts_and_batches_that_no_table_holds_end_no_run(policy):
    # 21 rows as long as the first of them are 2.1 million; a million tokens of prompt are more than any table has.
    for rows in ([(0.0, 100_000, 4)] + [(0.0, 10, 4)] * 20, [(0.0, 1_000_000, 3), (0.1, 500, 3)]):
        for gpu in ("h100", "a6000"):
            run = replay_trace(trace_of(rows), policy=policy, model="llama-3.1-8b", gpu=gpu, num_blocks=200_000)
            ends = run.tables.column("requests", "status").tolist()
            reasons = run.tables.column("requests", "reason").tolist()
            assert all(end == "finished" or (end == "rejected" and why) for end, why in zip(ends, reasons))
            assert run.summary["ttft_s_p50"] > 0


def test_notes_are_told_on_stderr_and_stand_in_every_json(tmp_path):
    """A priority that the policy does not use, and a column that nothing uses."""
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,priority,colour\n0,50,3,1,red\n1,50,3,0,blue\n")
    told = ["Not used: column 'colour'.", "column priority is not used: "]
    costs = ("--cost-model", "roofline", "--json")

    def notes(*words):
        done = simulator(*words, *costs, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        for note in told:
            assert f"note: {note}" in done.stderr
        return found

    def holds(found):
        assert len(found) >= len(told)
        assert all(any(note.startswith(start) for note in found) for start in told)

    holds(notes("replay", path)["notes"])
    compared = notes("compare", path, "--policies", "chunked,orca")
    for summary in compared.values():
        holds(summary["notes"])
    holds(notes("compare", path, "--policies", "chunked,orca", "--seeds", "2")["notes"])
    holds(notes("advise", path, "--slo", "ttft_p99=2")["notes"])
