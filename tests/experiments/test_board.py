"""The fidelity board: what stands on it is what its command makes, and two boards are told apart by more than rounding."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.__main__ import build
from experiments.board.comparison import ROUNDING, changes, only_in_one
from experiments.board.engines import engine_entries
from experiments.board.entries import Entry, parity_entries, published_predictions, vllm_entries
from experiments.board.page import page
from experiments.board.ranking import rank, rankings

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "docs/evidence/board.json").read_text(encoding="utf-8"))


def differing(made: dict[str, object]) -> list[str]:
    committed = {key: [row for row in BOARD[key] if _name(row) in {_name(one) for one in made[key]}] for key in made}  # type: ignore[attr-defined]
    empty = {"runs": [], "engines": [], "ranking": [], "parity": []}
    return [change.where for change in changes({**empty, **committed}, {**empty, **made})]


def _name(row: dict[str, object]) -> tuple[object, ...]:
    return tuple(row.get(key) for key in ("run", "study", "load", "statistic", "log"))


def test_the_page_is_written_from_the_committed_figures() -> None:
    assert (ROOT / "docs/evidence/board.md").read_text(encoding="utf-8") == page(BOARD)


def test_committed_figures_of_runs_are_what_the_command_makes() -> None:
    made = [entry.as_dict() for entry in vllm_entries()]
    assert {entry["run"] for entry in made} == {entry["run"] for entry in BOARD["runs"]}
    assert differing({"runs": made}) == []


def test_committed_figures_of_engines_under_load_are_what_the_command_makes() -> None:
    made = engine_entries(every=30)
    assert len(made) >= 9
    assert differing({"engines": made}) == []


def test_committed_rankings_and_parity_are_what_the_command_makes() -> None:
    assert rankings() == BOARD["ranking"]
    assert parity_entries() == BOARD["parity"]
    assert all(row["matched"] == row["steps"] for row in BOARD["parity"])


def test_what_others_published_was_measured_on_the_same_runs() -> None:
    import csv

    from profiler.measurements.facts import FACTS

    measured = {entry["run"]: entry["measured"] for entry in BOARD["runs"]}
    with (FACTS / "published_errors.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            ours = measured[row["run"]][f"{row['latency']}_{row['statistic']}_ms"]
            assert ours == pytest.approx(float(row["measured_ms"]), rel=2e-3), row
    assert published_predictions()["RTXPRO6000/Qwen3-32B"]["LLMServingSim"]["ttft_mean_ms"] == 37369.5


def test_a_ranking_counts_decided_pairs_and_names_a_winner_by_hand() -> None:
    live = {"a": [1.0, 1.2], "b": [1.1, 1.3], "c": [2.0, 2.2]}
    found = rank("ttft_s_mean", live, {"a": 1.5, "b": 1.0, "c": 1.2})
    # a and b overlap; c is behind both live, but before a in the simulation.
    assert (found["pairs"], found["decided"], found["agreed"]) == (3, 2, 1)
    assert found["winner_named"] is None, "b's repeats reach into those of a"
    known = {**live, "b": [1.3, 1.4]}
    assert rank("ttft_s_mean", known, {"a": 1.0, "b": 1.3, "c": 1.2})["winner_named"] is True
    assert rank("ttft_s_mean", known, {"a": 1.5, "b": 1.3, "c": 1.0})["winner_named"] is False


def board_of(predicted: float) -> dict[str, object]:
    entry = Entry(
        "r", "vLLM", "m", "g", 1, "load", "fit", "nothing", {"ttft_mean_ms": 100.0}, {"ttft_mean_ms": predicted}
    )
    return {"runs": [entry.as_dict()], "engines": [], "ranking": [], "parity": []}


@pytest.mark.parametrize(("after", "better"), [(103.0, True), (94.0, True), (112.0, False)])
def test_a_change_is_better_where_it_comes_nearer_to_the_measured_value(after: float, better: bool) -> None:
    (change,) = changes(board_of(110.0), board_of(after))
    assert change.better is better
    assert (change.before, change.after) == (110.0, after)


def test_rounding_is_no_change_and_a_missing_figure_is_told() -> None:
    assert changes(board_of(110.0), board_of(110.0 * (1 + ROUNDING / 2))) == []
    bare = copy.deepcopy(board_of(110.0))
    bare["runs"] = []
    assert only_in_one(board_of(110.0), bare) == (["r: ttft_mean_ms"], [])


def test_against_what_is_no_commit_is_one_clear_line(tmp_path: Path) -> None:
    for found in ("no-such-commit", "--upload-pack=x"):
        done = CliRunner().invoke(build(), ["board", f"--against={found}"])
        assert "expected a commit" in str(done.exception) or "neither a file nor a commit" in str(done.exception)
    (tmp_path / "b.json").write_text("[]")
    assert not (tmp_path / "board.md").exists()
