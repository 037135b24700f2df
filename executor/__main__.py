"""`python -m executor`: run traces on a real model."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from policies.edges.command_line import run_command

if TYPE_CHECKING:
    import typer


@cache
def build() -> typer.Typer:
    from executor.commands import compression, profile
    from executor.commands.commands import app

    profile.register(app)
    compression.register(app)
    return app


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    run_command(build, "executor")


if __name__ == "__main__":
    main()
