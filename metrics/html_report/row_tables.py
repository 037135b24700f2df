"""Rows to explore: whole tables in the page itself, so that they can be read, copied and printed without JavaScript.

The script puts the choice of axes and the plot of a table above it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from metrics.run_folder import json_ready


@dataclass(frozen=True)
class RowTable:
    """Rows to explore: points of a sweep, capacities of settings. axes: columns that were set, not measured."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    axes: Sequence[str]
    note: str = ""

    @property
    def columns(self) -> list[str]:
        """Every key that any row has a value for, in the order of their first rows."""
        return list(dict.fromkeys(key for row in self.rows for key, value in row.items() if value is not None))


def tables_section(tables: Sequence[RowTable]) -> str:
    """All tables, each after its title and with a place for its plot."""
    return f'<div id="table-area">{"".join(_table(table, number) for number, table in enumerate(tables))}</div>'


def _table(table: RowTable, number: int) -> str:
    columns = table.columns
    head = "".join(_heading(name, [row.get(name) for row in table.rows]) for name in columns)
    body = "".join(f"<tr>{''.join(_cell(row.get(name)) for name in columns)}</tr>" for row in table.rows)
    title = escape(table.title)
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
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


def _shown(value: float) -> str:
    """Four digits, thousands separated."""
    if isinstance(value, int) or abs(value) >= 1000 or value == int(value):
        return f"{round(value):,}"
    return f"{value:.4g}"
