"""`charioteer`, the one door: it finds the commands of all packages, and no file of the user's takes their place."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from experiments import console

ROOT = Path(__file__).parents[2]


def charioteer(*words: str, cwd: Path, safe: bool = True) -> subprocess.CompletedProcess[str]:
    """As the console script starts it: the script's folder and not the current one leads the import path."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from experiments.console import main; main()"
    command = [sys.executable, *(["-P"] if safe else []), "-c", script, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)


def test_the_overview_lists_every_command_of_every_package() -> None:
    shown = charioteer("--help", cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    for package in console.PACKAGES:
        for name in console._commands(package):
            assert re.search(rf"^  ({package} )?{re.escape(name)} ", shown.stdout, re.MULTILINE), (package, name)


def test_a_command_runs_from_a_folder_whose_files_are_called_like_ours(tmp_path: Path) -> None:
    for name in ("metrics", "profiler", "simulator", "workloads", "policies"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')\n")
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,9\n1,9,9\n")
    done = charioteer("replay", "t.csv", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/summary.json").exists()
    again = charioteer("metrics", "show", "run", cwd=tmp_path)
    assert "finished" in again.stdout, again.stderr


def test_worker_processes_leave_the_current_folder_out_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.py").write_text("raise SystemExit('the wrong one')\n")
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,9\n1,9,9\n")
    (tmp_path / "s.toml").write_text(
        '[trace]\nfile = "t.csv"\n[base]\nmodel = "nano"\n[space]\nchunk_size = [64, 128]\n'
    )
    done = charioteer("sweep", "s.toml", "--out", "swept", "--workers", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("repaly",), "error: found no command 'repaly'; did you mean replay?"),
        (("xyzzy",), "error: found no command 'xyzzy'; `charioteer --help` lists all commands"),
        (("replay", "nowhere.csv"), "error: nowhere.csv: "),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = charioteer(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1


def test_the_script_is_declared_and_its_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"charioteer": "experiments.console:main"}
    shown = charioteer("--version", cwd=ROOT)
    assert shown.stdout == f"charioteer {project['version']}\n", shown.stderr


def test_usage_lines_name_the_door(tmp_path: Path) -> None:
    assert "Usage: charioteer replay" in charioteer("replay", "--help", cwd=tmp_path).stdout
    assert "Usage: charioteer executor replay" in charioteer("executor", "replay", "--help", cwd=tmp_path).stdout
