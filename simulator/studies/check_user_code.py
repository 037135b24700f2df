"""Checks of a policy or router of one's own, in under a minute: invariants, both worlds' contracts, promises.

Each check runs the user's code over small generated traces, a fresh one every round until its time is up, and over the
user's own trace if there is one. A failure names the trace's seed and the settings with which it comes back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from metrics import Recorder, RunTables
from policies import Batch, Policy, PolicyError, Scheduler, make_policy, make_scheduler
from policies.edges.user_code import place_in_user_code
from policies.registry import class_from_file
from profiler.cost_model import CostModel
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.replica.promise_checks import is_own
from simulator.routers import Router
from simulator.routers.registry import BUILT_IN as ROUTERS
from simulator.simulation import make_cluster_plan, simulate
from workloads import Trace

TABLES = ("requests", "iterations", "stages", "tokens", "segments")
ROUNDS = 200
MOST_BATCHES = 20_000
LIVE_STEP_NS = 10_000_000


@dataclass
class Check:
    """One thing that was looked at. runs: how often it held. failure: what was found where it did not, else empty."""

    name: str
    runs: int = 0
    failure: str = ""


class BrokenError(Exception):
    """What was found; the message says all."""


def check_user_code(
    name: str, config: ReplayConfig, trace: Trace | None = None, *, seconds: float = 40.0, first_seed: int = 0
) -> list[Check]:
    """Check the policy or router `name` (a registered name or FILE.py:Class) with the config's knobs.

    seconds: how long at most, split among generated traces and the user's own. first_seed: of the generated traces.
    Raises PolicyError or SimulationError for a class that cannot be used at all.
    """
    until = time.monotonic() + seconds
    rounds = until if trace is None else until - seconds / 3
    if is_router(name):
        checks: _Checks = _RouterChecks(name, config)
    else:
        checks = _PolicyChecks(name, config)
    for number in range(first_seed, first_seed + ROUNDS):
        if time.monotonic() > rounds or checks.failed:
            break
        checks.round(number)
    if trace is not None and not checks.failed:
        checks.own_trace(trace, until)
    return checks.all


def is_router(name: str) -> bool:
    """Whether a name is a router's; a file is run for that."""
    path, colon, cls = name.rpartition(":")
    if colon and path.endswith(".py"):
        found = class_from_file("policy or router", Path(path), cls)
        return isinstance(found, type) and issubclass(found, Router)
    return name in ROUTERS


class _Checks:
    """The checks of one class, in order."""

    config: ReplayConfig

    def __init__(self, *names: str) -> None:
        self.all = [Check(name) for name in names]

    @property
    def failed(self) -> bool:
        return any(check.failure for check in self.all)

    def run(self, at: int, what: str, does: Callable[[], object]) -> None:
        """Do one check; what it raises is its failure. what: the trace and settings, for who wants it again."""
        check = self.all[at]
        if self.failed:
            return
        try:
            does()
        except (BrokenError, PolicyError, SimulationError) as error:
            check.failure = f"{what}: {error}"
        except Exception as error:
            place = place_in_user_code(error)
            check.failure = f"{what}: {f'{place}: ' if place else ''}{type(error).__name__}: {error}"
        else:
            check.runs += 1

    def round(self, seed: int) -> None:
        raise NotImplementedError

    def own_trace(self, trace: Trace, until: float) -> None:
        """The last check: ever more requests of the user's own trace, with repeated plans and without."""
        config = replace(self.config, limit=None)

        def compare(part: Trace) -> None:
            _same(_play(part, config, None), _play(part, replace(config, leaps=False), None))

        for count in _growing(len(trace)):
            begun = time.monotonic()
            self.run(len(self.all) - 1, f"first {count:,} requests", partial(compare, trace.head(count)))
            now = time.monotonic()
            if self.failed or now + 4 * (now - begun) > until:
                break


