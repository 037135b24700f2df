"""`python -m executor`: run traces on a real model."""

from __future__ import annotations

from policies.command_line import run_command


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    from executor import commands_compression, commands_profile
    from executor.commands import app

    commands_profile.register(app)
    commands_compression.register(app)
    run_command(app, "executor")


if __name__ == "__main__":
    main()
