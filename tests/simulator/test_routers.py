"""Routers, each by the rule on its page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest

from policies import Request
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.routers import (
    choose,
    least,
    make_router,
    numbered,
    outstanding_requests,
    router_knobs,
    router_names,
)
from simulator.settings_without_effect import settings_without_effect
from tests.simulator.constant_cost import trace_of


@dataclass
class View:
    number: int
    num_running: int = 0
    num_waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens_promised: int = 0
    total_blocks: int = 100
    free_blocks: int = 100
    block_size: int = 16

    @property
    def num_requests(self):
        return self.num_running + self.num_waiting


def route(router, replicas, request=None, rng=None, **knobs):
    router = make_router(router, knobs) if isinstance(router, str) else router
    return choose(router, request or Request(0, 0, 100, 10), replicas, rng or Random(0)).number


def test_round_robin_takes_turns_and_skips_who_is_down():
    router = make_router("round_robin")
    views = [View(number) for number in range(3)]
    assert [route(router, views) for _ in range(4)] == [0, 1, 2, 0]
    assert [route(router, [views[0], views[2]]) for _ in range(3)] == [2, 0, 2]


def test_random_is_even_and_seeded():
    views = [View(number) for number in range(4)]
    runs = [[route("random", views, rng=rng) for _ in range(4000)] for rng in (Random(1), Random(1))]
    assert runs[0] == runs[1]
    assert all(abs(count - 1000) < 120 for count in Counter(runs[0]).values())


def test_waiting_requests_count_as_much_as_running_ones():
    assert route("least_outstanding_requests", [View(0, 3, 5), View(1, 7, 0), View(2, 7, 0)]) == 1


def test_tokens_count_prompts_and_declared_answers():
    views = [View(0, prefill_tokens=500, decode_tokens_promised=100), View(1, decode_tokens_promised=550)]
    assert route("least_outstanding_tokens", views) == 1
    assert route("least_outstanding_tokens", views, decode_weight=2) == 0


def test_power_of_two_never_takes_the_most_loaded():
    views = [View(0, 9), View(1, 5), View(2, 7)]
    rng = Random(2)
    chosen = Counter(route("power_of_two", views, rng=rng) for _ in range(3000))
    # Of three pairs, replica 1 wins two and replica 2 one.
    assert (chosen[0], round(chosen[1] / chosen[2])) == (0, 2)


def test_least_kv_counts_what_the_queue_will_need():
    views = [View(0, free_blocks=60, prefill_tokens=480), View(1, free_blocks=50)]
    assert route("least_kv", views) == 1
    assert route("least_kv", [View(0, free_blocks=30), View(1, free_blocks=100, total_blocks=400)]) == 0


def test_a_session_stays_unless_its_replica_is_too_busy():
    router = make_router("session_affinity", {"spill": 5})
    views = [View(0, 3), View(1, 0)]
    talk = Request(0, 0, 100, 10, session="talk")
    assert route(router, views, talk) == 1
    views[1].num_waiting = 7
    assert route(router, views, talk) == 1
    assert route(router, views, Request(1, 0, 100, 10)) == 0, "no session, no home"
    views[1].num_waiting = 8
    assert route(router, views, talk) == 0
    assert route(router, [views[1]], talk) == 1, "its home is down"


def test_a_prefix_is_followed_while_loads_are_even():
    router = make_router("prefix_affinity", {"uneven_requests": 4})
    views = [View(0), View(1)]
    first = Request(0, 0, 2048, 10, (1, 2, 3, 4), 512)
    assert route(router, views, first) == 0
    views[0].num_running = 3
    assert route(router, views, Request(1, 0, 2048, 10, (1, 2, 8, 9), 512)) == 0, "half of it is known there"
    assert route(router, views, Request(2, 0, 2048, 10, (1, 5, 6, 7), 512)) == 1, "a quarter is not enough"
    views[0].num_running = 5
    assert route(router, views, Request(3, 0, 2048, 10, (1, 2, 3, 4), 512)) == 1, "five more than none is uneven"


def test_scores_weigh_what_is_known_against_queues_and_memory():
    """Of 3 for the prompt, 2 for the queue and 2 for free KV, by hand."""
    router = make_router("weighted_scores")
    views = [View(0), View(1), View(2)]
    known = Request(0, 0, 2048, 10, (1, 2, 3, 4), 512)
    assert route(router, views, known) == 0, "all alike: the first"
    views[0].num_waiting, views[1].num_waiting = 4, 2
    # 0: 3 + 0 + 2 = 5; 1: 0 + 1 + 2 = 3; 2: 0 + 2 + 2 = 4.
    assert route(router, views, known) == 0
    # Half known: 1.5 + 0 + 2 = 3.5 at 0, and 4 at 2.
    assert route(router, views, Request(1, 0, 2048, 10, (1, 2, 8, 9), 512)) == 2
    # 0, its memory full: 3 + 0 + 0; 1: 0 + 1 + 2; 2, which half of it was sent to meanwhile: 1.5 + 2 + 0.49 x 2.
    views[0].free_blocks, views[2].free_blocks = 0, 49
    assert route(router, views, known) == 2
    assert route("weighted_scores", views, known, prefix_weight=0, kv_weight=0) == 2
    assert route("weighted_scores", views, known, prefix_weight=0, queue_weight=0) == 1


def test_a_whole_program_stays_together():
    views = [View(0), View(1)]
    call = Request(0, 0, 100, 10, session="p.0", program="p")
    for by, second in (("session", 1), ("program", 0)):
        views[0].num_running = 0
        router = make_router("session_affinity", {"by": by})
        assert route(router, views, call) == 0
        views[0].num_running = 1
        assert route(router, views, call._replace(session="p.1")) == second
    router = make_router("session_affinity", {"by": "program", "spill": 1})
    assert route(router, views, call) == 1
    views[1].num_running = 2
    assert route(router, views, call) == 0, "spilled"


def test_the_end_of_a_prefix_is_forgotten_first():
    router = make_router("prefix_affinity", {"remembered": 2, "least_match": 0.4})
    views = [View(0), View(1)]
    route(router, views, Request(0, 0, 2048, 10, (1, 2, 3, 4), 512))
    views[0].num_running = 1
    assert route(router, views, Request(1, 0, 2048, 10, (1, 2, 5, 6), 512)) == 0
    assert route(router, views, Request(2, 0, 2048, 10, (3, 4), 512)) == 1


def test_the_least_may_be_sought_among_some_and_a_replica_by_its_number():
    views = [View(number, 9 - number) for number in (0, 2, 3, 7)]
    assert least(views, outstanding_requests).number == 7
    assert least(views, outstanding_requests, among=[0, 2]).number == 3
    assert numbered(views, 3) is views[2]
    assert [numbered(views, absent) for absent in (1, 8, None)] == [None] * 3


def test_every_built_in_router_says_what_its_knobs_are_for():
    for name in router_names():
        assert all(knob.help for knob in router_knobs(name).values())


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("round_robbin", {}, "did you mean round_robin"),
        ("power_of_two", {"choises": 2}, "router power_of_two has no knob 'choises'; its knobs: choices, by"),
        ("power_of_two", {"choices": 0}, "router power_of_two, knob choices: found 0, expected at least 1"),
        ("nowhere.py:Mine", {}, "router file nowhere.py: no such file"),
    ],
)
def test_a_wrong_router_is_one_clear_line(name, knobs, message):
    with pytest.raises(SimulationError, match=message):
        make_router(name, knobs)


def test_a_router_of_ones_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "from simulator.routers import Router\n"
        "@dataclass\n"
        "class Last(Router):\n"
        "    skip: int = 0\n"
        "    def choose(self, request, replicas, rng):\n"
        "        return replicas[-1 - self.skip] if self.skip < 9 else None\n"
    )
    views = [View(0), View(1)]
    assert route(f"{path}:Last", views, skip=1) == 0
    with pytest.raises(SimulationError, match="router Last chose None for request 0, expected one of the 2 replicas"):
        route(f"{path}:Last", views, skip=9)


@pytest.mark.parametrize(
    ("settings", "columns", "told"),
    [
        ({"replicas": 2, "router": "session_affinity"}, {}, "router session_affinity: the trace has no session"),
        ({"replicas": 2, "router": "session_affinity"}, {"session": ["a", None]}, None),
        ({"replicas": 1, "router": "session_affinity"}, {}, None),
        ({"replicas": 2, "router": "prefix_affinity"}, {"session": ["a", "b"]}, "has no prefix_hashes"),
        ({"replicas": 2, "router": "prefix_affinity"}, {"prefix_hashes": [(1,), ()], "hash_tokens": 16}, None),
        ({"replicas": 2, "router": "least_kv"}, {}, None),
        ({"prefix_caching": True}, {}, "--prefix-caching: the trace has no prefix_hashes, no prompt_ids"),
        ({"prefix_caching": True}, {"prefix_hashes": [(1,), (1,)], "hash_tokens": 16}, None),
    ],
)
def test_a_setting_that_the_trace_gives_nothing_to_work_with_is_noted(settings, columns, told):
    trace = replace(trace_of([(0, 40, 3), (1, 40, 3)]), **columns)
    notes = settings_without_effect(ReplayConfig(**settings), trace)
    assert [told in note for note in notes] == ([True] if told else [])
