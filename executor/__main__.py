"""`python -m executor`: run traces on a real model."""

from __future__ import annotations

import sys

PACKAGES = {"policies", "workloads", "metrics", "profiler", "executor"}


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    from executor import commands_compression, commands_profile
    from executor.commands import app

    commands_profile.register(app)
    commands_compression.register(app)
    try:
        app(prog_name="python -m executor")
    except ValueError as error:
        # Each folder has one exception type of its own; anything else is a bug and keeps its traceback.
        if type(error).__module__.split(".")[0] not in PACKAGES:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
