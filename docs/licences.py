"""Writes docs/licences.md: what the project depends on, and under which licence. `python docs/licences.py`."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "licences.md"
HEAD = """# Licences of what Charioteer depends on

Charioteer itself is Apache-2.0 ([LICENSE](../LICENSE)). None of these packages is part of it; pip installs them.
Measurements of others travel with it ([NOTICE](../NOTICE)); below, table by table. Fits of them name their source and
licence in themselves (`python -m profiler report h100`).
Written by `python docs/licences.py`, from the metadata of the installed packages; a dash: not installed there.

| package | lower bound | for | version read | licence |
|---|---|---|---|---|
"""


FACTS = """
## Measurements that travel with the project

Tables of `profiler/data/facts`; its sources.toml also says what each holds and what is not known.

| table | rows | source | licence |
|---|---|---|---|
"""


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    lines = [row(need, group) for group, needs in groups.items() for need in needs]
    sources = tomllib.loads((ROOT / "profiler/data/facts/sources.toml").read_text(encoding="utf-8"))
    facts = [f"| {name} | {one['rows']:,} | {one['source']} | {one['licence']} |" for name, one in sources.items()]
    PAGE.write_text("\n".join([HEAD + "\n".join(lines), FACTS + "\n".join(facts), ""]), encoding="utf-8")
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
