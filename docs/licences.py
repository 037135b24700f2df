"""Writes docs/reference/licences.md and constraints.txt: dependencies, licences, tested versions.

`python docs/licences.py`, in an environment in which the tests pass.
"""

from __future__ import annotations

import platform
import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "licences.md"
HEAD = """# Licences of what Charioteer depends on

Charioteer itself is Apache-2.0 (`LICENSE`). None of these packages is part of it; pip installs them.
Measurements of others travel with it (`NOTICE`); below, table by table. Fits of them name their source and
licence in themselves (`python -m profiler report h100`).
Written by `python docs/licences.py`, from the metadata of the installed packages; a dash: not installed there.

| package | lower bound | for | version read | licence |
|---|---|---|---|---|
"""


INDIRECT = """
## What these packages need in turn

Installed by pip with them, wherever the tests ran; for Linux, and for other systems as pip decides there.

| package | needed by | version read | licence |
|---|---|---|---|
"""

CONSTRAINTS = """# Versions with which Charioteer's tests passed on {python}; written by `python docs/licences.py`.
#     pip install -c constraints.txt .
# pyproject.toml has lower bounds alone: newer versions are welcome, these are known to work together.
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
    direct = [need for needs in groups.values() for need in needs]
    found = closure(direct)
    named = {canonical(re.split(r"[^\w.-]", need)[0]) for need in direct}
    others = [
        f"| {name} | {', '.join(sorted(by))} | {metadata.version(name)} | {licence(metadata.metadata(name))} |"
        for name, by in sorted(found.items())
        if name not in named
    ]
    sections = [HEAD + "\n".join(lines), INDIRECT + "\n".join(others), FACTS + "\n".join(facts), ""]
    PAGE.write_text("\n".join(sections), encoding="utf-8")
    pins = [f"{name}=={metadata.version(name).partition('+')[0]}" for name in sorted(found)]
    head = CONSTRAINTS.format(python=f"Python {platform.python_version()}")
    (ROOT / "constraints.txt").write_text(head + "\n".join(pins) + "\n", encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(lines)} packages and {len(others)} that they need; constraints.txt")


def closure(needs: list[str]) -> dict[str, set[str]]:
    """Every installed package that these requirements lead to, and who asks for it (nobody else: the project)."""
    found: dict[str, set[str]] = {}
    waiting = [(need, "Charioteer", frozenset()) for need in needs]
    done = set()
    while waiting:
        need, by, extras = waiting.pop()
        wanted = Requirement(need)
        markers = [{"extra": extra} for extra in (*extras, "")]
        if wanted.marker is not None and not any(wanted.marker.evaluate(each) for each in markers):
            continue
        name = canonical(wanted.name)
        try:
            inner = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.setdefault(name, set()).add(by)
        key = (name, frozenset(wanted.extras))
        if key not in done:
            done.add(key)
            waiting += [(each, name, frozenset(wanted.extras)) for each in inner]
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


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
