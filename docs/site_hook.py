"""What the site has beside its Markdown: the page of commands, from their own help; no script from a network."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.structure.files import File, Files

PACKAGES = ("simulator", "metrics", "workloads", "profiler", "experiments", "executor")
_NETWORK = re.compile(r'<script src="https?://[^"]*"></script>')


def on_files(files: Files, config: Any) -> Files:
    """Adds reference/commands.md, made at every build, so that it cannot be stale."""
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The theme's search falls back on a script of another host where a page is opened as a file: left out."""
    return _NETWORK.sub("", output)


def commands_page() -> str:
    """Every command of every package with its arguments and options."""
    from importlib import import_module

    import typer.main

    parts = [
        "# Commands\n\nEvery command, from its own help. `charioteer NAME` is the same as `python -m PACKAGE NAME`.\n"
    ]
    for package in PACKAGES:
        group: Any = typer.main.get_command(import_module(f"{package}.__main__").build())
        parts.append(f"## python -m {package}\n")
        for name, command in sorted(getattr(group, "commands", {}).items()):
            parts.append(f"### {package} {name}\n\n{_text(command.help)}\n")
            rows = [_row(option) for option in command.params if not getattr(option, "hidden", False)]
            if rows:
                parts.append("\n".join(["| option | default | what it is |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    default = option.default
    shown = (
        ""
        if default in (None, False, "", (), []) or callable(default) or "Sentinel" in repr(default)
        else f"`{default}`"
    )
    return f"| {names} | {shown} | {_text(getattr(option, 'help', None))} |"


def _text(words: str | None) -> str:
    return " ".join((words or "").split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")
