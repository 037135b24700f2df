"""A command may be starved, cut off, killed or misread: it says so in a line, and leaves whole files or none."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hardening.command_line import needs_posix, run

pytestmark = needs_posix
TRACE = "examples/trace.csv"
REPLAY = ("simulator", "replay", TRACE, "--limit", "20")


def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}  # type: ignore[dict-item]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)],
        text=True,
        errors="replace",
        env=environment,
        **{"preexec_fn": _heeds_interrupts, **pipes},
    )  # type: ignore[call-overload,no-any-return]


def _heeds_interrupts() -> None:
    """What a shell starts in the background, this suite perhaps, ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ended(*arguments: object, **options: object) -> tuple[int, str, str]:
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out or "", err or ""


def litter(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if ".part" in path.name or path.name.endswith(".old"))


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    def starved() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))

    code, _, err = ended(*REPLAY, "--out", tmp_path / "run", preexec_fn=starved)
    assert code == 2
    assert err.count("error: ") == 1
    assert "File too large" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_an_old_file_survives_a_new_one_that_cannot_be_written(tmp_path: Path) -> None:
    from policies.edges.output_file import write_text

    file = write_text(tmp_path / "deep" / "folder" / "a.json", "old", RuntimeError)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(RuntimeError, match="cannot be written"):
            write_text(file, "new" * 1000, RuntimeError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert file.read_text() == "old"
    assert [path.name for path in file.parent.iterdir()] == ["a.json"]
    for place, found in ((tmp_path / "deep", "a folder"), (Path("/dev/full"), "a pipe or device")):
        with pytest.raises(RuntimeError, match=f"found {found}, expected a file or nothing"):
            write_text(place, "x", RuntimeError)


def test_standard_output_that_is_full_or_gone_is_no_traceback(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        code, _, err = ended("simulator", "policies", stdout=full)
    assert (code, err) == (2, "error: standard output: No space left on device\n") or (code == 2 and "No space" in err)
    assert "Traceback" not in err
    for command in (("simulator", "policies"), ("profiler", "models"), ("workloads", "describe", TRACE)):
        process = start(*command)
        assert process.stdout is not None
        process.stdout.close()  # what `| head -0` does
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(60) == 1


def test_neither_locale_nor_terminal_change_more_than_the_looks(tmp_path: Path) -> None:
    summaries = []
    for number, env in enumerate(
        (
            {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
            {"PYTHONIOENCODING": "latin-1", "COLUMNS": "40", "NO_COLOR": "1", "TZ": "Asia/Kathmandu", "TERM": "dumb"},
        )
    ):
        code, out, err = ended(*REPLAY, "--out", tmp_path / f"ä{number}", env=env)
        assert code == 0, err
        assert "\x1b" not in out
        summaries.append(json.loads((tmp_path / f"ä{number}" / "summary.json").read_text(encoding="utf-8")))
        code, out, err = ended("metrics", "show", tmp_path / f"ä{number}", env=env)
        assert code == 0, err
    assert summaries[0] == summaries[1]
    odd = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, _, err = ended(*REPLAY, "--out", tmp_path / "ä2", env=odd)
    assert code == 0 or (code == 2 and "is not UTF-8 here" in err)


def test_dates_mean_the_same_in_every_time_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workloads import read_trace

    file = tmp_path / "dates.csv"
    file.write_text("timestamp,prompt_tokens,output_tokens\n2024-03-31 01:59:00,5,5\n2024-03-31 03:01:00,5,5\n")
    gaps = set()
    for zone in ("UTC", "Europe/Berlin", "America/St_Johns"):  # Berlin has no 02:30 on that day
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        gaps.add(int(read_trace(file).arrival_ns[1]))
    monkeypatch.undo()
    time.tzset()
    assert gaps == {62 * 60 * 10**9}


def test_a_run_killed_at_any_moment_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    from metrics import read_run

    draw = random.Random(7)
    outcomes = set()
    for number in range(4):
        out = tmp_path / f"run{number}"
        process = start(*REPLAY, "--out", out, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        if number % 2:  # near the moment of writing, which timers seldom hit
            while not litter(tmp_path) and not out.exists() and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.0005)
            time.sleep(draw.random() * 0.01)
        else:
            time.sleep(draw.random() * 1.5)
        process.kill()
        process.wait(30)
        if out.exists():
            assert len(read_run(out).column("requests", "status")) == 20
        outcomes.add(out.exists())
        code, _, err = ended(*REPLAY, "--out", out)
        assert code == 0, err
        assert litter(tmp_path) == []
    assert outcomes  # both, as a rule; which one a given kill meets is the machine's choice


def test_what_a_killed_process_left_is_taken_away_by_the_next_one(tmp_path: Path) -> None:
    from policies.edges.output_file import clear_leftovers, scratch_prefix, write_text

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ours, theirs = scratch_prefix("a.json"), scratch_prefix("a.json").replace(str(os.getpid()), str(gone.pid))
    for name in (theirs + "x1.part.json", ours + "x2.part.json", "." + "a.json.1-00000000.x3.part", "a.json.part"):
        (tmp_path / name).write_text("half")
    (tmp_path / (theirs + "x4.part")).mkdir()
    (tmp_path / (theirs + "x4.part") / "config.json").write_text("{}")
    for name in ("run", "other"):  # set aside for a new one that came, and for one that did not
        (tmp_path / (theirs + f"{name}.old") / name).mkdir(parents=True)
        (tmp_path / (theirs + f"{name}.old") / name / "old").write_text("")
    (tmp_path / "run").mkdir()
    write_text(tmp_path / "a.json", "{}", RuntimeError)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted(
        [ours + "x2.part.json", ".a.json.1-00000000.x3.part", "a.json.part", "a.json", "run", "other"]
    )
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["old"]
    assert list((tmp_path / "run").iterdir()) == []
    clear_leftovers(tmp_path / "nowhere")


def test_two_runs_into_one_folder_leave_one_whole_run(tmp_path: Path) -> None:
    from metrics import read_run

    both = [start(*REPLAY, "--seed", seed, "--out", tmp_path / "run") for seed in (1, 2)]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert process.returncode in (0, 2), err
        assert "Traceback" not in err
    assert any(process.returncode == 0 for process in both)
    assert len(read_run(tmp_path / "run").column("requests", "status")) == 20
    assert litter(tmp_path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_simulation_that_is_stopped_writes_nothing_and_says_so(number: int, code: int, tmp_path: Path) -> None:
    from workloads import generate, write_trace

    trace = write_trace(
        generate(requests=60_000, arrivals="poisson:20", prompt="uniform:1,2000", output="uniform:1,500"),
        tmp_path / "long.csv",
    )
    process = start("simulator", "replay", trace, "--plain", "--out", tmp_path / "run")
    time.sleep(3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert (err == "error: interrupted; nothing half written is left\n") == (number == signal.SIGINT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long.csv"]


def test_a_sweep_killed_at_any_moment_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    file = tmp_path / "sweep.toml"
    file.write_text(
        f'[trace]\nfile = "{Path(TRACE).resolve()}"\n[base]\nlimit = 10\n[space]\nchunk_size = [64, 96, 128, 160, 192, 224, 256, 288]\n'
    )
    command = ("experiments", "sweep", file, "--workers", 0)
    assert ended(*command, "--out", tmp_path / "whole")[0] == 0
    draw = random.Random(3)
    for _ in range(2):
        process = start(*command, "--out", tmp_path / "cut", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        points = len(list((tmp_path / "cut").glob("points/0*.json")))
        deadline = time.monotonic() + 20
        while (
            len(list((tmp_path / "cut").glob("points/0*.json"))) <= points
            and process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.001)
        time.sleep(draw.random() * 0.02)
        process.kill()
        process.wait(30)
    (tmp_path / "cut" / "points" / ".000005.json.abc.part.json").write_text("{half")
    code, _, err = ended(*command, "--out", tmp_path / "cut")
    assert code == 0, err
    assert litter(tmp_path / "cut") == [".000005.json.abc.part.json"]  # not ours by its name
    one, other = (pq.read_table(tmp_path / name / "sweep.parquet") for name in ("whole", "cut"))
    assert one.equals(other)


def test_a_sweep_killed_before_its_first_point_can_be_started_again(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(f'[trace]\nfile = "{Path(TRACE).resolve()}"\n[base]\nlimit = 5\n[space]\nchunk_size = [64]\n')
    (tmp_path / "cut" / "points").mkdir(parents=True)
    (tmp_path / "cut" / ".sweep.json.xyz.part.json").write_text("")
    assert run("experiments", "sweep", file, "--workers", 0, "--out", tmp_path / "cut").code == 0


def test_a_folder_that_is_no_run_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    for package in ("simulator",):
        refused = run(package, "replay", TRACE, "--limit", 3, "--out", tmp_path / "mine")
        assert refused.code == 2
        assert "not a run folder" in refused.err
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_a_run_is_replaced_with_all_that_was_drawn_of_it_and_with_nothing_else(tmp_path: Path) -> None:
    study = tmp_path / "study"
    again = ("replay", TRACE, "--limit", 5, "--pp", 2, "--figures", "--timeline", "0:1", "--out", study)
    assert run("simulator", *again).code == 0
    assert run("simulator", "advise", TRACE, "--limit", 5, "--out", study).code == 0
    assert run("simulator", *again).code == 0
    written = sorted(str(path.relative_to(study)) for path in study.rglob("*"))
    assert run("simulator", "compare", TRACE, "--limit", 3, "--policies", "orca", "--out", study).code == 0
    refused = run("simulator", *again)
    assert refused.code == 2
    assert "found orca beside the run there" in refused.err
    assert {path.name for path in study.iterdir()} == {*(name.partition("/")[0] for name in written), "orca"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_a_read_only_folder_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    refused = run("simulator", "replay", TRACE, "--limit", 3, "--out", tmp_path / "run")
    tmp_path.chmod(0o755)
    assert refused.code == 2
    assert "Permission denied" in refused.err


def test_a_place_under_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in (
        ("simulator", "replay", TRACE, "--limit", 3, "--out", tmp_path / "file" / "run"),
        ("workloads", "generate", tmp_path / "file" / "t.csv", "--requests", 3),
        ("profiler", "report", "h100", "--figures", tmp_path / "file" / "figures"),
        ("metrics", "figures", "missing-run", "--out", tmp_path / "file"),
        ("experiments", "run", "all", "--quick", "--out", tmp_path / "file" / "x", "--workers", 0),
    ):
        refused = run(*command)
        assert refused.code == 2, (command, refused)
        assert refused.err.count("error: ") == 1


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (
            "torch",
            "error: torch is not installed, and this needs it: pip install '.[executor]' in a checkout of Charioteer, or pip install torch\n",
        ),
        ("nobody.part", "error: nobody is not installed, and this needs it: pip install nobody\n"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(module: str, told: str) -> None:
    code = (
        "import sys\nfrom policies.edges.command_line import run_command\n"
        f"def build():\n    raise ModuleNotFoundError('no', name={module!r})\nrun_command(build, 'executor')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 2
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_tests_ends_them_and_not_the_command_that_they_run(number: signal.Signals) -> None:
    """A command run in the tests' own process has handlers of its own; its exit code was once taken for a fault."""
    code = (
        "import os, signal, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from tests.hardening import command_line\n"
        f"threading.Timer(0.2, os.kill, (os.getpid(), {int(number)})).start()\n"
        "command_line.group_of = lambda package: lambda **words: signal.pause()\n"
        "print(command_line.run('workloads'), 'went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == -number or (number == signal.SIGINT and "KeyboardInterrupt" in done.stderr), done
    assert "went on" not in done.stdout


@pytest.mark.parametrize("room", [0, 100, 9000])
def test_a_disk_that_is_full_while_a_figure_is_drawn_is_one_line(tmp_path: Path, room: int) -> None:
    """matplotlib's PDF writer falls over its own tidying up there, with an AttributeError."""
    resource = pytest.importorskip("resource")
    from metrics.drawing.figure_style import house_style, new_figure, save
    from metrics.run_folder.columns import MetricsError

    with house_style():
        figure, panels = new_figure(3, 2)
        panels[0, 0].plot(range(1000))
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            with pytest.raises(MetricsError, match="cannot be written"):
                save(figure, tmp_path, "figure")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
