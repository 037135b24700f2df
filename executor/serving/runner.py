"""Turns a planned batch into arrays, runs it, and samples. It knows requests by their rows in one block table.

`prepare` is called right after the plan, while contexts are the plan's own; `execute` may then run in another thread,
one step behind planning: decode tokens travel from step to step on the device (`_last_tokens`), never through the host.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from executor.batches.batch_arrays import Ints, Step
from executor.batches.device_arrays import place
from executor.kernels.routing_counts import RoutedRows
from executor.kv_memory.compressed_pool import CompressedKVCache
from executor.kv_memory.host_copies import HostCache
from executor.kv_memory.packed_host_copies import PackedHostCache
from executor.kv_memory.pool import KVCache
from executor.machine.device_timing import IterationTimer
from executor.model.cuda_graphs import graphs_for
from executor.model.loading import Loaded
from executor.model.sampler import Sampling, sample
from executor.serving.request_text import Text
from policies import Batch, Chunk, Decodes, KVLedger, Track

_NONE: Ints = np.empty(0, np.int32)


class Wanted(NamedTuple):
    """One sampled row: whose token it is, and in which admission (a token of an earlier one is dropped)."""

    track: Track
    epoch: int
    text: Text


@dataclass
class _Decodes:
    """The decodes of one batch; the next batch has the same, one token further, unless something `changed`."""

    key: list[tuple[int, int, int]]  # (cohort, step, size) of each part
    changes: int
    table: Ints
    rows: Ints
    context: Ints
    wanted: list[Wanted]
    greedy: bool


@dataclass
class Prepared:
    """A batch ready to run: a snapshot that later planning does not change.

    poison: blocks to poison first. left: (row, table) of requests that have gone since the batch before.
    """

    batch: Batch
    step: Step
    wanted: list[Wanted]
    sampling: list[Sampling] | None
    poison: list[int] = field(default_factory=list)
    left: list[tuple[int, list[int]]] = field(default_factory=list)


class Result(NamedTuple):
    """ids: one per wanted row, sampler.INVALID where its logits were NaN. start_ns, end_ns: on perf_counter_ns.

    On CUDA start_ns is where the device began: the launch before it is host time. executed_rows: with the padding of a
    graph, 0 without one. activated: experts that the batch touched, the mean over layers with experts; NaN without any.
    """

    ids: list[int]
    start_ns: int
    end_ns: int
    executed_rows: int = 0
    activated: float = math.nan


class Runner:
    """One model, its cache, and the rows of the running requests.

    longest: prompt + output limit. rows: requests that may run at once (more are taken in by growing).
    poison: fill freed blocks with NaN before the next step, so that a stale read cannot go unseen. Not for a ledger
        that shares blocks between requests. host: where preempted requests' KV goes, for a ledger that swaps.
    """

    def __init__(
        self,
        loaded: Loaded,
        cache: KVCache,
        ledger: KVLedger,
        longest: int,
        *,
        rows: int = 64,
        poison: bool = False,
        host: HostCache | PackedHostCache | None = None,
    ) -> None:
        self.loaded, self.cache, self.ledger = loaded, cache, ledger
        self.texts: dict[int, Text] = {}
        self._block_size = cache.block_size
        self._tables = np.zeros((rows, -(-longest // cache.block_size) + 1), np.int32)
        self._last_tokens = torch.zeros(rows, dtype=torch.int64, device=cache.device)
        self._row_of: dict[Track, int] = {}
        self._changes = 0
        self._last: _Decodes | None = None
        self._free_rows = deque(range(rows))
        self._resting: deque[tuple[int, int]] = deque()  # (batches prepared before its release, row)
        self._prepared = self.executed = 0
        self.rows = rows
        self.host = host
        self.graphs = graphs_for(loaded, cache, longest)
        self._packs_steps = cache.device.type == "cuda" and loaded.model.attention.capturable
        self._timer = IterationTimer(cache.device) if cache.device.type == "cuda" else None
        self._packed = cache if isinstance(cache, CompressedKVCache) else None
        self._computed: dict[int, int] = {}
        self.routed = RoutedRows(loaded.spec)
        self._left: list[tuple[int, list[int]]] = []
        self._poison_freed = poison
        self._to_poison: list[int] = []

    # Rows

    def release(self, track: Track) -> None:
        """The request has left the engine or was preempted: its row and blocks are free."""
        row = self._row_of.pop(track, None)
        self._changes += 1
        if row is None:
            return
        if self._packed is not None:
            # Whoever executes the batches, in their order, is the only one to touch the packed pool.
            self._left.append((row, self._tables[row].tolist()))
        if self._poison_freed:
            self._to_poison.extend(self._tables[row][self._tables[row] > 0].tolist())
        # Batches in flight read its table when they run: whoever computes a shared prefix must read its own blocks,
        # although nobody wants its token any more.
        self._resting.append((self._prepared, row))

    def _take_row(self, track: Track) -> int:
        while self._resting and self._resting[0][0] <= self.executed:
            self._free_rows.append(self._resting.popleft()[1])
        if not self._free_rows:
            old = len(self._tables)
            self._tables = np.concatenate((self._tables, np.zeros_like(self._tables)))
            self._free_rows.extend(range(old, 2 * old))
        row = self._free_rows.popleft()
        self._row_of[track] = row
        self._changes += 1
        table = self.ledger.table(track)
        self._tables[row] = 0
        self._tables[row, : len(table)] = table
        return row

    # One batch

    def prepare(self, batch: Batch) -> Prepared:
        """Arrays of a batch that was planned just now; nothing may have been planned since."""
        for victim in batch.preempted:
            self.release(victim)
        chunks: list[tuple[Chunk, int]] = []
        parts: list[Decodes] = []
        fresh = set()
        for part in batch.parts:
            if isinstance(part, Chunk):
                row = self._row_of.get(part.track)
                if row is None:
                    row = self._take_row(part.track)
                    fresh.add(part.track.request.id)
                chunks.append((part, row))
            elif isinstance(part, Decodes):
                parts.append(part)
        decodes = self._decodes(parts)
        if batch.new_blocks:
            self._apply_new_blocks(batch, chunks, decodes.wanted, fresh)
        wanted, greedy = decodes.wanted, decodes.greedy
        sampling = None
        if chunks:
            step = self._mixed(batch, chunks, decodes)
            texts = self.texts
            first = [Wanted(p.track, p.track.epoch, texts[p.track.request.id]) for p, _ in chunks if p.samples]
            if first:
                self._changes += 1  # who samples in a chunk decodes from now on
                greedy = greedy and all(w.text.sampling.temperature == 0.0 for w in first)
                wanted = first + wanted
        elif batch.shape.dummy_tokens:
            step = self._mixed(batch, chunks, decodes)
        else:
            step = self._decodes_only(decodes)
        if not greedy:
            sampling = [w.text.sampling for w in wanted]
        self._prepared += 1
        poison, self._to_poison = self._to_poison, []
        left, self._left = self._left, []
        return Prepared(batch, step, wanted, sampling, poison, left)

    def _decodes(self, parts: Sequence[Decodes]) -> _Decodes:
        """Rows and contexts of the decodes. Those of the last batch, one token on, where nothing has changed since."""
        key = [(part.cohort.number, part.step, part.size) for part in parts]
        last = self._last
        if last is not None and last.changes == self._changes and key == [(c, s + 1, n) for c, s, n in last.key]:
            now = replace(last, key=key, context=last.context + 1)
        else:
            members: list[Track] = []
            contexts: list[int] = []
            for part in parts:
                planned = part.step
                for track in part.cohort.members():
                    # Who joined with this very batch has sampled its token in a chunk, not here.
                    if track.decodes_from <= planned:
                        members.append(track)
                        contexts.append(track.base + planned)
            row_of, texts = self._row_of, self.texts
            wanted = [Wanted(track, track.epoch, texts[track.request.id]) for track in members]
            now = _Decodes(
                key,
                self._changes,
                np.array([row_of[track] for track in members], np.int32),
                np.arange(len(members), dtype=np.int32),
                np.array(contexts, np.int32),
                wanted,
                all(w.text.sampling.temperature == 0.0 for w in wanted),
            )
        self._last = now
        return now

    def _apply_new_blocks(
        self, batch: Batch, chunks: Sequence[tuple[Chunk, int]], wanted: Sequence[Wanted], fresh: set[int]
    ) -> None:
        rows = {w.track.request.id: self._row_of[w.track] for w in wanted}
        rows.update((part.track.request.id, row) for part, row in chunks)
        tables = self._tables
        for request, index, block in batch.new_blocks:
            # A fresh row was copied whole; a request that is in no part lost its grant in this very plan.
            if request not in fresh and request in rows:
                tables[rows[request], index] = block

    def _slots(self, table: Ints, context: Ints) -> NDArray[np.int64]:
        size = self._block_size
        return self._tables[table, context // size].astype(np.int64) * size + context % size

    def _decodes_only(self, decodes: _Decodes) -> Step:
        return Step(
            rows=len(decodes.rows),
            token_ids=np.empty(len(decodes.rows), np.int64),
            positions=decodes.context,
            slots=self._slots(decodes.table, decodes.context),
            tables=self._tables,
            chunk_row=_NONE,
            chunk_tokens=_NONE,
            chunk_prefix=_NONE,
            chunk_table=_NONE,
            decode_row=decodes.rows,
            decode_context=decodes.context,
            decode_table=decodes.table,
            sampled_rows=decodes.rows,
            sampled_table=decodes.table,
            device=self.cache.device,
        )

    def _mixed(self, batch: Batch, chunks: Sequence[tuple[Chunk, int]], decodes: _Decodes) -> Step:
        size, tables = self._block_size, self._tables
        chunk_tokens = sum([part.tokens for part, _ in chunks])
        useful = chunk_tokens + len(decodes.rows)
        rows = useful + batch.shape.dummy_tokens
        token_ids = np.zeros(rows, np.int64)
        positions = np.zeros(rows, np.int32)
        slots = np.full(rows, -1, np.int64)
        first_rows, sampled_rows, sampled_table = [], [], []
        at = 0
        for part, table_row in chunks:
            tokens, prefix = part.tokens, part.prefix
            end = at + tokens
            token_ids[at:end] = self.texts[part.track.request.id].ids[prefix : prefix + tokens]
            span = np.arange(prefix, prefix + tokens, dtype=np.int32)
            positions[at:end] = span
            slots[at:end] = tables[table_row][span // size].astype(np.int64) * size + span % size
            first_rows.append(at)
            if part.samples:
                sampled_rows.append(end - 1)
                sampled_table.append(table_row)
            at = end
        if len(decodes.rows):
            positions[chunk_tokens:useful] = decodes.context
            slots[chunk_tokens:useful] = self._slots(decodes.table, decodes.context)
        decode_row = decodes.rows + np.int32(chunk_tokens)
        return Step(
            rows=rows,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            tables=tables,
            chunk_row=np.array(first_rows, np.int32),
            chunk_tokens=np.array([part.tokens for part, _ in chunks], np.int32),
            chunk_prefix=np.array([part.prefix for part, _ in chunks], np.int32),
            chunk_table=np.array([row for _, row in chunks], np.int32),
            decode_row=decode_row,
            decode_context=decodes.context,
            decode_table=decodes.table,
            sampled_rows=np.concatenate((np.array(sampled_rows, np.int32), decode_row)),
            sampled_table=np.concatenate((np.array(sampled_table, np.int32), decodes.table)),
            device=self.cache.device,
        )

    @torch.inference_mode()
    def execute(self, prepared: Prepared) -> Result:
        """Run the batch and sample. Batches have to be executed in the order in which they were planned."""
        try:
            return self._run(prepared)
        finally:
            self.executed += 1

    def _run(self, prepared: Prepared) -> Result:
        start_ns = time.perf_counter_ns()
        number = prepared.batch.number
        moves = bool(prepared.batch.swap_out or prepared.batch.swap_in)
        if moves:
            self._start_timer(number)  # copies to and from the host are the batch's own
        if prepared.batch.swap_out and self.host is not None:
            self.host.copy_out(prepared.batch.swap_out)
        for row, table in prepared.left:
            self._leave_packed(row, table)
        if prepared.poison:
            self.cache.poison(prepared.poison)
        if prepared.batch.swap_in and self.host is not None:
            self.host.copy_in(prepared.batch.swap_in)
        step = prepared.step
        self._remember_as_many_tokens(step)
        token_ids = step.tensor(step.token_ids)
        if self._packed is not None:
            self._pack_old(step, step.decode_table, step.decode_context)
        if step.num_decodes:
            self._fill_in_decodes(token_ids, prepared)

        def ready() -> None:
            if not moves:
                self._start_timer(number)

        if self.graphs is not None:
            logits = self.graphs.forward(token_ids, step, self.cache, ready)
        else:
            if self._packs_steps:
                place(step, self._block_size, trimmed=self.loaded.model.trim_last_layer)
            ready()
            logits = self.loaded.model.forward(token_ids, step, self.cache)
        if self._packed is not None:
            self._pack_old(step, step.chunk_table, step.chunk_prefix + step.chunk_tokens)
            self._computed.update(zip(step.decode_table.tolist(), (step.decode_context + 1).tolist()))
        sampled = None
        if prepared.wanted:
            sampled = self._sample(logits, prepared)
            self._last_tokens[step.tensor(step.sampled_table)] = sampled.clamp(min=0)
        if self._timer is not None:
            self._timer.stop()
        ids: list[int] = [] if sampled is None else sampled.tolist()
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)
        end_ns = time.perf_counter_ns()
        if self._timer is not None:
            for _, device_ns in self._timer.finished():
                start_ns = max(start_ns, end_ns - device_ns)
        executed = 0 if self.graphs is None or self.graphs.executed_rows == step.rows else self.graphs.executed_rows
        routing = self.loaded.model.routing
        return Result(ids, start_ns, end_ns, executed, self.routed.add(routing.read()) if routing else math.nan)

    def _fill_in_decodes(self, token_ids: torch.Tensor, prepared: Prepared) -> None:
        """Tokens of decodes, which travel from step to step on the device."""
        step = prepared.step
        first = int(step.decode_row[0])
        token_ids[first : first + step.num_decodes] = self._last_tokens[step.tensor(step.decode_table)]

    def _start_timer(self, number: int) -> None:
        """Device time begins with the batch's first kernel: on an idle device an event passes when it is recorded, and
        whatever the host does after it would count as the device's."""
        if self._timer is not None:
            self._timer.start(number)

    def _remember_as_many_tokens(self, step: Step) -> None:
        """Last tokens belong to whoever runs batches, so they grow here, not where rows are taken."""
        missing = len(step.tables) - len(self._last_tokens)
        if missing > 0:
            more = torch.zeros(missing, dtype=self._last_tokens.dtype, device=self._last_tokens.device)
            self._last_tokens = torch.cat((self._last_tokens, more))

    def _pack_old(self, step: Step, rows: Ints, contexts: Ints) -> None:
        """Pack what lies outside the windows of requests with so much context: before a decode, so that what it sees
        depends on its position alone, and after a chunk, so that a prompt does not keep its room while it waits."""
        assert self._packed is not None
        for row, context in zip(rows.tolist(), contexts.tolist()):
            self._packed.seal_old(step.tables[row], context)
            self._computed[row] = context

    def _leave_packed(self, row: int, table: list[int]) -> None:
        assert self._packed is not None
        whole = self._computed.pop(row, 0) // self._block_size if self.ledger.prefix_caching else 0
        self._packed.leave(table, whole)

    def _sample(self, logits: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        kernels = self.loaded.model.kernels
        if prepared.sampling is None:
            if self.graphs is not None and self.graphs.sampled is not None:
                return self.graphs.sampled
            return kernels.argmax(logits)
        step = prepared.step
        return sample(logits, prepared.sampling, step.positions[step.sampled_rows].tolist(), kernels)
