"""Who starts a search over many runs hears what one replay would say of the trace and the settings."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.running.early_notes import notes_of_sweep
from experiments.sweeps.axes import parse_sweep
from tests.hardening.command_line import run

DOUBT = "If its times are in "
NO_SESSION = "router session_affinity: the trace has no session"


def slow_trace(folder: Path) -> Path:
    """Twelve requests, one every 1,700 s as it stands: times in ms, read as seconds."""
    file = folder / "slow.csv"
    file.write_text("Timestamp,prompt,output\n" + "".join(f"{1700 * row},20,3\n" for row in range(12)))
    return file


def test_a_sweep_says_once_what_any_of_its_settings_gives_reason_to() -> None:
    content = {
        "trace": {"requests": 5, "arrivals": "poisson:4", "prompt": "fixed:60", "output": "fixed:2"},
        "base": {"replicas": 2},
        "space": {"router": ["round_robin", "session_affinity"], "prefix_caching": [True, False]},
    }
    notes = notes_of_sweep(parse_sweep(content))
    assert sorted(note.split(":")[0] for note in notes) == ["--prefix-caching", "router session_affinity"]
    assert notes_of_sweep(parse_sweep({**content, "space": {"router": ["round_robin", "least_kv"]}})) == []
    # With a single replica there is nothing to route.
    assert notes_of_sweep(parse_sweep({**content, "base": {}, "space": {"router": ["session_affinity"]}})) == []


def test_bounds_in_milliseconds_are_doubted_in_a_sweep_and_of_a_run_folder(tmp_path: Path) -> None:
    content = {
        "trace": {"requests": 5, "arrivals": "poisson:4", "prompt": "fixed:60", "output": "fixed:2"},
        "base": {"slo": "tbt_p99=200"},
        "space": {"seed": [0, 1]},
    }
    said = "SLO: tbt_p99=200 is 200 seconds; if milliseconds are meant, write tbt_p99=0.2"
    assert notes_of_sweep(parse_sweep(content)) == [said]
    trace = slow_trace(tmp_path)
    made = run("simulator", "replay", str(trace), "--cost-model", "roofline", "--out", str(tmp_path / "run"))
    assert made.code == 0, made.err
    shown = run("metrics", "show", str(tmp_path / "run"), "--slo", "tbt_p99=200")
    assert shown.code == 0
    assert f"note: {said}" in shown.err


def test_a_sweep_of_a_trace_that_cannot_be_read_leaves_that_to_its_points() -> None:
    content = {"trace": {"file": "nowhere.csv"}, "base": {}, "space": {"seed": [0, 1]}}
    assert notes_of_sweep(parse_sweep(content)) == []


def test_sweep_and_capacity_say_the_notes_that_replay_says(tmp_path: Path) -> None:
    trace = slow_trace(tmp_path)
    file = tmp_path / "sweep.toml"
    file.write_text(
        f'[trace]\nfile = "{trace}"\n[base]\ncost_model = "roofline"\nrouter = "session_affinity"\n[space]\nreplicas = [1, 2]\n'
    )
    commands = {
        "replay": (
            "simulator",
            "replay",
            str(trace),
            "--cost-model",
            "roofline",
            "--replicas",
            "2",
            "--router",
            "session_affinity",
        ),
        "sweep": ("experiments", "sweep", str(file), "--out", str(tmp_path / "out"), "--workers", "0"),
        "smallest": (
            "experiments",
            "capacity",
            str(trace),
            "--smallest",
            "--workers",
            "0",
            "--set",
            "cost_model=roofline",
            "--set",
            "router=session_affinity",
        ),
        "capacity": (
            "experiments",
            "capacity",
            str(trace),
            "--requests",
            "100",
            "--draws",
            "2",
            "--tolerance",
            "0.2",
            "--workers",
            "0",
            "--set",
            "cost_model=roofline",
            "--set",
            "replicas=2",
            "--set",
            "router=session_affinity",
        ),
    }
    for name, command in commands.items():
        ended = run(*command)
        assert ended.code == 0, (name, ended.err)
        notes = [line for line in ended.err.splitlines() if line.startswith("note: ")]
        assert [DOUBT in note for note in notes] == [True, False], name
        assert [NO_SESSION in note for note in notes] == [False, True], name
        if name in ("replay", "sweep"):
            as_json = json.loads(run(*command, "--json").out)
            assert as_json["notes"] == [note.removeprefix("note: ") for note in notes]


def test_a_sweep_says_which_of_its_policies_do_not_use_priorities(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens,priority\n0,50,3,1\n1,50,3,0\n")
    content = {"trace": {"file": str(file)}, "base": {"policy": "vllm_v1"}}
    plain = notes_of_sweep(parse_sweep({**content, "space": {"scheduling": ["priority"]}}))
    assert plain == []
    told = notes_of_sweep(parse_sweep({**content, "space": {"policy": ["slo_aware", "orca", "vllm_v1"]}}))
    assert [note.split(":")[1].split()[0] for note in told] == ["orca", "vllm_v1"]
