"""Swapping: the KV that comes back is the KV that went, nothing leaks, and `auto` does what costs less."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies import BlockLedger, CountingLedger, Host, Policy, PolicyError, Request, Scheduler, make_policy
from policies.kv_memory.swap import HostMemory, Swap, SwapCosts
from policies.work.cohort import Cohort
from tests.policies.driving import drive
from tests.policies.kv_memory import KVMemory
from tests.policies.test_invariants import BLOCK, check_conservation, engines, no_block_lost, traces


def swapping(engine, pages, per_page=2, *, how="swap", by_id=False, prefix_caching=False, costs=None):
    longest = 96
    ledger = (
        BlockLedger(engine["pool"], BLOCK, longest, prefix_caching=prefix_caching)
        if by_id
        else CountingLedger(engine["pool"], BLOCK, longest)
    )
    host = Host(micro_batches=engine["depth"], tile=16, estimator=lambda shape: 1000 + 10 * shape.rows)
    return Scheduler(
        make_policy(*engine["policy"]),
        ledger,
        host,
        token_budget=engine["token_budget"],
        max_num_seqs=engine["max_num_seqs"],
        swap=Swap(HostMemory(pages, per_page), how, costs),
    )


def nothing_left_in_host_memory(scheduler):
    swap = scheduler.swap
    assert not swap.held
    assert sorted(swap._free) == list(range(swap.memory.pages))


TWO = [(Request(0, 0, 16, 30), 20), (Request(1, 0, 16, 30), 20)]


def test_a_swapped_request_comes_back_to_decode_without_any_prefill():
    """Two requests of 16 + 20 tokens in 12 blocks of 4: the second goes out when both need their seventh block."""
    engine = {"policy": ("vllm_v1", {}), "pool": 12, "depth": 1, "token_budget": None, "max_num_seqs": None}
    scheduler = swapping(engine, pages=8)
    log = drive(scheduler, TWO)
    check_conservation(log, TWO, scheduler)
    counts = scheduler.swap.counts
    assert (counts.by_swap, counts.by_recompute) == (1, 0)
    # At that moment 24 tokens of it are computed: six blocks, in three pages of two.
    assert (counts.blocks_out, counts.blocks_in, counts.peak_pages) == (6, 6, 3)
    prefilled = [sum(tokens for tokens, _ in shape.chunks) for _, _, shape, _ in log.batches]
    assert sum(prefilled) == 16 + 16 + 1, "the token it lacks is all that a resumed request computes"
    nothing_left_in_host_memory(scheduler)


def test_auto_takes_the_cheaper_way():
    engine = {"policy": ("vllm_v1", {}), "pool": 12, "depth": 1, "token_budget": None, "max_num_seqs": None}
    for move_ns, swapped in ((1, 1), (1000, 0)):
        costs = SwapCosts(lambda blocks, each=move_ns: each * blocks, lambda tokens: 100 * tokens)
        scheduler = swapping(engine, 8, how="auto", costs=costs)
        drive(scheduler, TWO)
        # 2 x 6 blocks at 1000 ns are more than 24 tokens at 100 ns.
        assert (scheduler.swap.counts.by_swap, scheduler.swap.counts.by_recompute) == (swapped, 1 - swapped)


def test_a_full_host_memory_takes_pages_from_the_one_swapped_out_longest_ago():
    engine = {"policy": ("vllm_v1", {}), "pool": 30, "depth": 1, "token_budget": None, "max_num_seqs": None}
    scheduler = swapping(engine, pages=4)
    for row in range(3):
        scheduler.add(Request(row, 0, 16, 10), 0, ends_after=10)
    batch = scheduler.plan(0)
    scheduler.complete(batch, 10)
    first, second, third = scheduler.tracks.values()
    for track in (first, second):
        scheduler.stop(track)
    assert (first.computed, second.computed, scheduler.swap.free_pages) == (16, 16, 0)
    scheduler.stop(third)
    assert (first.computed, second.computed, third.computed) == (0, 16, 16)
    assert list(scheduler.swap.held) == [1, 2]
    assert scheduler.queues.prefill_tokens == 17 + 1 + 1
    assert scheduler.queues.swapped == [third, second]


def test_host_memory_must_hold_a_page_and_a_page_a_block():
    with pytest.raises(PolicyError, match="expected at least one page"):
        HostMemory.of(1000, 100, 2000)
    with pytest.raises(PolicyError, match="expected at least the 3000 of one KV block"):
        HostMemory.of(10_000, 3000, 2000)
    assert HostMemory.of(64 * 2**20, 2**20).blocks == 64


@given(traces(), engines(st.integers(24, 40)), st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_swapping_loses_nothing_and_both_ledgers_agree(requests, engine, pages, per_page):
    counting = swapping(engine, pages, per_page)
    log = drive(counting, requests, depth=engine["depth"], each_step=no_block_lost)
    check_conservation(log, requests, counting)
    nothing_left_in_host_memory(counting)
    by_id = swapping(engine, pages, per_page, by_id=True)
    other = drive(by_id, requests, depth=engine["depth"])
    assert other.batches == log.batches
    assert by_id.swap.counts == counting.swap.counts


@given(traces(), engines(st.integers(24, 40)), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_leaps_and_swapping_agree(requests, engine, pages):
    engine = {**engine, "depth": 1}
    plain = drive(swapping(engine, pages), requests)
    leaping = drive(swapping(engine, pages), requests, leaping=True)
    for name in ("batches", "ends", "gaps", "finished", "rejected", "token_times"):
        assert getattr(leaping, name) == getattr(plain, name), name


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["decode", "chunk", "admit", "resume", "recompute", "swap"]), st.integers(0, 9)),
    min_size=1,
    max_size=8,
)


class Scripted(Policy):
    """Does what it was told last: any legal sequence of grants and preemptions."""

    def __init__(self):
        self.script = []

    def plan(self, queues, draft, kv, host, now_ns):
        granted = set()
        for action, number in self.script:
            running = [part for part in queues.running if id(part) not in granted]
            if action in ("decode", "chunk"):
                parts = [part for part in running if isinstance(part, Cohort) == (action == "decode")]
                if not parts:
                    continue
                part = parts[number % len(parts)]
                if isinstance(part, Cohort):
                    draft.decode(part)
                else:
                    draft.chunk(part, 1 + number)
                granted.update(id(p) for p in queues.parts if isinstance(p, Cohort) or p is part)
            elif action in ("admit", "resume"):
                waiting = list(queues.waiting) if action == "admit" else queues.swapped
                if waiting:
                    track = waiting[number % len(waiting)]
                    if (
                        draft.admit(track, 1 + 2 * number, must_fit=track.known)
                        if action == "admit"
                        else draft.resume(track)
                    ):
                        granted.add(id(track))
            else:
                tracks = [track for track in queues.running_tracks() if not track.closing]
                if tracks:
                    draft.preempt(tracks[number % len(tracks)], how=action)
        self.script = []


def test_whoever_was_stopped_by_a_plan_without_a_batch_is_named_by_the_next_one():
    scheduler = Scheduler(Scripted(), BlockLedger(24, BLOCK, 60), Host(), swap=Swap(HostMemory(5, 2), "swap"))
    scheduler.add(Request(0, 0, 9, 5), 0, ends_after=5)
    scheduler.policy.script = [("admit", 4)]
    scheduler.complete(scheduler.plan(0), 1)
    victim = scheduler.tracks[0]
    scheduler.policy.script = [("swap", 0)]
    assert scheduler.plan(1) is None
    scheduler.policy.script = [("resume", 0)]
    batch = scheduler.plan(2)
    assert batch.preempted == [victim]
    assert (len(batch.swap_out), len(batch.swap_in)) == (1, 1)
    scheduler.complete(batch, 3)
    scheduler.policy.script = [("decode", 0)]
    assert not scheduler.plan(3).preempted


# Preconditions have names: Hypothesis 6.100 parses the source of a lambda anew at every step, which takes minutes.
def another_may_fly(machine):
    return len(machine.flights) < 2


def one_flies(machine):
    return bool(machine.flights)


def somebody_is_there(machine):
    return bool(machine.scheduler.tracks)


class SwapMachine(RuleBasedStateMachine):
    """Random arrivals with shared prefixes, plans, preemptions of both kinds and aborts, up to two batches in flight."""

    def __init__(self):
        super().__init__()
        ledger = self.new_ledger()
        self.scheduler = Scheduler(Scripted(), ledger, Host(micro_batches=2), swap=Swap(HostMemory(5, 2), "swap"))
        self.memory = KVMemory(self.scheduler) if ledger.by_id else None
        self.flights = []
        self.now = 0
        self.arrived = 0

    def new_ledger(self):
        return BlockLedger(24, BLOCK, 60, prefix_caching=True)

    @rule(prompt=st.integers(1, 40), output=st.integers(1, 12), family=st.integers(0, 1))
    def arrive(self, prompt, output, family):
        hashes = tuple(1000 * family + position for position in range(prompt))
        request = Request(self.arrived, self.now, prompt, output, hashes, 1)
        self.arrived += 1
        self.scheduler.add(request, self.now, ends_after=output)

    @precondition(another_may_fly)
    @rule(script=ACTIONS)
    def plan(self, script):
        self.now += 1
        self.scheduler.policy.script = script
        batch = self.scheduler.plan(self.now)
        if batch is not None:
            if self.memory is not None:
                self.memory.run(batch, self.scheduler)
            self.flights.append(batch)

    @precondition(one_flies)
    @rule()
    def complete(self):
        self.now += 1
        self.scheduler.complete(self.flights.pop(0), self.now)

    @precondition(somebody_is_there)
    @rule(number=st.integers(0, 30))
    def abort(self, number):
        ids = sorted(self.scheduler.tracks)
        self.scheduler.withdraw([ids[number % len(ids)]], "client gone", self.now)

    @invariant()
    def nothing_is_leaked_or_held_twice(self):
        scheduler, ledger, swap = self.scheduler, self.scheduler.ledger, self.scheduler.swap
        if ledger.by_id:
            holders = {}
            for track in scheduler.tracks.values():
                if track.order >= 0:
                    for block in ledger.table(track):
                        holders[block] = holders.get(block, 0) + 1
            assert len(holders) + ledger.free_blocks == ledger.total_blocks
            assert not set(holders) & set(ledger._free)
            assert all(ledger._users[block] == count for block, count in holders.items())
        else:
            no_block_lost(scheduler)
        pages = [page for swapped in swap.held.values() for page in swapped.pages] + swap._free
        assert sorted(pages) == list(range(swap.memory.pages))
        assert all(row in scheduler.tracks for row in swap.held)
        assert scheduler.queues.prefill_tokens >= 0

    def teardown(self):
        while self.flights:
            self.complete()
        self.scheduler.withdraw(list(self.scheduler.tracks), "over", self.now)
        assert self.scheduler.ledger.free_blocks == self.scheduler.ledger.total_blocks
        nothing_left_in_host_memory(self.scheduler)
        assert self.scheduler.queues.prefill_tokens == self.scheduler.queues.decode_tokens_promised == 0


SwapMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestSwapMachine = SwapMachine.TestCase


class CountingSwapMachine(SwapMachine):
    """The same over a ledger that only counts."""

    def new_ledger(self):
        return CountingLedger(24, BLOCK, 60)


CountingSwapMachine.TestCase.settings = SwapMachine.TestCase.settings
TestCountingSwapMachine = CountingSwapMachine.TestCase


@given(traces(), engines(st.integers(24, 40)), st.integers(1, 8), st.booleans())
@settings(max_examples=40, deadline=None)
def test_swapped_and_shared_blocks_hold_what_their_requests_read(requests, engine, pages, caching):
    shared = [
        (request._replace(prefix_hashes=tuple(range(request.prompt_tokens)), hash_tokens=1), output)
        for request, output in requests
    ]
    scheduler = swapping({**engine, "depth": 1}, pages, by_id=True, prefix_caching=caching)
    memory = KVMemory(scheduler)
    log = drive(scheduler, shared, planned=lambda batch: memory.run(batch, scheduler))
    check_conservation(log, shared, scheduler)
    nothing_left_in_host_memory(scheduler)
