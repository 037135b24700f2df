"""Results of stages as JSON files, by which long work goes on where it was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.errors import ExperimentError
from policies.edges import input_file
from policies.edges.output_file import write_text


def write_json(file: Path, content: Any) -> None:
    """Whole or not at all; NaN becomes null."""
    from metrics.run_folder.folder import json_ready

    write_text(file, json.dumps(json_ready(content), indent=1, allow_nan=False) + "\n", ExperimentError, sync=True)


def read_json(file: Path) -> Any:
    """Raises ExperimentError for what cannot be read."""
    return input_file.read_json(file, ExperimentError, input_file.LOG_BYTES)
