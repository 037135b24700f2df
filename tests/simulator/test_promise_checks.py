"""Promises of repetition: one object, not inherited by a class that plans otherwise, held against plans in every run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest

import simulator.replica.promise_checks as promise_checks
from metrics import Recorder
from policies import PolicyError, Promises, policy_class
from policies.chunked import Chunked
from policies.contract.policy import Promises as Stated
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.replica.replica_kind import make_engine
from simulator.routers import Router
from simulator.routers.least_kv import LeastKV
from simulator.routers.round_robin import RoundRobin
from simulator.simulation import simulate
from tests.simulator.constant_cost import ConstantCost, trace_of

S = 1_000_000_000


def run(policy, rows, **options):
    """A policy object under the simulator; returns its recorder's tables."""
    trace = trace_of(rows)
    config = ReplayConfig(num_blocks=1000, **options)
    cost = ConstantCost(device_ns=S, stages=config.pp)
    engine = replace(make_engine(config, trace, cost), policy=policy)
    recorder = Recorder()
    simulate(trace, engine, recorder)
    return recorder.tables()


@dataclass(frozen=True)
class Same(Chunked):
    """Adds knobs, changes no plan."""

    colour: str = "red"


@dataclass(frozen=True)
class Tired(Chunked):
    """From the fifth second on it decodes one at a time: what follows from the time no promise can cover."""

    promises: ClassVar[Stated] = Promises(decodes=True, micro_batches=True, chunks=True)

    def plan(self, queues, draft, kv, host, now_ns):
        for track in list(queues.waiting):
            draft.admit(track, track.lacking)
        for prompt in queues.partial:
            draft.chunk(prompt, prompt.lacking)
        draft.decode_all(1 if now_ns >= 5 * S else None)


@dataclass(frozen=True)
class Halving(Chunked):
    """Chunks that become smaller with the prefix, promised to stay the same."""

    promises: ClassVar[Stated] = Promises(chunks=True)

    def plan(self, queues, draft, kv, host, now_ns):
        for prompt in queues.partial:
            draft.chunk(prompt, max(1, 64 - prompt.context // 4))
        for track in list(queues.waiting):
            draft.admit(track, 64)
        draft.decode_all()


class Mixin:
    def plan(self, queues, draft, kv, host, now_ns):
        draft.decode_all()


@dataclass(frozen=True)
class Mixed(Mixin, Chunked):
    pass


@dataclass(frozen=True)
class OtherRows(policy_class("dynamic_chunk")):
    def rows_by_load(self, queues):
        return 16


def test_a_class_that_plans_otherwise_inherits_no_promise():
    assert Same.promises == Chunked.promises == Promises(True, True, True, True)
    assert Mixed.promises == OtherRows.promises == Promises()
    assert Tired.promises.decodes, "what a class states itself holds"


FOUR = [(0, 8, 40)] * 4


@pytest.mark.parametrize("pp", [1, 2])
def test_a_false_promise_ends_the_run_by_name(pp):
    name = "decodes" if pp == 1 else "micro_batches"
    with pytest.raises(SimulationError, match=f"policy Tired does not keep its promise '{name}': at .* on replica 0"):
        run(Tired(), FOUR, pp=pp)


def test_a_false_promise_of_chunks_ends_the_run_by_name():
    with pytest.raises(
        SimulationError, match=r"policy Halving does not keep its promise 'chunks'.*a chunk of 64 on 64"
    ):
        run(Halving(), [(0, 1000, 2)])


@pytest.mark.parametrize("pp", [1, 2])
def test_a_run_that_is_checked_is_the_run_that_is_not(pp, monkeypatch):
    """Same is no policy of the project, so its repetitions are planned all the same: with the very same tables."""
    rows = [(row * 3.5, 40 + 900 * (row % 3 == 2), 30 + row) for row in range(12)]
    made = []
    checked = promise_checks.PromiseChecks._plan
    monkeypatch.setattr(promise_checks.PromiseChecks, "_plan", lambda *told: made.append(1) or checked(*told))
    found, plain = run(Same(64), rows, pp=pp), run(Chunked(64), rows, pp=pp)
    assert made
    for table in ("requests", "iterations", "tokens", "segments", "stages"):
        assert repr(found.table(table).to_pydict()) == repr(plain.table(table).to_pydict()), table


def test_one_repetition_in_a_hundred_is_checked_after_the_first_hundred():
    checks = promise_checks.PromiseChecks(None, 0)
    due = [checks._due() for _ in range(10_100)]
    assert all(due[:100])
    assert 60 < sum(due[100:]) < 150


def test_who_may_change_or_states_promises_the_old_way_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    text = """
from dataclasses import dataclass, field
from policies import Policy, knob

@dataclass
class Loose(Policy):
    def plan(self, queues, draft, kv, host, now_ns): ...

@dataclass(frozen=True)
class Old(Policy):
    repeats = True
    def plan(self, queues, draft, kv, host, now_ns): ...

@dataclass(frozen=True)
class Remembers(Policy):
    seen: dict = field(default_factory=dict)
    def plan(self, queues, draft, kv, host, now_ns): ...
"""
    file.write_text(text, "utf-8")
    for name, message in (
        ("Loose", "expected @dataclass\\(frozen=True\\), and what it remembers in a state"),
        ("Old", "repeats is now promises = Promises\\(decodes=True\\)"),
        ("Remembers", "seen is a dict; a knob is a bool, int, float or str"),
    ):
        with pytest.raises(PolicyError, match=message):
            policy_class(f"{file}:{name}")


@dataclass(frozen=True)
class Sly(Chunked):
    """Frozen, and changes all the same."""

    admitted: int = 0

    def plan(self, queues, draft, kv, host, now_ns):
        object.__setattr__(self, "admitted", self.admitted + len(queues.waiting))
        super().plan(queues, draft, kv, host, now_ns)


def test_a_policy_that_changes_itself_is_found_out():
    with pytest.raises(SimulationError, match="policy Sly changed itself during the run"):
        run(Sly(), FOUR)


@dataclass
class Lazy(Router):
    """Looks at each replica once and keeps what it saw, against its promise."""

    on_demand: ClassVar[bool] = True
    seen: list = field(default_factory=list, init=False)

    def choose(self, request, replicas, rng):
        self.seen = self.seen or list(replicas)
        return min(self.seen, key=lambda replica: replica.decode_tokens_promised)


@dataclass
class Plain(RoundRobin):
    def choose(self, request, replicas, rng):
        return replicas[0]


def test_a_router_that_chooses_otherwise_inherits_no_promise():
    assert RoundRobin.oblivious
    assert not Plain.oblivious
    assert not type("Other", (LeastKV,), {"choose": lambda *told: None}).on_demand
    assert type("Same", (LeastKV,), {}).on_demand


def test_a_router_that_does_not_keep_its_promise_ends_the_run_by_name(tmp_path):
    """At 200 s nobody has anything left to do, which a replica that is not simulated up to then does not know."""
    trace = trace_of([(0, 8, 90), (0, 8, 80), (0, 8, 85), (200, 8, 5)])
    config = ReplayConfig(num_blocks=1000, replicas=3, router=f"{__file__}:Lazy")
    engine = make_engine(config, trace, ConstantCost(device_ns=S))
    with pytest.raises(SimulationError, match="router Lazy does not keep its promise 'on_demand': for request"):
        simulate(trace, engine, Recorder())
