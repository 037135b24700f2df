"""`python -m metrics`: look into run folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.edges.command_line import run_command

if TYPE_CHECKING:
    import typer


def build() -> typer.Typer:
    from metrics.commands import app

    return app


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    run_command(build, "metrics")


if __name__ == "__main__":
    main()
