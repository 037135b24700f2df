"""Names from files and paths are text wherever they are shown: no markup, no links, no pictures, no formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hardening.command_line import run

HOSTILE = ("[/]", "[gold]", "[link=file:///etc/passwd]here[/link]", ":smile:", "<b>x</b>", "=1+1", "$x_1$")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that hold the whole of a name: narrower ones end in an ellipsis."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "[red]trace.csv"
    rows = [f'{row / 10},50,5,"{name}"' for row, name in enumerate(HOSTILE)]
    file.write_text("\n".join(["arrival,prompt,output,slo", *rows]))
    return file


def test_classes_and_paths_are_shown_as_they_are(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "[dim]out"
    done = run("simulator", "replay", trace, "--out", out, "--figures")
    assert (done.code, "Traceback" in done.err) == (0, False), done.err
    for name in HOSTILE:
        assert name in done.out, name
    assert "[dim]out" in done.out
    shown = run("metrics", "show", out, "--by", "slo")
    assert (shown.code, *(name in shown.out for name in HOSTILE)) == (0, *[True] * len(HOSTILE)), shown.out
    again = tmp_path / "[bold]"
    assert run("simulator", "replay", trace, "--out", again).code == 0
    differ = run("metrics", "diff", out, again)
    assert (differ.code, "[dim]out" in differ.out, "[bold]" in differ.out) == (0, True, True), differ.err + differ.out
    timed = run("metrics", "bubbles", out)
    assert (timed.code, "[dim]out" in timed.out) == (0, True), timed.err


def test_a_refusal_shows_a_name_as_it_is(tmp_path: Path) -> None:
    for words in (("replay", "[/].csv"), ("replay", "examples/trace.csv", "--policy", "[/]")):
        refused = run("simulator", *words)
        assert refused.code == 2
        assert "[/]" in refused.err


def test_sweeps_and_capacities_show_settings_as_they_are(trace: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.toml"
    sweep.write_text(
        f'[trace]\nfile = {json.dumps(str(trace))}\n[space]\nslo = ["ttft_p99=2"]\n"trace.file" = [{json.dumps(str(trace))}]\n'
    )
    done = run("experiments", "sweep", sweep, "--workers", 0, "--out", tmp_path / "[bold]sweep")
    assert done.code == 0, done.err
    assert "[red]trace.csv" in done.out
    assert "[bold]sweep" in done.out
