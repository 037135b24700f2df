"""The serving command: says where it listens, serves, and prints what the session was."""

from __future__ import annotations

import sys
from pathlib import Path

from policies.edges.command_line import tell_notes
from simulator.commands.printing import print_runs
from simulator.config import ReplayConfig
from workloads.door.options import DoorOptions, check_installed


def serve(
    settings: ReplayConfig, options: DoorOptions, answer_lengths: str | None, out: Path | None, as_json: bool
) -> None:
    """Serve until told to stop."""
    check_installed()
    from simulator.serving.served import ServedSimulation

    session = ServedSimulation(settings, options, answer_lengths=answer_lengths, out=out, ready=_say)
    run = session.run()
    if run is None:
        print("no request has come: nothing is written", file=sys.stderr)
        return
    tell_notes(run.notes)
    print_runs({settings.policy: run}, out, False, as_json)


def _say(url: str) -> None:
    print(f"serving at {url} (POST {url}/v1/completions; Ctrl-C ends the session)", file=sys.stderr, flush=True)
