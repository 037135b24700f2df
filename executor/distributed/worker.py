"""The process of every rank but 0: it does what rank 0's frames say, until told to stop or until rank 0 is gone."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from executor.distributed.clocks import machine
from executor.distributed.launch import (
    BEAT_S,
    LIFELINE,
    environment_store,
    meet,
    rank_of_environment,
    started_by_torchrun,
)
from executor.distributed.layout import Layout
from executor.distributed.links import BATCH, BEAT, BYE, CALL, FAILURE, PING, PONG, REPLY, RESULT, STOP, Bytes, Frames
from executor.distributed.plans import read_plan
from executor.distributed.stage_worker import (
    SWITCH_S,
    Ready,
    ShardOrder,
    StageWorker,
    load_shard,
    next_ready,
    stage_group,
)
from policies.edges.user_code import TRACEBACKS


class Worker:
    """One rank. The receiving thread takes frames and hidden states, the main thread computes."""

    def __init__(self) -> None:
        self.rank, self.world, self.local_rank = rank_of_environment()
        store = environment_store(self.rank, self.world)
        meet(store, self.rank, self.world, "", [])
        self.frames = Frames(dist.new_group(backend="gloo"))
        self.stage: StageWorker | None = None
        self._group: Any = None
        self._layout: Layout | None = None
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._speaking = threading.Lock()
        self._said_all = False

    def last_word(self, kind: int, payload: Bytes) -> None:
        """Rank 0 listens no more after this frame: a sign of life behind it would wait to be heard for ever."""
        with self._speaking:
            self._said_all = True
            self.frames.send(kind, payload, [0])
        self.frames.flush()

    def _beat(self) -> None:
        """Say that this process runs. Where it is stopped, or its machine is, this stops too."""
        while True:
            time.sleep(BEAT_S)
            with self._speaking:
                if self._said_all:
                    return
                try:
                    self.frames.send(BEAT, np.empty(0, np.uint8), [0])
                except RuntimeError:
                    return  # rank 0 is gone, which the receiving thread hears of

    def serve(self) -> None:
        """Until STOP. Raises whatever went wrong here; RuntimeError where rank 0 or a neighbour is gone."""
        threading.Thread(target=self._receive, name="frames", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        while True:
            item, waited = next_ready(self._queue)
            if isinstance(item, Ready):
                assert self.stage is not None
                ran = self.stage.run(item, waited)
                if ran.ids is not None and self.rank == self.stage.layout.sampling_rank:
                    answer = np.array([ran.number, ran.end_ns, *ran.ids], np.int64)
                    self.frames.send(RESULT, answer.view(np.uint8), [0])
            elif isinstance(item, BaseException):
                raise item
            elif item is None:
                self.last_word(BYE, np.empty(0, np.uint8))
                return
            else:
                reply = self._call(**item)
                self.frames.send(REPLY, reply if isinstance(reply, np.ndarray) else _json(reply), [0])

    def _receive(self) -> None:
        try:
            while True:
                kind, payload = self.frames.receive(0)
                if kind == BATCH:
                    assert self.stage is not None
                    self._queue.put(self.stage.fetch(read_plan(payload, self.stage.loaded.device)))
                elif kind == PING:
                    self.frames.send(PONG, np.array([time.perf_counter_ns()], np.int64).view(np.uint8), [0])
                elif kind == CALL:
                    self._queue.put(json.loads(payload.tobytes()))
                elif kind == STOP:
                    self._queue.put(None)
                    return
        except BaseException as error:  # whatever it is, the main thread ends with it
            self._queue.put(error)

    def _call(self, do: str, **values: Any) -> Any:
        if do == "layout":
            self._layout = Layout(values["tp"], values["pp"], tuple(values["split"]))
            self._group = stage_group(self._layout, self.rank)
            return {"machine": machine()}
        if do == "load":
            assert self._layout is not None
            self.stage = None
            loaded = load_shard(ShardOrder.of(values), self._layout, self.rank, self.local_rank, self._group)
            self.stage = StageWorker(loaded, self._layout, self.rank)
            return {"weight_bytes": loaded.model.weight_bytes, "kv_bytes_per_token": loaded.kv_bytes_per_token}
        assert self.stage is not None
        if do == "pool":
            return {"kv_pool_bytes": self.stage.new_cache(**values).num_bytes}
        if do == "log":
            return _bytes(self.stage.take_log())
        raise ValueError(f"unknown call {do!r}")


def _json(value: Any) -> Bytes:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _bytes(array: NDArray[np.int64]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _end_with_rank_0() -> None:
    """The pipe from rank 0 ends when that process does, in whatever way."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def serve_if_not_rank_0() -> None:
    """In a process that torchrun started as another rank than 0: serve rank 0, and never return."""
    if started_by_torchrun() and rank_of_environment()[0] > 0:
        main()


def main() -> None:
    """Serve rank 0; never returns. Signals that reach the whole process group are rank 0's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ.get(LIFELINE):
        _end_with_rank_0()
    sys.setswitchinterval(SWITCH_S)
    worker = None
    try:
        worker = Worker()
        worker.serve()
    except BaseException as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if os.environ.get(TRACEBACKS):
            traceback.print_exc()
        print(text, file=sys.stderr, flush=True)
        if worker is not None:
            _tell(worker, f"{type(error).__name__}: {text}")
        os._exit(1)
    # Other threads may still be inside gloo: no orderly end is worth waiting for.
    os._exit(0)


def _tell(worker: Worker, text: str) -> None:
    try:
        worker.last_word(FAILURE, np.frombuffer(text.encode(), np.uint8))
    except RuntimeError:
        return  # rank 0 is gone: there is nobody to tell


if __name__ == "__main__":
    main()