class _PolicyChecks(_Checks):
    def __init__(self, name: str, config: ReplayConfig) -> None:
        super().__init__(
            "every request ends, every token is delivered once, no block is lost",
            "repeated plans are those that plan() makes (leaps against plain planning)",
            "a run again is the same run (nothing is remembered outside a state)",
            "as a live engine calls it: block ids, stop tokens, clients that go",
            "your trace: leaps against plain planning",
        )
        self.config = replace(config, policy=name, replicas=1)
        self.policy = make_policy(name, config.knobs)
        if is_own(self.policy):
            self.all[1].name += "; the project's own"

    def round(self, seed: int) -> None:
        rng = Random(seed)
        trace = generated(rng)
        config = replace(self.config, **_settings(rng, trace))
        what = f"generated trace {seed} ({_words(config)})"
        tables: list[RunTables] = []
        self.run(0, what, lambda: tables.append(_play(trace, config, self.policy)))
        if tables:
            self.run(1, what, lambda: _same(tables[0], _play(trace, replace(config, leaps=False), self.policy)))
            self.run(2, what, lambda: _same(tables[0], _play(trace, config, self.policy)))
        self.run(3, what, lambda: _serve_twice(trace, config, self.policy))


class _RouterChecks(_Checks):
    def __init__(self, name: str, config: ReplayConfig) -> None:
        super().__init__(
            "every request goes to one of the replicas given, and ends",
            "its promises (oblivious, on_demand) change no choice",
            "a run again is the same run (what it remembers is made anew)",
            "your trace: with promises against all replicas side by side",
        )
        self.config = replace(config, router=name, pools=(), replicas=max(2, config.replicas))

    def round(self, seed: int) -> None:
        rng = Random(seed)
        trace = generated(rng, most=30)
        config = replace(self.config, **_settings(rng, trace), replicas=rng.choice((2, 3, 5)))
        config = replace(config, pp=1)
        what = f"generated trace {seed} ({config.replicas} replicas, {_words(config)})"
        tables: list[RunTables] = []
        self.run(0, what, lambda: tables.append(_play(trace, config, None)))
        if tables:
            self.run(1, what, lambda: _same(tables[0], _play(trace, replace(config, leaps=False), None)))
            self.run(2, what, lambda: _same(tables[0], _play(trace, config, None)))


# Traces and settings


def generated(rng: Random, most: int = 14) -> Trace:
    """A few requests: some at the same moment, some that end early, some of a class, some whose client goes."""
    count = rng.randint(1, most)
    gaps = [rng.choice((0, 0, 0, rng.randint(1, 40), rng.randint(1, 900))) * 1_000_000 for _ in range(count)]
    prompts = [rng.choice((rng.randint(1, 30), rng.randint(1, 400))) for _ in range(count)]
    outputs = [rng.choice((1, rng.randint(1, 20), rng.randint(1, 150))) for _ in range(count)]
    limits = [output + rng.choice((0, 0, rng.randint(0, 60))) for output in outputs]
    arrivals = np.cumsum(gaps)
    impatient = rng.random() < 0.3
    patience = [rng.randint(1, 2000) * 1_000_000 if impatient and rng.random() < 0.3 else -1 for _ in range(count)]
    return Trace(
        "generated",
        arrivals,
        np.array(prompts),
        np.array(outputs),
        np.array(limits),
        session=[rng.choice((None, "a", "b")) for _ in range(count)],
        priority=np.array([rng.choice((0, 0, 1, 2)) for _ in range(count)]),
        slo=[rng.choice((None, "chat", "batch")) for _ in range(count)],
        tenant=[rng.choice((None, "x", "y", "z")) for _ in range(count)],
        predicted_tokens=np.array([max(1, output + rng.randint(-9, 9)) for output in outputs]),
        abort_ns=np.array([at + wait if wait >= 0 else -1 for at, wait in zip(arrivals.tolist(), patience)]),
    )


