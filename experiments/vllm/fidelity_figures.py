"""Running, waiting and KV use over time: the replay's curves on those of the engine's own log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from experiments.vllm.recorded_run import Column
from metrics.drawing.figure_style import DOUBLE_COLUMN_IN, house_style, legend_above, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = (("running", "running"), ("waiting", "waiting"), ("kv_cache_pct", "KV in use (%)"))


def over_time_figure(columns: Mapping[str, Column], name: str) -> Figure:
    """Three panels over seconds; measured in grey, simulated in colour."""
    with house_style():
        figure, axes = new_figure(DOUBLE_COLUMN_IN, 4.2, len(_PANELS), 1, sharex=True)
        for panel, (key, label) in zip(axes[:, 0], _PANELS, strict=True):
            panel.plot(columns["t"], columns[f"{key}_measured"], color="#888888", linewidth=2.2, label="vLLM")
            panel.plot(columns["t"], columns[f"{key}_simulated"], color="#0072B2", linewidth=0.9, label="replay")
            panel.set_ylabel(label)
            panel.set_ylim(bottom=0)
        axes[-1, 0].set_xlabel(f"seconds since the first request ({name})")
        legend_above(figure, axes[0, 0], 2)
    return figure
