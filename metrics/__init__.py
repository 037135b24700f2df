"""What happened: the records of a run, its tables, summaries, bubbles, timelines and figures.

A run is a folder of tidy tables; every figure and every number can be rebuilt from it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from metrics.columns import MetricsError

if TYPE_CHECKING:
    from metrics.bubbles import find_bubbles
    from metrics.figures import draw_all
    from metrics.pipeline_figures import draw_pipeline
    from metrics.recorder import Recorder
    from metrics.report import comparison_table, differences
    from metrics.request_bubbles import request_bubble_ns
    from metrics.run_folder import is_run_folder, read_run, write_run
    from metrics.slo import parse_slo, parse_warmup
    from metrics.summary import summarise, summarise_classes
    from metrics.summary_keys import SUMMARY_KEYS
    from metrics.tables import RunTables
    from metrics.timeline import parse_window, write_timeline

_HOME = {
    "Recorder": "metrics.recorder",
    "RunTables": "metrics.tables",
    "SUMMARY_KEYS": "metrics.summary_keys",
    "comparison_table": "metrics.report",
    "differences": "metrics.report",
    "draw_all": "metrics.figures",
    "draw_pipeline": "metrics.pipeline_figures",
    "find_bubbles": "metrics.bubbles",
    "is_run_folder": "metrics.run_folder",
    "parse_slo": "metrics.slo",
    "parse_warmup": "metrics.slo",
    "parse_window": "metrics.timeline",
    "read_run": "metrics.run_folder",
    "request_bubble_ns": "metrics.request_bubbles",
    "summarise": "metrics.summary",
    "summarise_classes": "metrics.summary",
    "write_run": "metrics.run_folder",
    "write_timeline": "metrics.timeline",
}

__all__ = [
    "SUMMARY_KEYS",
    "MetricsError",
    "Recorder",
    "RunTables",
    "comparison_table",
    "differences",
    "draw_all",
    "draw_pipeline",
    "find_bubbles",
    "is_run_folder",
    "parse_slo",
    "parse_warmup",
    "parse_window",
    "read_run",
    "request_bubble_ns",
    "summarise",
    "summarise_classes",
    "write_run",
    "write_timeline",
]


def __getattr__(name: str) -> Any:
    """Names are imported when first used: pandas and pyarrow take a second that `--help` should not."""
    if name not in _HOME:
        raise AttributeError(f"module 'metrics' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
