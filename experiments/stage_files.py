"""Results of stages as JSON files, by which long work goes on where it was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.errors import ExperimentError


def file_name(label: str) -> str:
    """A label as part of a path."""
    return "".join(character if character.isalnum() or character in "-_." else "-" for character in label)


def write_json(file: Path, content: Any) -> None:
    """Whole or not at all; NaN becomes null."""
    from metrics.run_folder import json_ready

    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(json_ready(content), indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def read_json(file: Path) -> Any:
    """Raises ExperimentError for what cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExperimentError(f"{file}: cannot be read as JSON: {str(error).splitlines()[0]}") from None
