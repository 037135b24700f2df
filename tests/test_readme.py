"""The README's Python runs as printed, and its commands are real ones."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    lines = [line.partition("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("python -m")]


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    assert re.search(r"P99 of the time between tokens: \d+\.\d ms", capsys.readouterr().out)
    assert (tmp_path / "runs/chunked-256/summary.json").exists()


def test_there_are_commands():
    assert len(commands()) >= 6


@pytest.mark.parametrize("package", sorted({line.split()[2] for line in commands()}))
def test_the_commands_run_in_the_order_of_the_readme(package, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    needed = [line for line in commands() if line.split()[2] == package or "--out" in line]
    if find_spec("torch") is None:
        needed = [line for line in needed if "executor" not in line and "runs/live" not in line]
    for line in needed:
        words = line.replace("python", sys.executable, 1).split()
        done = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
