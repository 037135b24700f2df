"""`charioteer`: one door to the commands of all packages. `charioteer replay ...` is `python -m simulator replay ...`.

A command is looked for in the order of PACKAGES; where two packages have one of the same name, `charioteer PACKAGE
COMMAND` says which. The current folder stays out of Python's import path, here and in worker processes: a `metrics.py`
of the user's own never takes the place of ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from typing import Any

from experiments.errors import ExperimentError
from policies.edges.command_line import run_command

PACKAGES = {
    "simulator": "replay a trace in virtual time, compare policies, get advice",
    "workloads": "describe, convert and generate traces",
    "metrics": "look at run folders",
    "profiler": "costs: models, GPUs, fits of measurements",
    "experiments": "validation, figures, sweeps, capacity, the fidelity board",
    "executor": "serve a real model under the same policies",
}
"""In the order in which a command is looked for."""


def main() -> None:
    """The console script."""
    os.environ["PYTHONSAFEPATH"] = "1"
    words = sys.argv[1:]
    if words[:1] in (["--version"], ["-V"]):
        print(f"charioteer {metadata.version('charioteer')}")
        return
    if not words or words[0] in ("--help", "-h"):
        run_command(lambda: _print_overview, "charioteer")
    package, rest = _door(words)
    sys.argv = [sys.argv[0], *rest]
    name = f"charioteer {package}" if rest is not words else "charioteer"
    run_command(_build(package), package, program=name)


def _door(words: list[str]) -> tuple[str, list[str]]:
    """The package, and what its command line gets; a word that is no command is left to the message of `_unknown`."""
    if words[0] in PACKAGES:
        return words[0], words[1:]
    for package in PACKAGES:
        if words[0] in _commands(package):
            return package, words
    run_command(lambda: _unknown(words[0]), "charioteer")


def _build(package: str) -> Callable[[], Any]:
    build: Callable[[], Any] = import_module(f"{package}.__main__").build
    return build


def _commands(package: str) -> dict[str, Any]:
    from typer.main import get_command

    commands: dict[str, Any] = getattr(get_command(_build(package)()), "commands", {})
    return commands


def _all_commands() -> Iterator[tuple[str, str, str]]:
    """Package, how the door calls the command, its first sentence."""
    taken: set[str] = set()
    for package in PACKAGES:
        for name, command in _commands(package).items():
            words = f"{package} {name}" if name in taken or name in PACKAGES else name
            taken.add(name)
            sentence = " ".join((command.help or "").split("\n\n")[0].split())
            yield package, words, sentence


def _print_overview(prog_name: str = "") -> None:
    """All commands, package by package."""
    print("Usage: charioteer COMMAND [ARGUMENTS]      charioteer COMMAND --help      charioteer --version")
    shown = ""
    for package, words, sentence in _all_commands():
        if package != shown:
            print(f"\n{package}: {PACKAGES[package]}")
            shown = package
        print(f"  {words:24}{sentence[:92]}{'...' if len(sentence) > 92 else ''}")


def _unknown(word: str) -> Callable[..., Any]:
    import difflib

    known = [words for _, words, _ in _all_commands()]
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    meant = f"did you mean {near[0]}?" if near else "`charioteer --help` lists all commands"
    raise ExperimentError(f"found no command {word!r}; {meant}")


if __name__ == "__main__":
    main()
