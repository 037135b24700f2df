"""Rank 0's side of all ranks: it starts them, loads the model on all, hands out batches, hears what became of them.

A listening thread per rank takes its frames; the compute thread is rank 0's own stage. Both put what they have on one
queue, which the engine's loop waits on. A rank that dies closes its connections: its listener hears of it at once, and
so does whoever waits for the queue.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from executor.distributed import launch
from executor.distributed.clocks import EXCHANGES, Exchange, Offset, RankClock, machine, offset_of
from executor.distributed.layout import Layout
from executor.distributed.links import BATCH, BEAT, BYE, CALL, FAILURE, PING, PONG, REPLY, RESULT, STOP, Bytes, Frames
from executor.distributed.plans import read_plan
from executor.distributed.stage_worker import (
    COLUMNS,
    SWITCH_S,
    Ran,
    Ready,
    ShardOrder,
    StageWorker,
    load_shard,
    next_ready,
    stage_group,
)
from executor.errors import ExecutorError

CALL_S = 600.0
"""Longest that loading may take on any rank."""


class RankError(ExecutorError):
    """A rank died or failed: the run cannot go on."""


class Trouble(NamedTuple):
    """What is known of a rank that failed. told: in its own words; else it only went silent."""

    rank: int
    text: str
    told: bool


class Ranks:
    """All ranks of one layout. A context manager: leaving it ends them.

    facts: what each rank said of itself when the model was loaded.
    """

    def __init__(self, layout: Layout, device: str = "auto") -> None:
        self.layout = layout
        self.children: list[launch.Child] = []
        self.results: SimpleQueue[Ran | Trouble] = SimpleQueue()
        self.facts: list[dict[str, Any]] = []
        self.local_ranks = layout.world
        self.stage: StageWorker | None = None
        self._trouble: list[Trouble] = []
        self._heard_s = [time.monotonic()] * layout.world
        self._looked_s = time.monotonic()
        self._silence_s = launch.longest_silence_s()
        self._closing = False
        self._replies: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(layout.world)]
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._others = list(range(1, layout.world))
        self._local_rank = 0
        self._switch_s = sys.getswitchinterval()
        if dist.is_initialized():
            raise ExecutorError("this process has ranks already, and can have no others before they end")
        try:
            self._start(launch.backend_of(device))
        except BaseException:
            self.close(kill=True)
            raise

    def _start(self, backend: str) -> None:
        layout = self.layout
        if launch.started_by_torchrun():
            rank, world, self._local_rank = launch.rank_of_environment()
            if world != layout.world:
                raise ExecutorError(
                    f"--tp {layout.tp} --pp {layout.pp} are {layout.world} ranks; the launcher started {world}"
                )
            self.local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
            store = launch.environment_store(rank, world)
        else:
            store, self.children = launch.start_children(layout.world)
        self._store = store
        sys.setswitchinterval(SWITCH_S)
        launch.meet(store, 0, layout.world, backend, self.children)
        self.frames = Frames(dist.new_group(backend="gloo"))
        for rank in self._others:
            self._thread(self._listen, rank)
        values = {"do": "layout", "tp": layout.tp, "pp": layout.pp, "split": list(layout.split)}
        self._send_call(values)
        self._group = stage_group(layout, 0)
        ours = machine()
        self._same = [bool(ours) and told["machine"] == ours for told in self._answers()]

    def _thread(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True, name=target.__name__)
        thread.start()
        self._threads.append(thread)

    # Threads

    def _listen(self, rank: int) -> None:
        """Frames of one rank, until it says goodbye or is gone."""
        try:
            while True:
                kind, payload = self.frames.receive(rank)
                self._heard_s[rank] = time.monotonic()
                if kind == BEAT:
                    continue
                if kind == RESULT:
                    number, end_ns, *ids = payload.view(np.int64).tolist()
                    self.results.put(Ran(number, ids, end_ns))
                elif kind == PONG:
                    self._replies[rank].put((time.perf_counter_ns(), int(payload.view(np.int64)[0])))
                elif kind == REPLY:
                    self._replies[rank].put(payload)
                elif kind == BYE:
                    return
                else:
                    assert kind == FAILURE, kind
                    self._report(Trouble(rank, payload.tobytes().decode("utf-8", "replace"), True))
                    return
        except RuntimeError as error:
            self._report(Trouble(rank, str(error), False))

    def _look_for_silence(self) -> None:
        """Give up a rank that says nothing: it hangs, and whoever waits for it would hang with it."""
        now = time.monotonic()
        if now - self._looked_s > self._silence_s / 2:
            # This process itself was stopped or kept busy: what others said meanwhile has yet to be heard.
            self._heard_s = [now] * self.layout.world
        self._looked_s = now
        for rank in self._others:
            if now - self._heard_s[rank] > self._silence_s and not self._trouble:
                words = f"no sign of life for {self._silence_s:g} s: it hangs, or its machine is paused"
                self._report(Trouble(rank, words, True))

    def _report(self, trouble: Trouble) -> None:
        if self._closing:
            return
        self._trouble.append(trouble)
        self.results.put(trouble)
        for replies in self._replies:
            replies.put(trouble)

    def _compute(self) -> None:
        """Rank 0's own stage."""
        stage = self.stage
        assert stage is not None
        torch.set_num_threads(self._threads_of_model)
        try:
            while True:
                item, waited = next_ready(self._queue)
                if item is None:
                    return
                ran = stage.run(item, waited)
                if ran.ids is not None and self.layout.sampling_rank == 0:
                    self.results.put(ran)
        except Exception as error:
            self._report(Trouble(0, f"{type(error).__name__}: {error}", not _is_connection(str(error))))

    # Calls

    def _send_call(self, values: dict[str, Any]) -> None:
        payload = np.frombuffer(json.dumps(values).encode(), np.uint8)
        self._guarded(lambda: self.frames.send(CALL, payload, self._others))

    def _answers(self, parse: Callable[[Bytes], Any] = lambda payload: json.loads(payload.tobytes())) -> list[Any]:
        """What every other rank replied to the last call, in the order of ranks."""
        return [parse(self._reply(rank)) for rank in self._others]

    def _reply(self, rank: int) -> Any:
        until = time.monotonic() + CALL_S
        while True:
            try:
                # Short waits: a signal's handler runs in between.
                reply = self._replies[rank].get(timeout=0.25)
            except Empty:
                self._look_for_silence()
                if time.monotonic() > until:
                    raise RankError(f"{self.layout.name_of(rank)} has not answered for {CALL_S:.0f} s") from None
                continue
            if isinstance(reply, Trouble):
                raise self.error()
            return reply

    def load(self, order: ShardOrder) -> Any:
        """Load the model on all ranks at once; returns rank 0's part."""
        self._stop_computing()
        self.stage = None
        self._send_call({"do": "load", **order.__dict__})
        loaded = load_shard(order, self.layout, 0, self._local_rank, self._group)
        self._threads_of_model = order.threads
        self.stage = StageWorker(loaded, self.layout, 0)
        ours = {"weight_bytes": loaded.model.weight_bytes, "kv_bytes_per_token": loaded.kv_bytes_per_token}
        self.facts = [ours, *self._answers()]
        self._thread(self._compute)
        return loaded

    def new_pools(self, blocks: int, block_size: int, fill_seed: int | None = None) -> int:
        """A fresh KV pool on every rank; returns their bytes together."""
        assert self.stage is not None
        self._send_call({"do": "pool", "blocks": blocks, "block_size": block_size, "fill_seed": fill_seed})
        ours = self.stage.new_cache(blocks, block_size, fill_seed).num_bytes
        return ours + sum([int(told["kv_pool_bytes"]) for told in self._answers()])

    def logs(self) -> list[NDArray[np.int64]]:
        """Every rank's log of its batches (see `StageWorker`), in its own clock; the ranks are idle meanwhile."""
        assert self.stage is not None
        self._send_call({"do": "log"})
        theirs = self._answers(lambda payload: payload.view(np.int64).reshape(-1, COLUMNS))
        return [self.stage.take_log(), *theirs]

    def offsets(self) -> list[Offset]:
        """The clocks of all other ranks against this one's, by ping-pong."""
        found = []
        for rank in self._others:
            exchanges = []
            for _ in range(EXCHANGES):
                sent = time.perf_counter_ns()
                self._guarded(lambda rank=rank: self.frames.send(PING, np.empty(0, np.uint8), [rank]))  # type: ignore[misc]
                received, there = self._reply(rank)
                exchanges.append(Exchange(sent, there, received))
            found.append(offset_of(exchanges))
        return found

    def clocks(self, before: Sequence[Offset], after: Sequence[Offset]) -> list[RankClock]:
        pairs = zip(self._others, before, after, self._same)
        return [RankClock(rank, first, last, same) for rank, first, last, same in pairs]

    # Batches

    def submit(self, plan: Bytes) -> int:
        """Hand a batch to all ranks; returns when that was done (perf_counter_ns)."""
        assert self.stage is not None
        if self._others:
            self._guarded(lambda: self.frames.send(BATCH, plan, self._others))
        own = read_plan(plan, self.stage.loaded.device)
        now = time.perf_counter_ns()
        self._queue.put(Ready(own, now))
        return now

    def result(self, timeout_s: float | None) -> Ran | None:
        """The next batch that the last stage has done, in plan order; None if there is none within the time (None: for
        as long as it takes, but signals are seen meanwhile). RankError where a rank has failed."""
        try:
            if timeout_s is not None and timeout_s <= 0:
                found = self.results.get_nowait()
            else:
                found = self.results.get(timeout=0.25 if timeout_s is None else timeout_s)
        except Empty:
            self._look_for_silence()
            return None
        if isinstance(found, Trouble):
            raise self.error()
        return found

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._report(Trouble(0, str(error), False))
            raise self.error() from None

    def _guarded(self, action: Callable[[], None]) -> None:
        with self._guard():
            action()

    def error(self) -> RankError:
        """What went wrong first, told by those who know best: a rank's own words, then how a child ended."""
        time.sleep(0.3)  # who failed first may be heard of last
        for trouble in list(self._trouble):
            if trouble.told and not _is_connection(trouble.text):
                return RankError(f"{self.layout.name_of(trouble.rank)} failed: {trouble.text.splitlines()[0]}")
        ended = [(child.rank, how) for child in self.children if (how := child.how_it_ended())]
        ended.sort(key=lambda pair: "killed" not in pair[1])
        if ended:
            return RankError(f"{self.layout.name_of(ended[0][0])} {ended[0][1]}")
        rank = self._trouble[0].rank if self._trouble else 0
        return RankError(f"{self.layout.name_of(rank)} is gone ({_plainly(self._trouble[0].text)})")

    # The end

    def _stop_computing(self) -> None:
        computing = [thread for thread in self._threads if thread.name == "_compute" and thread.is_alive()]
        for thread in computing:
            self._queue.put(None)
            thread.join(10.0)

    def close(self, *, kill: bool = False) -> None:
        """End all ranks. kill: at once (after a failure)."""
        if self._closing:
            return
        kill = kill or bool(self._trouble)
        self._closing = True
        if not kill:
            self._stop_computing()
            with contextlib.suppress(RuntimeError):
                self.frames.send(STOP, np.empty(0, np.uint8), self._others)
                self.frames.flush()
        for child in self.children:
            if kill:
                child.process.kill()
        for child in self.children:
            child.end(10.0)
        if kill:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(10.0 if not kill or self.children else 1.0)
        sys.setswitchinterval(self._switch_s)
        if dist.is_initialized() and not any(thread.is_alive() for thread in self._threads):
            dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close(kill=kind is not None)


def _plainly(text: str) -> str:
    """An error of the network's libraries without where in their source it was raised, and without advice."""
    return re.sub(r"^\[[^]]*\]\s*", "", text.strip().splitlines()[0]).partition(". ")[0][:120]


def _is_connection(text: str) -> bool:
    """Whether an error only says that another rank is gone."""
    words = text.lower()
    return any(word in words for word in ("connection", "peer", "gloo", "socket", "nccl"))
