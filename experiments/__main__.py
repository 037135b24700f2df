"""`python -m experiments`: whatever joins two worlds. Commands come from modules, each with a `register(app)`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from policies.edges.command_line import run_command

if TYPE_CHECKING:
    import typer

COMMAND_MODULES = (
    "experiments.vllm.parity_command",  # parity
    "experiments.vllm.fidelity_command",  # fidelity
    "experiments.vllm.whole_engines_command",  # engines
    "experiments.calibration.from_outside_command",  # calibrate-engine
    "experiments.coverage.command",  # coverage
    "experiments.board.command",  # board
    "experiments.validation.command",  # validate
    "experiments.validation.pools",  # live-pools
    "experiments.calibration.command",  # calibrate
    "experiments.papers.command",  # list, run, claims
    "experiments.sweeps.command",  # sweep
    "experiments.capacity.command",  # capacity
    "experiments.arena.command",  # arena
    "experiments.papers.sarathi_pipeline",  # sarathi-pipeline
    "experiments.papers.attention_ffn",  # attention-ffn
)


def build() -> typer.Typer:
    import typer

    app = typer.Typer(
        name="experiments",
        help="Parity, fidelity, validation, figures: whatever holds two worlds side by side.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def experiments() -> None:
        """Keeps `python -m experiments NAME` a group of commands, however few there are."""

    for name in COMMAND_MODULES:
        if find_spec(name) is not None:
            import_module(name).register(app)
    return app


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    run_command(build, "experiments")


if __name__ == "__main__":
    main()
