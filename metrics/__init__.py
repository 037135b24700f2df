"""What happened: the records of a run, its tables, summaries, bubbles, timelines and figures.

A run is a folder of tidy tables; every figure and every number can be rebuilt from it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from metrics.columns import MetricsError

if TYPE_CHECKING:
    from metrics.recorder import Recorder
    from metrics.run_folder import is_run_folder, read_run, write_run
    from metrics.tables import RunTables

_HOME = {
    "Recorder": "metrics.recorder",
    "RunTables": "metrics.tables",
    "is_run_folder": "metrics.run_folder",
    "read_run": "metrics.run_folder",
    "write_run": "metrics.run_folder",
}

__all__ = ["MetricsError", "Recorder", "RunTables", "is_run_folder", "read_run", "write_run"]


def __getattr__(name: str) -> Any:
    """Names are imported when first used: pandas and pyarrow take a second that `--help` should not."""
    if name not in _HOME:
        raise AttributeError(f"module 'metrics' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
