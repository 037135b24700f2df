"""Writes docs/licences.md: what the project depends on, and under which licence. `python docs/licences.py`."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "licences.md"
HEAD = """# Licences of what Charioteer depends on

Charioteer itself is Apache-2.0 ([LICENSE](../LICENSE)). None of these packages is part of it; pip installs them. Data
made from other projects' measurements names its source and licence in itself (`python -m profiler report h100`).
Written by `python docs/licences.py`, from the metadata of the installed packages; a dash: not installed there.

| package | lower bound | for | version read | licence |
|---|---|---|---|---|
"""


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    lines = [row(need, group) for group, needs in groups.items() for need in needs]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(lines)} packages")


def row(need: str, group: str) -> str:
    match = re.match(r"([\w.-]+)\s*>=\s*([\w.]+)", need)
    if match is None:
        raise SystemExit(f"pyproject.toml: {need!r} has no lower bound")
    name, least = match.groups()
    try:
        facts = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return f"| {name} | {least} | {group or 'everything'} | - | - |"
    return f"| {name} | {least} | {group or 'everything'} | {facts['Version']} | {licence(facts)} |"


def licence(facts: metadata.PackageMetadata) -> str:
    """The licence as a short name: the SPDX expression, else the classifier, else the first line of the text."""
    if facts.get("License-Expression"):
        return str(facts["License-Expression"])
    named = [line.rpartition(" :: ")[2] for line in facts.get_all("Classifier") or () if line.startswith("License ::")]
    text = str(facts.get("License") or "").strip().splitlines()
    return ", ".join(named) or (text[0][:60] if text else "not said")


if __name__ == "__main__":
    main()
