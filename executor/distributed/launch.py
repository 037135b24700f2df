"""How ranks come to be: as children of the command itself, or as torchrun started them; then one process group of all.

Children find rank 0 on a port of the loopback that the system picks, so nothing lies on disk and two runs never meet.
Each holds the other end of a pipe to rank 0: when rank 0 is gone, however that happened, the pipe ends and so do they.
Ranks that a launcher started look whether their parent is still the one that they began with.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from executor.errors import ExecutorError

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LIFELINE = "CHARIOTEER_LIFELINE"
OWN_STORE = "CHARIOTEER_OWN_STORE"
LONGEST = timedelta(days=30)
"""Between two frames a rank may be idle as long as a trace pauses; death is noticed by other means."""
MEETING = timedelta(minutes=5)
"""Ranks of several machines may be started by hand, one after the other."""
START_S = 120.0
BEAT_S = 1.0
"""A rank says so often that it lives, whatever it computes."""
SILENCE = "CHARIOTEER_RANK_SILENCE_S"
SILENT_S = 30.0
"""A rank that has said nothing for so long hangs, or its machine is paused; the environment variable changes it."""
LAST_WORDS_S = 10.0
"""A rank whose launcher is gone has so long to write what it has."""


class Child:
    """One rank that rank 0 started."""

    def __init__(self, rank: int, world: int, port: int) -> None:
        self.rank = rank
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the child)
        root = str(Path(__file__).resolve().parents[2])
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            OWN_STORE: "1",
            LIFELINE: "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", "")))),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "executor.distributed.worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._words,
        )

    def last_words(self) -> str:
        """The last line that it wrote to its standard error."""
        self._words.seek(0)
        lines = [line for line in self._words.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def how_it_ended(self) -> str:
        """Empty while it lives."""
        code = self.process.poll()
        if code is None:
            return ""
        if code < 0:
            return f"was killed by signal {-code}"
        words = self.last_words()
        return f"ended with exit code {code}" + (f" ({words})" if words else "")

    def end(self, patience_s: float) -> None:
        """Wait for it, and kill it if it does not end by itself."""
        assert self.process.stdin is not None
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdin.close()
        self._words.close()


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several that a launcher started."""
    return all(environment.get(name) for name in ENVIRONMENT) and int(environment["WORLD_SIZE"]) > 1


def longest_silence_s() -> float:
    """How long a rank may say nothing before it is given up; ExecutorError for a value that is no time."""
    text = os.environ.get(SILENCE, "")
    try:
        seconds = float(text or SILENT_S)
    except ValueError:
        seconds = 0.0
    if not 2 * BEAT_S <= seconds < 1e6:
        raise ExecutorError(f"{SILENCE}: found {text[:40]!r}, expected at least {2 * BEAT_S:g} seconds")
    return seconds


def rank_of_environment() -> tuple[int, int, int]:
    """(rank, world, local rank) as the environment says."""
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return rank, world, int(os.environ.get("LOCAL_RANK", rank))
    except (KeyError, ValueError):
        raise ExecutorError(f"found no usable {', '.join(ENVIRONMENT)} in the environment") from None


def backend_of(device: str) -> str:
    """NCCL for what lies on CUDA devices, gloo for the rest."""
    import torch

    on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return "cpu:gloo,cuda:nccl" if on_cuda else "gloo"


def start_children(world: int) -> tuple[Any, list[Child]]:
    """The store that all meet at, and ranks 1 to world - 1."""
    _use_loopback()
    # By itself the store listens on every interface, and whoever can reach it may read and write its keys. libuv, which
    # would be the default, does not take a socket of ours.
    listening = socket.create_server(("127.0.0.1", 0), backlog=world)
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        world,
        is_master=True,
        wait_for_workers=False,
        timeout=LONGEST,
        master_listen_fd=listening.detach(),
        use_libuv=False,
    )
    return store, [Child(rank, world, store.port) for rank in range(1, world)]


def _use_loopback() -> None:
    """Gloo picks an address by the machine's name unless told; between children it is the loopback."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def meet(store: Any, rank: int, world: int, backend: str, children: list[Child]) -> None:
    """Form the process group, once all are there. Rank 0 says who failed to come."""
    store.set(f"here/{rank}", "1")
    if rank == 0:
        missing = set(range(1, world))
        by_rank = {child.rank: child for child in children}
        until = time.monotonic() + START_S
        while missing:
            missing = {other for other in missing if not store.check([f"here/{other}"])}
            for other in sorted(missing):
                ended = by_rank[other].how_it_ended() if other in by_rank else ""
                if ended or time.monotonic() > until:
                    raise ExecutorError(f"rank {other} {ended or f'did not start within {START_S:.0f} s'}")
            time.sleep(0.02)
        store.set("backend", backend)
    else:
        backend = store.get("backend").decode()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=LONGEST)


def environment_store(rank: int, world: int) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT: torchrun's own, or rank 0's."""
    if os.environ.get(OWN_STORE):
        _use_loopback()
        return dist.TCPStore(
            "127.0.0.1",
            int(os.environ["MASTER_PORT"]),
            world,
            is_master=False,
            wait_for_workers=False,
            timeout=LONGEST,
            use_libuv=False,
        )
    _end_with_launcher()
    # A launcher that was gone before this process could look has no store: that is not worth waiting days for.
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=MEETING))
    store.set_timeout(LONGEST)
    return dist.PrefixStore("charioteer", store)


def _end_with_launcher() -> None:
    """A killed launcher takes its store with it, at which its ranks would go on asking for days."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LAST_WORDS_S)
        os._exit(128 + signal.SIGTERM)  # it waits inside PyTorch, where no signal is heard

    threading.Thread(target=watch, name="launcher", daemon=True).start()