def _settings(rng: Random, trace: Trace) -> dict[str, Any]:
    """An engine for a generated trace: often short of memory, sometimes a pipeline."""
    block = rng.choice((4, 16))
    longest = -(-trace.longest // block)
    return {
        "cost_model": "roofline",
        "block_size": block,
        "num_blocks": longest + 2 + rng.choice((0, longest // 2, 2 * longest, 12 * longest)),
        "pp": rng.choice((1, 1, 2)),
        "max_num_seqs": rng.choice((None, None, 1, 3)),
        "prefix_caching": rng.random() < 0.15,
        "max_model_len": None,
        "limit": None,
    }


def _words(config: ReplayConfig) -> str:
    words = [f"--num-blocks {config.num_blocks}", f"--block-size {config.block_size}"]
    words += [f"--pp {config.pp}"] if config.pp > 1 else []
    words += [f"--max-num-seqs {config.max_num_seqs}"] if config.max_num_seqs else []
    return " ".join(words + (["--prefix-caching"] if config.prefix_caching else []))


def _growing(most: int) -> Iterator[int]:
    count = min(100, most)
    while count < most:
        yield count
        count *= 4
    yield most


# The simulated world


def _play(trace: Trace, config: ReplayConfig, policy: Policy | None, cost: CostModel | None = None) -> RunTables:
    """A run's tables, its books checked at the end. policy: this very object, instead of a new one by its name."""
    plan = make_cluster_plan(config, trace, cost)
    if policy is not None:
        plan = replace(plan, pools=tuple(replace(p, engine=replace(p.engine, policy=policy)) for p in plan.pools))
    recorder = Recorder()
    cluster = simulate(trace, plan, recorder)
    for replica in cluster.replicas:
        _books_are_empty(replica.scheduler)
    tables = recorder.tables()
    _answers_are_whole(trace, tables)
    return tables


def _books_are_empty(scheduler: Scheduler) -> None:
    queues, ledger = scheduler.queues, scheduler.ledger
    left = {
        "blocks that nobody gave back": ledger.total_blocks - ledger.free_blocks,
        "requests that still run": queues.num_running,
        "requests that still wait": len(queues.waiting),
        "prompt tokens not planned": queues.prefill_tokens,
        "output tokens not planned": queues.decode_tokens_promised,
    }
    for what, count in left.items():
        if count:
            raise BrokenError(f"{count} {what} after the last request has ended")


def _answers_are_whole(trace: Trace, tables: RunTables) -> None:
    """Every finished request has as many tokens as the trace says, each at a time of its own, in order."""
    received: dict[int, int] = {}
    segments = (tables.column("segments", name).tolist() for name in ("request", "from_step", "to_step"))
    for request, first, end in zip(*segments):
        received[request] = received.get(request, 0) + end - first
    names = ("request", "status", "output_tokens")
    for request, status, tokens in zip(*(tables.column("requests", name).tolist() for name in names)):
        if status == "finished" and not tokens == received.get(request) == int(trace.output_tokens[request]):
            raise BrokenError(
                f"request {request} finished with {tokens} tokens ({received.get(request, 0)} of them have a time), "
                f"expected {trace.output_tokens[request]}"
            )


def _same(first: RunTables, second: RunTables) -> None:
    """Refuse two runs whose rows differ, and name the first row that does."""
    for table in TABLES:
        one, other = _rows(first, table), _rows(second, table)
        if one == other:
            continue
        at = next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
        columns = list(first.table(table).column_names)
        a, b = (rows[at] if at < len(rows) else None for rows in (one, other))
        if a is None or b is None:
            raise BrokenError(f"table {table}: {len(one)} rows with repeated plans, {len(other)} without")
        differ = [f"{name} {x} and {y}" for name, x, y in zip(columns, a, b) if x != y]
        place = ", ".join(f"{name} {x}" for name, x in zip(columns[:2], a))
        raise BrokenError(f"table {table}, {place}: {'; '.join(differ[:3])}")


def _rows(run: RunTables, table: str) -> list[tuple[str, ...]]:
    # Replicas that run one after the other write the same rows in another order.
    columns = run.table(table).to_pydict()
    return sorted((tuple(map(repr, row)) for row in zip(*columns.values())), key=_numbers)


def _numbers(row: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    return tuple((len(text), text) for text in row)


# The live world


def _serve_twice(trace: Trace, config: ReplayConfig, policy: Policy) -> None:
    """As the executor drives a scheduler, once by block ids and once counting: both plan the same batches."""
    logs = [_serve(trace, config, policy, by_id=by_id) for by_id in (True, False)]
    if logs[0] != logs[1]:
        at = next((at for at, pair in enumerate(zip(*logs)) if pair[0] != pair[1]), min(map(len, logs)))
        found = [log[at] if at < len(log) else "nothing" for log in logs]
        raise BrokenError(f"batch {at} is {found[0]} with block ids and {found[1]} where blocks are counted")


def _serve(trace: Trace, config: ReplayConfig, policy: Policy, *, by_id: bool) -> list[tuple[Any, ...]]:
    knobs = deepcopy(getattr(policy, "__dict__", {}))
    assert config.num_blocks is not None
    scheduler = make_scheduler(
        policy,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=trace.longest,
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
        by_id=by_id,
        estimator=lambda shape: LIVE_STEP_NS + 20_000 * shape.rows,
    )
    rng = Random(len(trace))
    stops = {row: rng.randint(1, 40) for row in range(len(trace)) if rng.random() < 0.3}
    goes = {row: rng.randint(1, 60) for row in range(len(trace)) if rng.random() < 0.2}
    coming = deque(range(len(trace)))
    log: list[tuple[Any, ...]] = []
    now = 0
    while coming or scheduler.tracks:
        while coming and trace.arrival_ns[coming[0]] <= now:
            row = coming.popleft()
            scheduler.add(trace.request(row), now)
        for row in [row for row, at in goes.items() if at <= len(log) and row in scheduler.tracks]:
            scheduler.withdraw([row], "client gone", now)
        batch = scheduler.plan(now)
        if batch is None:
            now = _next_moment(scheduler, trace, coming, now)
            continue
        log.append((batch.shape, [track.request.id for track in _members(batch)]))
        if len(log) > MOST_BATCHES:
            raise BrokenError(f"{MOST_BATCHES:,} batches, and {len(scheduler.tracks)} requests have not ended")
        now += LIVE_STEP_NS
        sampled = [track for track in _members(batch) if stops.get(track.request.id, -1) == track.delivered + 1]
        ended = [track.request.id for track in sampled]
        scheduler.complete(batch, now, [row for row in ended if row in scheduler.tracks])
        if scheduler.ledger.free_blocks < 0:
            raise BrokenError(f"after batch {len(log) - 1} there are {scheduler.ledger.free_blocks} free blocks")
    _books_are_empty(scheduler)
    if getattr(policy, "__dict__", {}) != knobs:
        raise BrokenError("the policy changed itself; what it remembers belongs into a state (policies.StatefulPolicy)")
    return log


def _members(batch: Batch) -> list[Any]:
    """The requests whose token a batch samples."""
    members = [chunk.track for chunk in batch.chunks if chunk.samples]
    for part in batch.grown:
        members += [track for track in part.cohort.members() if track.decodes_from <= part.step]
    return members


def _next_moment(scheduler: Scheduler, trace: Trace, coming: deque[int], now: int) -> int:
    """When an idle engine looks again; whoever can never start ends here, as on a live engine."""
    moments = [int(trace.arrival_ns[coming[0]])] if coming else []
    if scheduler.alarm_ns is not None:
        moments.append(max(now + 1, scheduler.alarm_ns))
    elif scheduler.reject_stuck(now) is not None:
        return now
    if not moments:
        if scheduler.tracks:
            raise BrokenError(f"nothing is planned, and {len(scheduler.tracks)} requests have not ended")
        return now
    return max(now, min(moments))
