"""Who does the tasks: worker processes of this machine, a Ray cluster, or this very process. The results are equal.

An engine takes tasks by number and hands results back as they come, in any order.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

from experiments.errors import ExperimentError
from experiments.running.tasks import Result, Task, error_line, perform
from policies.edges.output_file import refuse_strangers

Tasks = Mapping[int, Task]
Waiting: TypeAlias = "queue.SimpleQueue[tuple[int, Task]]"
Done: TypeAlias = "queue.SimpleQueue[tuple[int, Result] | Exception]"
ENGINES = ("local", "ray")


class Engine(Protocol):
    """run(tasks) yields (number, result) as results come; closing the iterator or the engine stops the work."""

    def run(self, tasks: Tasks) -> Iterator[tuple[int, Result]]: ...

    def close(self) -> None: ...


def make_engine(name: str, *, workers: int | None = None, ray_address: str | None = None) -> Engine:
    """local: worker processes (as many as cores; 0: none, all work in this process). ray: a Ray cluster."""
    if name not in ENGINES:
        raise ExperimentError(f"--engine: found {name!r}, expected one of {', '.join(ENGINES)}")
    if name == "ray":
        from experiments.running.ray_runner import RayEngine

        return RayEngine(ray_address)
    if ray_address is not None:
        raise ExperimentError("--ray-address: found one without --engine ray")
    count = os.cpu_count() or 1 if workers is None else workers
    if count < 0:
        raise ExperimentError(f"--workers: found {workers}, expected 0 or more")
    return WorkerProcesses(count) if count else ThisProcess()


class ThisProcess:
    """All work here, one task after the other."""

    def run(self, tasks: Tasks) -> Iterator[tuple[int, Result]]:
        for number, task in tasks.items():
            yield number, json.loads(json.dumps(perform(task)))

    def close(self) -> None:
        pass


class WorkerProcesses:
    """`count` processes on this machine, fresh interpreters; one that dies costs its task, not the sweep.

    They stay from one run to the next, with whatever traces they have parsed, until the engine is closed.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._idle: list[subprocess.Popen[str]] = []
        self._all: list[subprocess.Popen[str]] = []
        self._closed = False

    def run(self, tasks: Tasks) -> Iterator[tuple[int, Result]]:
        if self._closed:
            raise ExperimentError("engine: was closed after its last run; make another")
        waiting: Waiting = queue.SimpleQueue()
        for item in tasks.items():
            waiting.put(item)
        done: Done = queue.SimpleQueue()
        for _ in range(min(self.count, len(tasks))):
            threading.Thread(target=self._feed_or_tell, args=(waiting, done), daemon=True).start()
        left = len(tasks)
        try:
            for _ in range(len(tasks)):
                answer = done.get()
                if isinstance(answer, Exception):
                    raise ExperimentError(f"worker processes: {error_line(answer)}") from answer
                yield answer
                left -= 1
        finally:
            if left:
                self.close()

    def close(self) -> None:
        self._closed = True
        for worker in self._all:
            worker.kill()
        for worker in self._all:
            worker.wait()
        self._all.clear()

    def _feed_or_tell(self, waiting: Waiting, done: Done) -> None:
        """A thread that died in silence would be waited for without end."""
        try:
            self._feed(waiting, done)
        except Exception as error:
            done.put(error)

    def _feed(self, waiting: Waiting, done: Done) -> None:
        """Keep one worker busy until nothing waits; replace it where it dies."""
        worker: subprocess.Popen[str] | None = None
        while not self._closed:
            try:
                number, task = waiting.get_nowait()
            except queue.Empty:
                break
            if worker is None:
                worker = self._idle.pop() if self._idle else self._start()
            result = _ask(worker, task)
            if result is None:
                code = worker.wait()
                died = f"worker process died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
                result = {"status": "failed", "error": died, "result": {}, "wall_s": 0.0}
                worker = None
            elif waiting.empty():
                # Idle before the last result is told: whoever hears of it may start the next run at once.
                self._idle.append(worker)
                worker = None
            done.put((number, result))
        if worker is not None:
            self._idle.append(worker)

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project_root()), *filter(None, sys.path)])}
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "experiments.running.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment,
            start_new_session=True,
        )
        self._all.append(worker)
        return worker


def _ask(worker: subprocess.Popen[str], task: Task) -> Result | None:
    """The worker's answer, or None if it died."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(task) + "\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    except (BrokenPipeError, ValueError):
        return None
    return json.loads(line) if line.endswith("\n") else None


def project_root() -> Path:
    """The folder that this project's packages lie in."""
    return Path(__file__).resolve().parents[2]


def placed(name: str, content: bytes) -> str:
    """A file of this name and content in the temporary folder, made once and shared by all who need the same."""
    return placed_together({name: content}, name)


def placed_together(contents: Mapping[str, bytes], first: str) -> str:
    """Files that belong together, in one folder; the path of `first`. A fitted model finds its arrays beside it.

    contents: name -> bytes. The same files are one place, made once.
    """
    each = sorted((re.sub(r"[/\0]", "_", name)[-200:], content) for name, content in contents.items())
    digest = hashlib.sha256()
    for name, content in each if len(each) > 1 else ():
        digest.update(f"{name} {len(content)} ".encode() + hashlib.sha256(content).digest())
    mark = (digest if len(each) > 1 else hashlib.sha256(each[0][1])).hexdigest()[:16]
    ours = Path(tempfile.gettempdir()) / f"charioteer-files-{os.getuid()}"
    ours.mkdir(mode=0o700, exist_ok=True)
    refuse_strangers(ours, ExperimentError)  # policies are among these files: nobody else may put one there
    folder = ours / mark
    folder.mkdir(exist_ok=True)
    for name, content in each:
        target = folder / name  # a model's own name may hold a slash
        if not target.exists():
            scratch = folder / f".{os.getpid()}.part"
            scratch.write_bytes(content)
            os.replace(scratch, target)
    return str(folder / re.sub(r"[/\0]", "_", first)[-200:])
