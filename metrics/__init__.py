"""What happened: the records of a run, its tables, summaries, bubbles, timelines and figures.

A run is a folder of tidy tables; every figure and every number can be rebuilt from it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from metrics.run_folder.columns import MetricsError

if TYPE_CHECKING:
    from metrics.drawing.figures import draw_all
    from metrics.drawing.perfetto import parse_window, write_timeline
    from metrics.drawing.pipeline_figures import draw_pipeline
    from metrics.drawing.text_tables import comparison_table, differences
    from metrics.measures.slo import parse_slo, parse_warmup
    from metrics.measures.summary import summarise, summarise_classes
    from metrics.measures.summary_keys import SUMMARY_KEYS
    from metrics.pipelines.bubbles import find_bubbles
    from metrics.pipelines.request_bubbles import request_bubble_ns
    from metrics.recording.recorder import Recorder
    from metrics.run_folder.folder import is_run_folder, read_run, write_run
    from metrics.run_folder.tables import RunTables

_HOME = {
    "Recorder": "metrics.recording.recorder",
    "RunTables": "metrics.run_folder.tables",
    "SUMMARY_KEYS": "metrics.measures.summary_keys",
    "comparison_table": "metrics.drawing.text_tables",
    "differences": "metrics.drawing.text_tables",
    "draw_all": "metrics.drawing.figures",
    "draw_pipeline": "metrics.drawing.pipeline_figures",
    "find_bubbles": "metrics.pipelines.bubbles",
    "is_run_folder": "metrics.run_folder.folder",
    "parse_slo": "metrics.measures.slo",
    "parse_warmup": "metrics.measures.slo",
    "parse_window": "metrics.drawing.perfetto",
    "read_run": "metrics.run_folder.folder",
    "request_bubble_ns": "metrics.pipelines.request_bubbles",
    "summarise": "metrics.measures.summary",
    "summarise_classes": "metrics.measures.summary",
    "write_run": "metrics.run_folder.folder",
    "write_timeline": "metrics.drawing.perfetto",
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
