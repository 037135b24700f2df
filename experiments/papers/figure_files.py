"""An experiment run and written down: PDF, PNG and SVG in both column widths, the CSV behind them, the verdict."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.errors import ExperimentError
from experiments.papers.chosen_costs import costs_from
from experiments.papers.experiment import Result, Rows, load_experiment
from policies.edges.output_file import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("pdf", "png", "svg")
WIDTHS = {"": "SINGLE_COLUMN_IN", "-wide": "DOUBLE_COLUMN_IN"}


def run_experiment(name: str, out: str | Path, *, quick: bool = False, cost_model: str = "auto") -> dict[str, Any]:
    """Run one experiment and write OUT/NAME/NAME.{pdf,png,svg}, NAME-wide.*, NAME[-table].csv and NAME.json.

    cost_model: auto, roofline or a file, where an experiment leaves the choice. Returns what NAME.json holds. Raises
    ExperimentError for an unknown name or a folder that cannot be written.
    """
    module = load_experiment(name)
    began = time.perf_counter()
    with costs_from(cost_model):
        result: Result = module.run(quick)
    facts = {
        "experiment": name,
        "question": module.QUESTION,
        "source": module.SOURCE,
        "quick": quick,
        **result.as_dict(),
        "wall_s": round(time.perf_counter() - began, 1),
    }
    folder = Path(out) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _draw(module.draw, result, folder, name)
        for table, rows in result.tables.items():
            suffix = "" if table == name or len(result.tables) == 1 else f"-{table}"
            write_bytes(folder / f"{name}{suffix}.csv", _csv(rows).encode(), ExperimentError)
        text = json.dumps(_plain(facts), indent=2, ensure_ascii=False) + "\n"
        write_bytes(folder / f"{name}.json", text.encode(), ExperimentError)
    except OSError as error:
        raise ExperimentError(f"{folder}: cannot be written: {error.strerror}") from None
    return facts


def run_task(task: Mapping[str, Any]) -> dict[str, Any]:
    """One experiment as work for another process."""
    return run_experiment(task["experiment"], task["out"], quick=task["quick"], cost_model=task["cost_model"])


def _draw(draw: Any, result: Result, folder: Path, name: str) -> None:
    import metrics.drawing.figure_style as style

    with style.house_style():
        for suffix, width in WIDTHS.items():
            figure = draw(result, getattr(style, width))
            for kind in FORMATS:
                write_bytes(folder / f"{name}{suffix}.{kind}", _picture(figure, kind), ExperimentError)


def _picture(figure: Figure, kind: str) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    # Without dates and random ids the same result gives the same bytes. Glyphs go into an SVG as paths.
    dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with matplotlib.rc_context({"svg.hashsalt": "charioteer", "svg.fonttype": "path"}):
        figure.savefig(buffer, format=kind, metadata=dates.get(kind))
    return buffer.getvalue()


def _csv(rows: Rows) -> str:
    buffer = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _plain(value: Any) -> Any:
    from metrics.run_folder.folder import json_ready

    return json_ready(value)
