"""Rows to explore: whole tables in the page itself, so that they can be read, copied and printed without JavaScript.

The script puts the choice of axes and the plot of a table above it. A table of very many rows stands there in part,
with a word of it: the plot draws all of them, from columns whose names are written once and whose numbers keep seven
digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from metrics.run_folder.folder import json_ready

MOST_ROWS = 1_000
"""Of a table that people read; a search for one row among more is made in the file that holds them."""


@dataclass(frozen=True)
class RowTable:
    """Rows to explore: points of a sweep, capacities of settings. axes: columns that were set, not measured."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    axes: Sequence[str]
    note: str = ""
    up: str = ""
    """The column that the plot shows first; by default the first of goodput, TBT P99 and TTFT P99 that there is."""

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The rows as people read them: statistics of latencies in ms, under a name that says so."""
        return [
            {
                in_ms(key): value * 1e3 if in_ms(key) != key and isinstance(value, int | float) else value
                for key, value in row.items()
            }
            for row in self.rows
        ]

    @property
    def columns(self) -> list[str]:
        """Every key that any shown row has a value for, in the order of their first rows."""
        return list(dict.fromkeys(key for row in self.shown for key, value in row.items() if value is not None))

    def for_script(self) -> dict[str, Any]:
        """What the script draws from: every row, column by column."""
        rows = self.shown
        columns = {name: [_seven_digits(json_ready(row.get(name))) for row in rows] for name in self.columns}
        return {
            "title": self.title,
            "axes": list(self.axes),
            "note": self.note,
            "up": in_ms(self.up),
            "length": len(self.rows),
            "columns": columns,
        }


_SECONDS = re.compile(r"_s_(?=(?:p[\d_]+|mean|max|min|std)(?:_low|_high)?$)")


def in_ms(name: str) -> str:
    """The name that a statistic of a latency has in ms: `tbt_s_p99` becomes `tbt_ms_p99`; others stay."""
    return _SECONDS.sub("_ms_", name)


def tables_section(tables: Sequence[RowTable]) -> str:
    """All tables, each after its title and with a place for its plot."""
    return f'<div id="table-area">{"".join(_table(table, number) for number, table in enumerate(tables))}</div>'


def _table(table: RowTable, number: int) -> str:
    columns, rows = table.columns, table.shown
    head = "".join(_heading(name, [row.get(name) for row in rows]) for name in columns)
    shown = rows[:MOST_ROWS]
    body = "".join(f"<tr>{''.join(_cell(row.get(name)) for name in columns)}</tr>" for row in shown)
    title = escape(table.title)
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    if len(shown) < len(table.rows):
        note += f"<p>The first {len(shown):,} of {len(table.rows):,} rows; the plot is of all of them.</p>"
    return (
        f'<h3>{title}</h3><div id="table-plot-{number}"></div>{note}'
        f'<div class="scroll tall" tabindex="0" role="region" aria-label="{title}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _heading(name: str, values: Sequence[Any]) -> str:
    words = any(isinstance(value, str | bool | list | dict) for value in values)
    kind = ' class="text"' if words else ""
    return f'<th scope="col"{kind}>{escape(name.replace("_", " "))}</th>'


def _cell(value: Any) -> str:
    value = json_ready(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"<td>{_shown(value)}</td>"
    if value is None:
        return "<td>-</td>"
    return f'<td class="text">{escape(value if isinstance(value, str) else json.dumps(value))}</td>'


def _seven_digits(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _shown(value: float) -> str:
    """Four digits, thousands separated."""
    if isinstance(value, int) or abs(value) >= 1000 or value == int(value):
        return f"{round(value):,}"
    return f"{value:.4g}"
