"""CUDA graphs: a forward pass captured once per bucket of batch sizes and replayed for every batch that fits.

A replay launches hundreds of kernels at the price of one, which is what small batches (short chunks, few decodes) are
bound by. Batches are laid out by `device_step`: chunk rows up to a tile-aligned bucket, then decodes up to theirs;
padded rows are stored nowhere, attend to nothing, and nobody reads their output, so a capture changes no result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from executor.batches.batch_arrays import Step
from executor.batches.device_arrays import DeviceArrays, Sizes, blank_arrays, pack, place, sizes_of
from executor.errors import ExecutorError
from executor.kv_memory.pool import KVCache
from executor.model.model import Model
from policies import BatchShape

if TYPE_CHECKING:
    from executor.model.loading import Loaded


Result = TypeVar("Result")


class Capture(Protocol):
    """What a captured pass offers; `torch.cuda.CUDAGraph` behind `CudaCapture`, a stand-in in tests."""

    def capture(self, run: Callable[[], Result]) -> Result:
        """Record what `run` does; returns its (static) result. Nothing has been computed yet."""

    def replay(self) -> None:
        """Do all of it again, on the memory it was recorded on."""


class CudaCapture:
    """A CUDA graph; all graphs of a process share one memory pool, as they never run at the same time.

    own_pool: for kernels that keep something in it from one replay to the next.
    """

    _pool: Any = None

    def __init__(self, *, own_pool: bool = False) -> None:
        self._own_pool = own_pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], Result]) -> Result:
        if CudaCapture._pool is None:
            CudaCapture._pool = torch.cuda.graph_pool_handle()
        # thread_local: while a worker captures, the main thread may go on planning and pinning memory.
        pool = None if self._own_pool else CudaCapture._pool
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            return run()

    def replay(self) -> None:
        self._graph.replay()


MOST_BYTES = 2 << 30
"""Memory that the graphs of a run may take, if nobody says otherwise."""

MIXED_CHUNK_ROWS, MIXED_DECODE_BUCKETS = 512, (8, 16, 32, 64, 128, 256)
"""Batches with chunks: beyond 512 rows a device is busy for longer than its launches take, so that a graph saves
nothing; and a few padded decodes cost less than one more graph."""

DECODE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


@dataclass(frozen=True)
class Buckets:
    """Which sizes are captured.

    decodes: sizes of the decode part; mixed_decodes: of a batch with chunks, the same if not given. chunk_rows: largest
    chunk part, in multiples of `tile`. chunks: most chunks in a captured batch. blocks: width of the block tables.
    Batches beyond any of them run without a graph.
    """

    blocks: int
    decodes: tuple[int, ...] = DECODE_BUCKETS
    chunk_rows: int = 2048
    tile: int = 128
    chunks: int = 4
    mixed_decodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if list(self.decodes) != sorted(set(self.decodes)) or not self.decodes or self.decodes[0] < 1:
            raise ExecutorError(f"graph buckets: found {self.decodes}, expected rising numbers of decodes from 1 on")
        if self.tile < 16 or self.tile & (self.tile - 1):
            raise ExecutorError(f"graph buckets: found a tile of {self.tile}, expected a power of two from 16 on")

    def fit(self, exact: Sizes) -> Sizes | None:
        """The captured sizes for a batch; None if it is too large for any, or holds nothing."""
        useful = exact.chunk_rows + exact.decodes
        if not useful:
            return None
        # Dummy rows of the policy's own padding become padding of the chunk part.
        rows = exact.rows - exact.decodes if exact.chunk_rows else 0
        chunk_rows = -(-rows // self.tile) * self.tile
        sizes = self.mixed_decodes if chunk_rows and self.mixed_decodes else self.decodes
        at = bisect_left(sizes, exact.decodes)
        if chunk_rows > self.chunk_rows or exact.chunks > self.chunks or at == len(sizes):
            return None
        decodes = sizes[at] if exact.decodes else 0
        chunks = self.chunks if chunk_rows else 0
        return Sizes(
            rows=chunk_rows + decodes,
            chunk_rows=chunk_rows,
            decodes=decodes,
            chunks=chunks,
            tiles=chunk_rows // self.tile + chunks,
            tile_rows=self.tile,
            sampled=decodes + chunks,
            blocks=self.blocks,
        )

    def of_shape(self, shape: BatchShape) -> Sizes | None:
        """The captured sizes for batches of this shape, whatever their contexts."""
        prefill, chunks = sum([tokens for tokens, _ in shape.chunks]), len(shape.chunks)
        return self.fit(
            Sizes(shape.rows, prefill, shape.decodes, chunks, chunks, self.tile, shape.sampled, self.blocks)
        )

    def all_sizes(self, most_decodes: int) -> list[Sizes]:
        """Every bucket that so many requests at once may meet: decode-only ones, then mixed ones, largest first."""
        least = self.decodes[min(bisect_left(self.decodes, most_decodes), len(self.decodes) - 1)]
        found = [sizes for sizes in self.decode_sizes() if sizes.decodes <= least]
        mixed = self.mixed_decodes or self.decodes
        most = mixed[min(bisect_left(mixed, most_decodes), len(mixed) - 1)]
        for rows in range(self.chunk_rows, 0, -self.tile):
            for count in (*[each for each in reversed(mixed) if each <= most], 0):
                sizes = self.fit(Sizes(rows + count, rows, count, 1, 1, self.tile, count + 1, self.blocks))
                if sizes is not None:
                    found.append(sizes)
        return found

    def decode_sizes(self) -> list[Sizes]:
        """The decode-only buckets, largest first."""
        exact = [Sizes(n, 0, n, 0, 0, self.tile, n, self.blocks) for n in reversed(self.decodes)]
        return [sizes for sizes in map(self.fit, exact) if sizes is not None]


@dataclass
class Counts:
    """What the cache has done. bytes: memory that the graphs held now have taken."""

    captured: int = 0
    replayed: int = 0
    without: int = 0
    evicted: int = 0
    bytes: int = 0


@dataclass
class _Graph:
    capture: Capture
    step: Step
    given: Tensor
    """Token ids, or the hidden states of an earlier stage."""
    result: Tensor
    sampled: Tensor
    """Token ids by the largest logit; empty where the pass ends in hidden states."""
    held: list[Tensor]
    """Memory that the recorded kernels write to: it must outlive the graph, whoever else lets go of it."""
    bytes: int
    buffer: Tensor
    """Index arrays of the whole pass, and after them those of its last layer."""
    staging: Tensor


class GraphedModel:
    """A model's forward pass through graphs where a bucket fits, and as it is where none does.

    The choice of the largest logit is captured with the pass: `sampled` holds it after a replay, None after a pass
    without a graph.

    cache: the pool that captured kernels read and write; it may not be replaced. most_bytes: memory that graphs may
    take: beyond it the one unused for longest goes. new_capture: makes a `Capture`. executed_rows: rows of the last
    pass, padding included. Raises ExecutorError where kernels or attention cannot be captured.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        buckets: Buckets,
        *,
        most_bytes: int = MOST_BYTES,
        new_capture: Callable[[], Capture] = CudaCapture,
    ) -> None:
        for part in (model.kernels, model.attention):
            if not part.capturable:
                raise ExecutorError(f"CUDA graphs: {part.name} cannot be captured; choose other kernels or attention")
        self.model, self.cache, self.buckets, self.most_bytes = model, cache, buckets, most_bytes
        self.counts = Counts()
        self.executed_rows = 0
        self.sampled: Tensor | None = None
        if new_capture is CudaCapture and not model.attention.shares_graph_pool:
            new_capture = partial(CudaCapture, own_pool=True)
        self._new_capture = new_capture
        self._graphs: OrderedDict[Sizes, _Graph] = OrderedDict()

    def warm(self, sizes: Iterable[Sizes] | None = None) -> None:
        """Capture these sizes now (the decode-only buckets by default), so that no request pays for it."""
        for each in self.buckets.decode_sizes() if sizes is None else sizes:
            if each not in self._graphs:
                self._capture(each)

    def warm_all(self, most_decodes: int) -> None:
        """Capture whatever a run with so many requests at once may meet, as long as the memory for graphs lasts."""
        for sizes in self.buckets.all_sizes(most_decodes):
            if self.counts.bytes >= self.most_bytes:
                return
            self.warm([sizes])

    def warm_for(self, shapes: Iterable[BatchShape]) -> None:
        """Capture what batches of these shapes run through, largest first, as long as the memory for graphs lasts."""
        wanted = {self.buckets.of_shape(shape) for shape in shapes} - {None}
        for sizes in sorted(wanted, key=lambda each: each.rows, reverse=True):  # type: ignore[union-attr]
            if self.counts.bytes >= self.most_bytes:
                return
            self.warm([sizes])  # type: ignore[list-item]

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, step: Step, cache: KVCache, ready: Callable[[], None] = lambda: None
    ) -> Tensor:
        """As `Model.forward`; the result is overwritten by the next call.

        ready: called when the batch lies where kernels read it and only launches are left.
        """
        exact = sizes_of(step, cache.block_size, self.buckets.tile)
        sizes = self.buckets.fit(exact)
        if sizes is None or cache is not self.cache or not sizes.holds(exact):
            self.counts.without += 1
            self.executed_rows = step.rows
            self.sampled = None
            place(step, cache.block_size, trimmed=self.model.trim_last_layer)
            ready()
            return self.model.forward(token_ids, step, cache)
        graph = self._replay(sizes, token_ids, step, ready)
        self.sampled = graph.sampled[: len(step.sampled_rows)]
        return graph.result[: len(step.sampled_rows)]

    def _replay(self, sizes: Sizes, given: Tensor, step: Step, ready: Callable[[], None]) -> _Graph:
        graph = self._graphs.get(sizes)
        if graph is None:
            graph = self._capture(sizes)
        self._graphs.move_to_end(sizes)
        self._fill(graph, sizes, given, step)
        ready()
        graph.capture.replay()
        self.counts.replayed += 1
        self.executed_rows = sizes.rows
        return graph

    def _new_input(self, rows: int) -> Tensor:
        """What a pass starts from, where captured kernels read it."""
        return torch.zeros(rows, dtype=torch.int64, device=self.cache.device)

    def _pass(self, given: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """(logits, greedy ids) of a static step."""
        logits = self.model.forward(given, step, self.cache)
        return logits, self.model.kernels.argmax(logits)

    def _fill(self, graph: _Graph, sizes: Sizes, given: Tensor, step: Step) -> None:
        """Put the batch where the captured kernels look for it, in one copy."""
        parts = [pack(step, sizes)]
        if self.model.trim_last_layer and graph.step.only_sampled is not graph.step:
            parts.append(pack(step.only_sampled, _sampled_sizes(sizes)))
        # One pinned buffer a graph: the step before has been waited for by the time its tokens were read.
        np.concatenate(parts, out=graph.staging.numpy())
        graph.buffer.copy_(graph.staging, non_blocking=True)
        useful, decodes, first = int(step.chunk_tokens.sum()), step.num_decodes, sizes.chunk_rows
        graph.given[:useful].copy_(given[:useful])
        graph.given[first : first + decodes].copy_(given[useful : useful + decodes])

    @torch.inference_mode()
    def _capture(self, sizes: Sizes) -> _Graph:
        model, device = self.model, self.cache.device
        before = _memory_taken(device)
        step, buffer = static_step(sizes, self.cache.block_size, device, trimmed=model.trim_last_layer)
        staging = torch.empty(buffer.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        given = self._new_input(sizes.rows)
        # Once for real: kernels are compiled and buffers grow outside of the capture. All rows are padding.
        self._pass(given, step)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        capture = self._new_capture()
        result, sampled = capture.capture(lambda: self._pass(given, step))
        held = [*model.kernels.held(), *model.attention.held()]
        taken = max(_memory_taken(device) - before, 4 * buffer.numel())
        graph = _Graph(capture, step, given, result, sampled, held, taken, buffer, staging)
        self._graphs[sizes] = graph
        self.counts.captured += 1
        self.counts.bytes += taken
        while self.counts.bytes > self.most_bytes and len(self._graphs) > 1:
            _, oldest = self._graphs.popitem(last=False)
            self.counts.bytes -= oldest.bytes
            self.counts.evicted += 1
        return graph


def graphs_for(loaded: Loaded, cache: KVCache, longest: int) -> GraphedModel | None:
    """Graphs for a loaded model as `loaded.graphs` says: "on", "off", or "auto": on CUDA where all can be captured.

    longest: longest context of a request. Raises ExecutorError for "on" where that cannot be.
    """
    if loaded.graphs == "off":
        return None
    model = loaded.model
    if loaded.graphs == "auto" and not (
        cache.device.type == "cuda" and model.kernels.capturable and model.attention.capturable
    ):
        return None
    if cache.device.type != "cuda":
        raise ExecutorError(f"--graphs on: CUDA graphs need a CUDA device, the device is {cache.device}")
    blocks = -(-longest // cache.block_size) + 1
    return GraphedModel(
        model, cache, Buckets(blocks=blocks, chunk_rows=MIXED_CHUNK_ROWS, mixed_decodes=MIXED_DECODE_BUCKETS)
    )


def can_be_captured(loaded: Loaded) -> bool:
    """Whether graphs are wanted and everything that a pass launches may be in one."""
    model = loaded.model
    captured = loaded.device.type == "cuda" and model.kernels.capturable and model.attention.capturable
    return captured and loaded.graphs != "off"


def graph_bytes(loaded: Loaded) -> int:
    """Memory to leave for the graphs of a model."""
    return MOST_BYTES if can_be_captured(loaded) else 0


def static_step(sizes: Sizes, block_size: int, device: torch.device, *, trimmed: bool) -> tuple[Step, Tensor]:
    """A step of padding alone, whose device arrays are filled before every replay, and the buffer that holds them.

    Its host arrays are empty. trimmed: the arrays of sampled rows follow in the same buffer, unless all rows are such.
    """
    of_sampled = _sampled_sizes(sizes)
    apart = trimmed and of_sampled != sizes
    buffer = torch.zeros(sizes.total + (of_sampled.total if apart else 0), dtype=torch.int32, device=device)
    step = _blank(sizes.rows, blank_arrays(sizes, block_size, buffer[: sizes.total]), device)
    if apart:
        rest = blank_arrays(of_sampled, block_size, buffer[sizes.total :])
        step.__dict__["only_sampled"] = _blank(sizes.sampled, rest, device)
    elif trimmed:
        step.__dict__["only_sampled"] = step
    return step, buffer


def _sampled_sizes(sizes: Sizes) -> Sizes:
    """Sampled rows as the decodes that the last layer sees them as."""
    n = sizes.sampled
    return Sizes(n, 0, n, 0, 0, sizes.tile_rows, n, sizes.blocks)


def _blank(rows: int, arrays: DeviceArrays, device: torch.device) -> Step:
    none, none_wide = np.empty(0, np.int32), np.empty(0, np.int64)
    step = Step(
        rows=rows,
        token_ids=none_wide,
        positions=none,
        slots=none_wide,
        tables=np.empty((0, 0), np.int32),
        chunk_row=none,
        chunk_tokens=none,
        chunk_prefix=none,
        chunk_table=none,
        decode_row=none,
        decode_context=none,
        decode_table=none,
        sampled_rows=none,
        sampled_table=none,
        device=device,
        arrays=arrays,
    )
    step.__dict__.update(row_positions=arrays.positions, row_slots=arrays.slots, sampled_index=arrays.sampled)
    return step


def _memory_taken(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)
