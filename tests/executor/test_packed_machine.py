"""Random arrivals, sharing, preemptions of both kinds and aborts over a packed pool: no room is lost or given twice."""

from __future__ import annotations

from dataclasses import replace
from functools import cache as once

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from executor.kv_memory.block_names import TextNames
from executor.kv_memory.compressed_pool import CompressedKVCache
from executor.kv_memory.packed_host_copies import PackedHostCache
from executor.kv_memory.pool import KVCache
from executor.model.loading import Loaded, load_model
from executor.model.sampler import INVALID, Sampling
from executor.serving.request_text import Text
from executor.serving.runner import Runner
from policies import BlockLedger, Host, Request, Scheduler
from policies.kv_memory.swap import HostMemory, Swap
from profiler.specs.kv_compression import Compression
from profiler.specs.model_spec import ModelSpec
from tests.policies.test_swap import ACTIONS, Scripted, another_may_fly, one_flies, somebody_is_there

BLOCK, BLOCKS, LONGEST = 4, 24, 60
SPEC = ModelSpec(
    name="smallest", layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, intermediate=16, vocab=13, max_position=64
)


@once
def loaded() -> Loaded:
    return load_model(SPEC, device="cpu", dtype="float32", kernels="torch", attention="reading", seed=1)


class PackedMachine(RuleBasedStateMachine):
    """A real runner over a packed pool and packed host memory; batches run when they complete, up to two in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.names = TextNames()
        ledger = BlockLedger(BLOCKS, BLOCK, LONGEST, prefix_caching=True, names=self.names)
        self.scheduler = Scheduler(Scripted(), ledger, Host(micro_batches=2), swap=Swap(HostMemory(5, 2), "swap"))
        model = loaded()
        self.cache = CompressedKVCache(
            SPEC, BLOCKS + 1, BLOCK, model.kv_dtype, model.device, Compression("kivi", 4, BLOCK, 8), BLOCKS + 1
        )
        self.runner = Runner(model, self.cache, ledger, LONGEST, rows=4)
        self.runner.host = PackedHostCache(self.cache, self.scheduler.swap.memory.blocks)
        self.names.texts = self.runner.texts
        self.flights: list = []
        self.now = self.arrived = 0

    @rule(prompt=st.integers(1, 40), output=st.integers(1, 12), family=st.integers(0, 1))
    def arrive(self, prompt: int, output: int, family: int) -> None:
        request = Request(self.arrived, self.now, prompt, output)
        ids = (np.arange(prompt, dtype=np.int64) + 5 * family) % SPEC.vocab
        self.runner.texts[self.arrived] = Text.of(ids, output, Sampling(), ())
        self.arrived += 1
        self.ended(self.scheduler.add(request, self.now, ends_after=output))

    @precondition(another_may_fly)
    @rule(script=ACTIONS)
    def plan(self, script: list) -> None:
        self.now += 1
        self.scheduler.policy.script = script
        batch = self.scheduler.plan(self.now)
        if batch is not None:
            self.flights.append(self.runner.prepare(batch))

    @precondition(one_flies)
    @rule()
    def complete(self) -> None:
        self.now += 1
        prepared = self.flights.pop(0)
        self.cache.pool[:, :, self.cache._free] = float("nan")
        result = self.runner.execute(prepared)
        assert INVALID not in result.ids, "what was read had been written"
        for (track, epoch, text), token in zip(prepared.wanted, result.ids):
            if track.epoch == epoch:
                text.append(token)
        for track in self.scheduler.complete(prepared.batch, self.now).finished:
            self.runner.release(track)
            self.ended(track)

    @precondition(somebody_is_there)
    @rule(number=st.integers(0, 30))
    def abort(self, number: int) -> None:
        ids = sorted(self.scheduler.tracks)
        self.withdraw([ids[number % len(ids)]])

    def withdraw(self, ids: list[int]) -> None:
        for track in self.scheduler.withdraw(ids, "client gone", self.now):
            self.runner.release(track)
            self.ended(track)

    def ended(self, track) -> None:
        if track.status in ("finished", "aborted", "rejected"):
            self.runner.texts.pop(track.request.id, None)
            self.names.forget(track.request.id)

    @invariant()
    def every_place_has_one_block_and_every_block_one_place(self) -> None:
        cache = self.cache
        placed = cache._slot_of[cache._slot_of >= 0].tolist()
        assert sorted(placed + cache._free) == list(range(cache.full_blocks))
        assert not bool((cache._sealed & (cache._slot_of >= 0)).any())

    def teardown(self) -> None:
        while self.flights:
            self.complete()
        self.withdraw(list(self.scheduler.tracks))
        for row, table in self.runner._left:
            self.runner._leave_packed(row, table)
        assert self.scheduler.ledger.free_blocks == BLOCKS
        assert len(self.cache._free) == self.cache.full_blocks, "only packed prefixes are left"
        assert not self.runner._row_of
        assert not self.runner._computed


PackedMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestPackedMachine = PackedMachine.TestCase


def test_a_preempted_request_in_flight_reads_its_own_blocks_while_others_take_rows():
    """Four rows, three of them taken and released before the first batch has run; found by the machine above."""
    machine = PackedMachine()
    machine.arrive(family=0, output=1, prompt=1)
    machine.arrive(family=0, output=1, prompt=5)
    machine.arrive(family=0, output=1, prompt=1)
    machine.plan(script=[("admit", 4), ("admit", 0), ("admit", 0)])
    machine.plan(script=[("recompute", 0)])
    machine.plan(script=[("admit", 0), ("recompute", 0), ("admit", 0)])
    assert len(machine.flights) == 2
    machine.teardown()


def test_a_shared_prefix_is_the_same_however_few_rows_there_are():
    """A prompt is preempted while its batch is in flight, and another request takes a row before that batch runs.

    The prompt's blocks stay in the prefix cache, so what the batch stores there must not depend on who took the row.
    """
    two_layers = load_model(
        replace(SPEC, layers=2), device="cpu", dtype="float32", kernels="torch", attention="sdpa", seed=1
    )

    def stored(rows: int) -> torch.Tensor:
        names = TextNames()
        ledger = BlockLedger(BLOCKS, BLOCK, LONGEST, prefix_caching=True, names=names)
        scheduler = Scheduler(Scripted(), ledger, Host(micro_batches=2))
        cache = KVCache(two_layers.model.spec, BLOCKS + 1, BLOCK, torch.float32, torch.device("cpu"))
        runner = Runner(two_layers, cache, ledger, LONGEST, rows=rows)
        names.texts = runner.texts
        for number in range(2):
            runner.texts[number] = Text.of((np.arange(8) + 3 * number) % SPEC.vocab, 2, Sampling(), ())
            scheduler.add(Request(number, 0, 8, 2), 0, ends_after=2)
        scheduler.policy.script = [("admit", 4)]
        flights = [runner.prepare(scheduler.plan(0))]
        blocks = list(ledger.table(scheduler.tracks[0]))
        scheduler.policy.script = [("recompute", 0), ("admit", 5)]
        flights.append(runner.prepare(scheduler.plan(1)))
        for prepared in flights:
            runner.execute(prepared)
        return cache.pool[:, :, blocks].clone()

    assert torch.equal(stored(rows=1), stored(rows=8))
