"""How ranks talk: frames between rank 0 and everybody (always on the CPU, gloo), hidden states from stage to stage.

Sends never wait: a frame stays alive until it is on its way, so planning goes on while a stage computes. Receiving has
a thread of its own on every rank, which is also how the death of another rank is noticed at once: its connections
close, and whoever waits for it is told.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from executor.distributed.layout import Layout

Bytes = NDArray[np.uint8]

# What a frame holds.
BATCH, CALL, PING, STOP = 0, 1, 2, 3  # from rank 0
RESULT, REPLY, PONG, FAILURE, BYE, BEAT = 10, 11, 12, 13, 14, 15  # to rank 0

INLINE = 8192
"""Bytes of a frame; what does not fit follows in a message of its own."""
_ROOM = INLINE - 16
_FRAME, _REST, _HIDDEN = 1, 2, 3


class Frames:
    """Frames to and from other ranks."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._on_the_way: deque[tuple[list[Any], list[Tensor]]] = deque()

    def send(self, kind: int, payload: Bytes, ranks: Sequence[int]) -> None:
        """Queue a frame for some ranks; returns at once. Safe from any thread."""
        frame = torch.zeros(INLINE, dtype=torch.uint8)
        cells = frame.numpy()
        cells[:16].view(np.int64)[:] = (kind, len(payload))
        cells[16 : 16 + min(_ROOM, len(payload))] = payload[:_ROOM]
        kept = [frame]
        if len(payload) > _ROOM:
            kept.append(torch.from_numpy(np.ascontiguousarray(payload[_ROOM:])))
        with self._lock:
            works = [
                dist.isend(part, rank, group=self._group, tag=tag)
                for rank in ranks
                for part, tag in zip(kept, (_FRAME, _REST))
            ]
            self._on_the_way.append((works, kept))
            # As many as could be in flight at once, and some more, stay alive.
            while len(self._on_the_way) > 64:
                for work in self._on_the_way.popleft()[0]:
                    work.wait()

    def flush(self) -> None:
        """Wait until everything that was sent has left."""
        with self._lock:
            while self._on_the_way:
                for work in self._on_the_way.popleft()[0]:
                    work.wait()

    def receive(self, rank: int) -> tuple[int, Bytes]:
        """The next frame from a rank; waits for it. RuntimeError where the rank is gone."""
        frame = torch.empty(INLINE, dtype=torch.uint8)
        dist.recv(frame, rank, group=self._group, tag=_FRAME)
        cells = frame.numpy()
        kind, length = cells[:16].view(np.int64).tolist()
        if length <= _ROOM:
            return kind, cells[16 : 16 + length]
        rest = torch.empty(length - _ROOM, dtype=torch.uint8)
        dist.recv(rest, rank, group=self._group, tag=_REST)
        return kind, np.concatenate((cells[16:], rest.numpy()))


class HiddenStates:
    """Hidden states on their way from stage to stage: each rank receives from its namesake on the stage before.

    A batch owns one of `depth` buffers from its arrival until its send is done, so that one can arrive while another is
    computed and a third is sent. A buffer is used again only after as many batches as can be in flight.
    """

    def __init__(self, layout: Layout, rank: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._before, self._after = rank - layout.tp, rank + layout.tp
        self._hidden, self._dtype, self._device = hidden, dtype, device
        depth = layout.pp + 1
        self._buffers = [torch.empty(0, dtype=dtype, device=device) for _ in range(depth)]
        self._sends: list[Any] = [None] * depth
        self._next = 0
        self._arrivals = torch.cuda.Stream(device) if device.type == "cuda" else None

    def buffer(self, rows: int) -> tuple[int, Tensor]:
        """A free buffer [rows, hidden], and its number."""
        number, self._next = self._next, (self._next + 1) % len(self._buffers)
        if self._sends[number] is not None:
            self._sends[number].wait()
            self._sends[number] = None
        if self._buffers[number].numel() < rows * self._hidden:
            self._buffers[number] = torch.empty(rows * self._hidden, dtype=self._dtype, device=self._device)
        return number, self._buffers[number][: rows * self._hidden].view(rows, self._hidden)

    def receive(self, rows: int) -> tuple[int, Tensor]:
        """The next batch's hidden states from the stage before; waits for them."""
        if self._arrivals is None:
            number, hidden = self.buffer(rows)
            dist.recv(hidden, self._before, tag=_HIDDEN)
            return number, hidden
        # On a stream of its own: the batch that is being computed must not wait for this one.
        with torch.cuda.stream(self._arrivals):
            number, hidden = self.buffer(rows)
            dist.recv(hidden, self._before, tag=_HIDDEN)
        self._arrivals.synchronize()
        return number, hidden

    def send(self, number: int, hidden: Tensor) -> None:
        """Send a buffer on; returns at once."""
        self._sends[number] = dist.isend(hidden, self._after, tag=_HIDDEN)
