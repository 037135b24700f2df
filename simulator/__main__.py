"""`python -m simulator`: replay traces in virtual time."""

from __future__ import annotations

from policies.command_line import run_command


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    from simulator.commands import app

    run_command(app, "simulator")


if __name__ == "__main__":
    main()
