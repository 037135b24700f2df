"""`python -m experiments board`: replay every real run that the project carries, write one page and one JSON."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = "docs/evidence/board.md"
LEVEL = "docs/evidence/board.json"


def register(app: typer.Typer) -> None:
    app.command("board")(board_command)


def board_command(
    out: Annotated[Path, typer.Option(help="Page to write; the JSON lies beside it.")] = Path(PAGE),
    against: Annotated[
        str | None, typer.Option(help="Commit (or board.json) to compare with; nothing is written then.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only, write nothing.")] = False,
) -> None:
    """Measured and predicted figures of real engines, and whether the simulator ranks policies as live runs do.

    With --against: exit code 1 where a prediction came further away from what was measured, or a figure is missing.
    """
    from experiments.board.page import page
    from experiments.errors import ExperimentError
    from policies.edges.output_file import check_place, write_text

    before = _committed(against) if against is not None else None
    if before is None and not as_json:
        check_place(out, ExperimentError)
    board = make_board(say=None if as_json else print)
    if before is not None:
        worse = _print_changes(before, board, as_json)
        raise typer.Exit(1 if worse else 0)
    text = json.dumps(board, indent=1) + "\n"
    if as_json:
        print(text, end="")
        return
    write_text(out.with_suffix(".json"), text, ExperimentError)
    write_text(out, page(board), ExperimentError)
    print(f"wrote {out} and {out.with_suffix('.json')}")


def make_board(say: Any = None) -> dict[str, Any]:
    """The board as plain data. say: called with a line before each part."""
    from experiments.board.engines import engine_entries, groups
    from experiments.board.entries import parity_entries, vllm_entries
    from experiments.board.ranking import rankings

    tell = say or (lambda text: None)
    tell("vLLM runs, request by request")
    runs = [entry.as_dict() for entry in vllm_entries()]
    tell("engines under load")
    engines = engine_entries()
    tell("ranking of policies served live")
    ranking = rankings()
    tell("step logs of vLLM's scheduler")
    return {
        "runs": runs,
        "engine_groups": groups(engines),
        "engines": engines,
        "ranking": ranking,
        "parity": parity_entries(),
    }


def _committed(against: str) -> Any:
    """The board of a commit, or of a file."""
    from experiments.errors import ExperimentError
    from policies.edges.input_file import parse_json, read_json

    if Path(against).is_file():
        return read_json(Path(against), ExperimentError)
    if against.startswith("-"):
        raise ExperimentError(f"--against: found {against!r}, expected a commit or a board.json")
    try:
        shown = subprocess.run(["git", "show", f"{against}:{LEVEL}"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ExperimentError(f"--against {against}: git cannot be run ({error})") from None
    if shown.returncode:
        raise ExperimentError(
            f"--against {against}: found neither a file nor a commit with {LEVEL}: "
            f"{(shown.stderr.strip().splitlines() or ['nothing'])[0]}"
        )
    return parse_json(shown.stdout, f"{against}:{LEVEL}", ExperimentError)


def _print_changes(before: Mapping[str, Any], board: Mapping[str, Any], as_json: bool) -> bool:
    """True where something became worse or is missing."""
    from experiments.board.comparison import changes, only_in_one
    from experiments.errors import ExperimentError

    try:
        found, (missing, new) = changes(before, board), only_in_one(before, board)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ExperimentError(f"--against: not a board: {error!r}") from None
    worse = [change for change in found if change.better is False]
    if as_json:
        print(json.dumps({"changes": [change._asdict() for change in found], "missing": missing, "new": new}, indent=1))
        return bool(worse or missing)
    for title, some in (("better", [c for c in found if c.better]), ("worse", worse)):
        print(f"{title}: {len(some)}")
        for change in some:
            errors = f"error {change.error_before:+.2%} -> {change.error_after:+.2%}"
            print(f"  {change.where}: {change.before:.4g} -> {change.after:.4g}, {errors}")
    for title, names in (("missing", missing), ("new", new)):
        if names:
            print(f"{title}: {len(names)}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}")
    if not found:
        print("no figure differs by more than rounding")
    return bool(worse or missing)
