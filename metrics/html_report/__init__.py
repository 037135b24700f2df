"""One self-contained HTML file about some runs: question, table, interactive plots, timeline, requests, trust."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metrics.html_report.page import require_plotly, write_report
    from metrics.html_report.row_tables import RowTable

__all__ = ["RowTable", "require_plotly", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from metrics.html_report import page

    return getattr(page, name)
