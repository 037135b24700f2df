"""`simulator check`: what is wrong with a policy or router of one's own is found, and what is right passes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from simulator.commands.commands import app
from simulator.config import ReplayConfig
from simulator.studies.check_user_code import check_user_code, generated

FILE = '''
from dataclasses import dataclass
from typing import ClassVar

from policies import Promises, policy_class
from simulator.routers import Router

Chunked = policy_class("chunked")
SEEN = []


@dataclass(frozen=True)
class Fine(Chunked):
    """Chunked, with a promise that it keeps."""

    promises: ClassVar[Promises] = Promises(decodes=True)

    def plan(self, queues, draft, kv, host, now_ns):
        super().plan(queues, draft, kv, host, now_ns)


@dataclass(frozen=True)
class Timed(Fine):
    """Decodes less in every other tenth of a second, and promises not to."""

    promises: ClassVar[Promises] = Promises(decodes=True)

    def plan(self, queues, draft, kv, host, now_ns):
        if now_ns // 100_000_000 % 2:
            draft.decode_all(1)
        else:
            super().plan(queues, draft, kv, host, now_ns)


@dataclass(frozen=True)
class Remembers(Fine):
    """What one run has seen changes the next one."""

    def plan(self, queues, draft, kv, host, now_ns):
        SEEN.append(now_ns)
        if len(SEEN) % 7 == 0 and queues.waiting and queues.num_running:
            draft.decode_all()
        else:
            super().plan(queues, draft, kv, host, now_ns)


@dataclass(frozen=True)
class ById(Fine):
    """Plans otherwise where blocks have ids, as they have on a live engine."""

    def plan(self, queues, draft, kv, host, now_ns):
        if kv.by_id and not kv.prefix_caching and queues.partial:
            draft.decode_all()
            for prompt in queues.partial:
                draft.chunk(prompt, 7)
        else:
            super().plan(queues, draft, kv, host, now_ns)


@dataclass(frozen=True)
class Forgets(Fine):
    """Leaves the last decode of all alone."""

    def plan(self, queues, draft, kv, host, now_ns):
        if queues.num_running > 1 or queues.waiting or queues.partial:
            super().plan(queues, draft, kv, host, now_ns)


@dataclass(frozen=True)
class Breaks(Fine):
    def plan(self, queues, draft, kv, host, now_ns):
        super().plan(queues, draft, kv, host, now_ns)
        {}["short of blocks"] if draft.preempted else None


@dataclass
class FirstOrLast(Router):
    def choose(self, request, replicas, rng):
        return replicas[0 if request.prompt_tokens < 20 else -1]


@dataclass
class Stale(Router):
    on_demand: ClassVar[bool] = True

    def choose(self, request, replicas, rng):
        SEEN[:] = SEEN if len(SEEN) == len(replicas) and SEEN[0] is replicas[0] else list(replicas)
        return min(SEEN, key=lambda replica: replica.num_requests)


@dataclass
class Elsewhere(Router):
    def choose(self, request, replicas, rng):
        return None
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("check") / "mine.py"
    path.write_text(FILE, "utf-8")
    return path


def failure(file: Path, name: str, seconds: float = 20.0) -> tuple[int, str]:
    """Which check failed, counted from 0, and what it said; (-1, "") if none did."""
    checks = check_user_code(f"{file}:{name}", ReplayConfig(), seconds=seconds)
    failed = [(at, check.failure) for at, check in enumerate(checks) if check.failure]
    assert len(failed) < 2
    return failed[0] if failed else (-1, "")


@pytest.mark.parametrize(
    ("name", "at", "says"),
    [
        ("Timed", 0, "policy Timed does not keep its promise 'decodes': at"),
        ("Remembers", 2, "generated trace"),
        ("ById", 3, "with block ids and"),
        ("Forgets", 0, "the policy left them waiting"),
        ("Breaks", 0, "in plan: KeyError: 'short of blocks'"),
        ("Stale", 0, "router Stale does not keep its promise 'on_demand'"),
        ("Elsewhere", 0, "router Elsewhere chose None"),
    ],
)
def test_what_is_wrong_is_found(file, name, at, says):
    found, text = failure(file, name)
    assert found in (at, 1) if name == "Remembers" else found == at, text
    assert says in text


@pytest.mark.parametrize("name", ["Fine", "FirstOrLast"])
def test_what_is_right_passes(file, name):
    assert failure(file, name, seconds=3.0) == (-1, "")


def test_generated_traces_follow_from_their_seed():
    one, again, other = generated(Random(3)), generated(Random(3)), generated(Random(4))
    assert one.same_requests(again)
    assert not one.same_requests(other)


def test_the_command_prints_a_verdict_and_ends_with_it(file, tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,60,20\n0.1,300,40\n", "utf-8")
    fine = CliRunner().invoke(app, ["check", f"{file}:Fine", str(trace), "--seconds", "3", "--chunk-size", "64"])
    assert fine.exit_code == 0, fine.output
    assert "ok    your trace: leaps against plain planning: 1 runs" in fine.output
    assert fine.output.endswith("mine.py:Fine: nothing found\n")
    knobs = CliRunner().invoke(app, ["check", f"{file}:Fine", "--chunk-size", "none"])
    assert "knob chunk_size: found 'none', expected int" in str(knobs.exception)
    wrong = CliRunner().invoke(app, ["check", f"{file}:Timed", "--json"])
    verdict = json.loads(wrong.output)
    assert (wrong.exit_code, verdict["holds"]) == (1, False)
