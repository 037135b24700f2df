"""Writes docs/settings.md from the declared settings: `python docs/settings.py`."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from executor.config import LiveConfig  # noqa: E402
from policies.edges.declared_settings import Setting, settings_of  # noqa: E402
from simulator.config import ReplayConfig  # noqa: E402
from workloads.door.options import DoorOptions  # noqa: E402
from workloads.reading_options import ReadingOptions  # noqa: E402

HEAD = """# Settings

Every setting of a run is declared once, in `simulator/config.py`, `executor/config.py`,
`workloads/reading_options.py` and (what `serve` adds, flags alone) `workloads/door/options.py`.
It is a flag, a key of a settings file (`--config run.toml`) and a field of the Python call under the same name, and
`config.json` of a run holds its value. This page is written from the declarations by `python docs/settings.py`.
"""


def default_of(cls: Any, name: str) -> str:
    entry = next(entry for entry in fields(cls) if entry.name == name)
    value = entry.default_factory() if entry.default_factory is not MISSING else entry.default
    return "" if value in (None, (), {}) else str(value).lower() if isinstance(value, bool) else str(value)


def row(cls: Any, name: str, each: Setting) -> str:
    allowed = ", ".join(each.choices) or each.range
    flag = f"`{each.flag}`" if each.flag else ""
    cells = (f"`{name}`", flag, default_of(cls, name), allowed, each.text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, command, classes in (
        ("Simulated runs", "python -m simulator replay", (ReplayConfig, ReadingOptions)),
        ("Live runs", "python -m executor replay", (LiveConfig, ReadingOptions)),
        ("Served sessions", "serve", (DoorOptions,)),
    ):
        parts.append(f"## {title}: `{command}`\n")
        groups: dict[str, list[str]] = {}
        for cls in classes:
            for name, each in settings_of(cls).items():
                groups.setdefault(each.group or "In a settings file alone", []).append(row(cls, name, each))
        for group, rows in groups.items():
            head = ["| key | flag | default | allowed | what it is |", "|---|---|---|---|---|"]
            parts.append("\n".join([f"### {group}\n", *head, *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "settings.md").write_text(page(), encoding="utf-8")
