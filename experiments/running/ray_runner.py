"""Tasks on a Ray cluster. Its nodes need Python and this project's dependencies; code and named files are sent."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.errors import ExperimentError
from experiments.running.task_runners import Tasks, placed_together, project_root
from experiments.running.tasks import Result, Task, one_thread_each, perform
from policies.edges.command_line import tell_notes
from policies.edges.input_digests import changed_inputs, digests_of, named_files, parts_of
from policies.edges.user_code import PACKAGES

FIRST_WITH_TOKENS = (2, 52)
_AHEAD = 2
"""Tasks submitted per CPU of the cluster: one runs, one waits."""


class RayEngine:
    """address: of an existing cluster (host:port, ray://host:port); None: the one that this machine belongs to;
    "local": a cluster of this machine alone, for the time of the work."""

    def __init__(self, address: str | None) -> None:
        # Read when Ray is first used; a cluster of others goes by what its users have set.
        too_late = "ray" in sys.modules and "RAY_AUTH_MODE" not in os.environ
        self._environment = _token() if address == "local" and not too_late else {}
        os.environ.update(self._environment)
        try:
            import ray
        except ImportError:
            raise ExperimentError("--engine ray: Ray is not installed: pip install ray") from None
        modules = [str(project_root() / name) for name in sorted(PACKAGES) if (project_root() / name).is_dir()]
        environment = {"py_modules": modules, "env_vars": {"OMP_NUM_THREADS": "1"}}
        if address == "local" and (too_late or _version(ray.__version__) < FIRST_WITH_TOKENS):
            why = "was imported before RAY_AUTH_MODE=token was set" if too_late else "has no tokens"
            tell_notes(
                [
                    f"Ray {ray.__version__} {why}: as long as this runs, whoever reaches a port of this "
                    "machine can run code as you; take Ray 2.52 or later, or --engine local"
                ]
            )
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            ray.init(
                address=address or "auto",
                runtime_env=environment,
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=True,
                include_dashboard=False if address == "local" else None,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ExperimentError(
                f"--engine ray: no cluster at {address or 'this machine'} ({reason}); start one with "
                "`ray start --head`, name one with --ray-address host:port, or take --ray-address local"
            ) from None
        finally:
            if threading.current_thread() is threading.main_thread():
                # Ray ends a process by SIGTERM with exit code 15 and without cleaning up.
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        self._ray: Any = ray

    def run(self, tasks: Tasks) -> Iterator[tuple[int, Result]]:
        ray = self._ray
        remote = ray.remote(max_retries=2)(_perform_with_files)
        kept: dict[str, Any] = {}
        room = max(1, int(ray.cluster_resources().get("CPU", 1))) * _AHEAD
        flying: dict[Any, int] = {}
        waiting = iter(tasks.items())
        try:
            while True:
                while len(flying) < room and (item := next(waiting, None)) is not None:
                    number, task = item
                    if changed := changed_inputs(task.get("inputs") or {}, digests_of({**task, "inputs": None})):
                        yield number, _failed(f"found inputs that changed while the work went on: {', '.join(changed)}")
                        continue
                    # The other node has the content under another name: it was looked at here.
                    sent = {key: value for key, value in task.items() if key != "inputs"}
                    files = {name: parts_of(name) for name in named_files(sent)}
                    for name, parts in files.items():
                        if name not in kept:
                            kept[name] = ray.put({part.name: part.read_bytes() for part in parts})
                    flying[remote.remote(sent, list(files), *(kept[name] for name in files))] = number
                if not flying:
                    return
                ready, _ = ray.wait(list(flying), num_returns=1)
                for reference in ready:
                    yield flying.pop(reference), self._fetch(reference)
        finally:
            for reference in flying:
                ray.cancel(reference, force=True)

    def _fetch(self, reference: Any) -> Result:
        try:
            result: Result = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return _failed(f"Ray lost the task: {type(error).__name__}")
        return result

    def close(self) -> None:
        self._ray.shutdown()
        for name, value in self._environment.items():
            if os.environ.get(name) == value:
                del os.environ[name]


def _token() -> dict[str, str]:
    """What makes Ray's services refuse whoever has not this secret; nothing where the user has chosen himself."""
    if "RAY_AUTH_MODE" in os.environ:
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _failed(error: str) -> Result:
    return {"status": "failed", "error": error, "result": {}, "wall_s": 0.0}


def _perform_with_files(task: Task, names: list[str], *contents: Mapping[str, bytes]) -> Result:
    """Do a task on another node: files that it names are written to a place of this node first."""
    one_thread_each()
    places = {name: _placed(name, parts) for name, parts in zip(names, contents)}
    return perform(_renamed(task, places))


def _placed(name: str, contents: Mapping[str, bytes]) -> str:
    """Where the files behind a name lie on this node; contents: name within their folder -> bytes."""
    here = Path(name)
    folder = here if here.name not in contents else here.parent
    try:
        if all((folder / part).read_bytes() == content for part, content in contents.items()):
            return name
    except OSError:
        pass
    if here.name in contents:
        return placed_together(contents, here.name)
    return str(Path(placed_together(contents, next(iter(contents)))).parent)


def _renamed(value: Any, places: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _renamed(inner, places) for key, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner, places) for inner in value]
    if not isinstance(value, str):
        return value
    # The parts of a text that `named_files` looks at; a name inside another name is none of them.
    kind, _, file = value.partition(":")
    path, _, inner = value.rpartition(":")
    if value in places:
        return places[value]
    if file in places:
        return f"{kind}:{places[file]}"
    return f"{places[path]}:{inner}" if path in places else value
