"""Who was served when: each tenant's service over time above the TTFT of its requests, a column a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from metrics.drawing.figure_style import (
    DOUBLE_COLUMN_IN,
    costs_said,
    footnote,
    house_style,
    legend_above,
    letters_in,
    new_figure,
    save,
    say_empty,
    shown_name,
    styles_for,
)
from metrics.measures.tenants import Tenants
from metrics.run_folder.columns import MetricsError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINS = 60
_MOST_DRAWN = 6


def draw_tenants(runs: Mapping[str, Tenants], folder: str | Path) -> list[Path]:
    """Write `service_by_tenant` into a folder (made if it is not there); returns the files, PDF and PNG."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MetricsError(f"{target}: cannot make the folder for figures: {error.strerror}") from error
    with house_style():
        said = costs_said(each.run.config for each in runs.values())
        return save(footnote(service_by_tenant(runs), said), target, "service_by_tenant")


def service_by_tenant(runs: Mapping[str, Tenants], *, width_in: float = DOUBLE_COLUMN_IN) -> Figure:
    """Weighted tokens per second of each tenant, and the TTFT of its requests by their arrival; the six tenants that
    asked for most in any run, all runs on the same axes."""
    asked: dict[str, float] = {}
    for each in runs.values():
        for name, tokens in zip(each.names, each.asked.tolist()):
            asked[name] = max(asked.get(name, 0.0), tokens)
    names = sorted(asked, key=lambda name: -asked[name])[:_MOST_DRAWN]
    styles = styles_for(dict.fromkeys(names))
    until = max(
        (float(np.max(each.run.column("requests", "finished_s"), initial=0)) for each in runs.values()), default=0
    )
    with house_style():
        figure, axes = new_figure(
            width_in, 0.5 * width_in, rows=2, columns=max(1, len(runs)), sharex=True, sharey="row"
        )
        for column, (label, each) in enumerate(runs.items()):
            service, waits = axes[0, column], axes[1, column]
            service.set_title(shown_name(label, letters_in(0.9 * width_in / len(runs))))
            edges = np.linspace(0, until or 1.0, _BINS + 1)
            rates = each.over_time(edges)
            arrival, first = (each.run.column("requests", name) for name in ("arrival_s", "first_token_s"))
            for name in names:
                if name not in each.names:
                    continue
                at, style = each.names.index(name), styles[name]
                service.plot((edges[:-1] + edges[1:]) / 2, rates[at], label=shown_name(name), **style.line())
                rows = each.rows[at]
                seen = rows[~np.isnan(first[rows])]
                waits.plot(
                    arrival[seen],
                    np.maximum((first - arrival)[seen], 1e-4),
                    style.marker,
                    color=style.colour,
                    markersize=2.5,
                    markeredgewidth=0,
                    alpha=0.7,
                )
            if not len(arrival):
                say_empty(service, "no request")
            waits.set_yscale("log")
            waits.set_xlabel("time (s)")
        axes[0, 0].set_ylabel("service\n(weighted tokens/s)")
        axes[0, 0].set_ylim(bottom=0)
        axes[1, 0].set_ylabel("time to first\ntoken (s)")
        legend_above(figure, axes[0, 0], len(names), per_row=_MOST_DRAWN)
        return figure
