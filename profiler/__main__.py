"""`python -m profiler`: commands are assembled from the modules named below, each with a `register(app)`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from policies.edges.command_line import run_command

if TYPE_CHECKING:
    import typer

COMMAND_MODULES = (
    "profiler.commands.specs",  # models, hardware, capacity, predict, published
    "profiler.commands.profiles",  # import, fit, report, refine
)


def build() -> typer.Typer:
    import typer

    app = typer.Typer(
        name="profiler",
        help="What an iteration costs: models, GPUs, profiles and cost models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name in COMMAND_MODULES:
        if find_spec(name) is not None:
            import_module(name).register(app)
    return app


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    run_command(build, "profiler")


if __name__ == "__main__":
    main()
