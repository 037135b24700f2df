"""Every command that README and docs/ show is parsed by the command line itself, so that no flag there can rot.

tests/test_readme.py runs the short ones of the README; here nothing is run: a command may take hours or need a GPU.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from policies import knobs_of, policy_class, policy_names
from tests.hardening.command_line import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
ANY = "|".join(PACKAGES)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown(page: Path) -> list[str]:
    """Commands in code blocks and in code spans; a span may stop early, with an ellipsis."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ")
    spans = re.findall(r"`([^`\n]*python -m [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line for line in blocks.splitlines() if re.search(rf"python3? -m ({ANY})\b", line)]
    return [line.partition("  #")[0].strip() for line in lines] + [" ".join(span.split()) for span in spans]


COMMANDS = sorted({(page.name, line) for page in PAGES for line in shown(page)})


@cache
def group_of(package: str) -> Any:
    return typer.main.get_command(import_module(f"{package}.__main__").build())


def test_there_are_many() -> None:
    assert len(COMMANDS) > 60


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_documented_command_is_one(page: str, line: str) -> None:
    words = shlex.split(line.replace("...", " ").replace("…", " ").split(" | ")[0].split(" > ")[0].rstrip("&"))
    start = words.index("-m")
    package, rest = words[start + 1], words[start + 2 :]
    if package not in PACKAGES:
        return
    group = group_of(package)
    if not rest or rest[0].startswith("-") or "|" in rest:
        return
    name, arguments = rest[0], rest[1:]
    assert name in group.commands, f"{page}: {package} has no command {name!r}"
    command = group.commands[name]
    takes_knobs = command.context_settings.get("ignore_unknown_options", False)
    known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
    named = [word for word in arguments if re.match(r"examples/\w+\.py:\w+$", word)]
    knobs = {"--" + knob.replace("_", "-") for policy in (*policy_names(), *named) for knob in knobs_of(policy_class(policy))}
    for word in arguments:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            assert flag in known or (takes_knobs and flag in knobs), f"{page}: {package} {name} has no {flag}"
