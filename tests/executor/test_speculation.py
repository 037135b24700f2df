"""Live speculation: the same tokens as without, whatever is drafted, under every policy."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.model.sampler import Sampling
from executor.serving.replay import load_for, replay_live
from executor.serving.request_text import Text
from executor.speculation.drafters import NGrams
from executor.speculation.verifying import accept
from metrics.run_folder.drafts import drafts_of_run
from policies import policy_names
from simulator import replay
from tests.simulator.constant_cost import ConstantCost
from workloads import generate

TRACE = generate(requests=8, arrivals="poisson:100", prompt="uniform:10,60", output="uniform:5,40", seed=3)
SETTINGS = {"model": "nano", "as_fast_as_possible": True, "policy": "vllm_v1", "num_blocks": 400}


@cache
def model():
    return load_for(LiveConfig(model="nano", block_size=16), 128)


def live(trace=TRACE, **options):
    return replay_live(trace, LiveConfig(**{**SETTINGS, **options}), loaded=model())


@cache
def plain_answers(**options):
    return live(**options).answers


@pytest.mark.parametrize("policy", policy_names()[:9])
def test_every_policy_answers_as_without_speculation(policy):
    found = live(policy=policy, speculation="ngram:4")
    assert found.answers == plain_answers()
    assert found.summary["accepted_tokens"] > 0


@pytest.mark.parametrize(
    "options",
    [
        # Ten blocks: about two requests at once, the others are preempted and come back.
        {"speculation": "ngram:4", "num_blocks": 10, "poison": True},
        {"speculation": "ngram:4", "num_blocks": 10, "preemption": "swap", "swap_page_mib": 0.1},
        {"speculation": "draft:3", "draft_model": "nano", "num_blocks": 12},
        {"speculation": "draft:3", "draft_model": "nano", "prefix_caching": True},
    ],
)
def test_memory_and_drafters_change_no_token(options):
    found = live(**options)
    assert found.answers == plain_answers()
    assert found.summary["finished"] == 8
    assert found.summary["preemptions"] > 0 or "num_blocks" not in options


def test_a_draft_model_that_is_the_model_itself_is_always_accepted():
    found = live(speculation="draft:3", draft_model="nano")
    assert found.summary["acceptance_by_position"] == "1.000 1.000 1.000"


def test_sampled_tokens_are_those_of_an_engine_that_does_not_speculate():
    """Same seed and position, same draw: so the distribution is the model's own, whatever is drafted."""
    options = {"temperature": 0.7, "top_k": 4}
    plain = plain_answers(**options)
    found = live(speculation="ngram:4", **options)
    assert found.answers == plain
    assert found.summary["accepted_tokens"] > 0
    assert plain != plain_answers()


def test_a_draft_is_accepted_as_often_as_the_model_gives_it():
    """Rejection sampling with drafts that are tokens: accepted with p(d), and what comes instead is of p without d."""
    chances, generator = np.array([0.5, 0.3, 0.2]), np.random.default_rng(0)
    first = []
    accepted = 0
    for _ in range(20_000):
        sampled = generator.choice(3, size=2, p=chances).tolist()
        tokens = accept(sampled, [1])
        accepted += len(tokens) == 2
        first.append(tokens[0])
    assert accepted / 20_000 == pytest.approx(0.3, abs=0.015)
    assert np.bincount(first) / 20_000 == pytest.approx(chances, abs=0.015)


def text_of(tokens):
    return Text.of(np.array(tokens, np.int64), 20, Sampling(), ())


def test_n_grams_draft_what_followed_the_longest_last_n_gram_first():
    grams, text = NGrams(), text_of([1, 2, 3, 9, 2, 3, 7, 8, 1, 2, 3])
    # 1 2 3 was followed by 9 2 3 7; 2 3 alone first by 9, too.
    assert grams.draft(text, 4) == [9, 2, 3, 7]
    text.append(5)
    assert grams.draft(text, 4) == []
    for token in (2, 3):
        text.append(token)
    assert grams.draft(text, 2) == [9, 2]
    # As if nothing had been kept.
    assert NGrams().draft(text, 2) == [9, 2]


def test_what_happened_live_is_played_by_the_simulator(tmp_path):
    run = live(speculation="ngram:4")
    run.write(tmp_path / "run")
    seen = drafts_of_run(run.tables)
    found = replay(
        TRACE,
        policy="vllm_v1",
        speculation="ngram:4",
        acceptance=f"requests={tmp_path / 'run'}",
        cost=ConstantCost(10**6),
        gpu="h100",
    )
    played = drafts_of_run(found.tables)
    for one, other in zip(
        *(sorted(zip(d.request, d.position, d.verified, d.accepted)) for d in (seen, played)), strict=True
    ):
        assert one == other
    assert found.summary["acceptance_by_position"] == run.summary["acceptance_by_position"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculation": "eagle:2"}, "no live engine here has such a head"),
        ({"speculation": "draft:2"}, "--draft-model beside it"),
        ({"speculation": "ngram:2", "draft_model": "nano"}, "draft:K beside"),
        ({"draft_model": "nano"}, "without --speculation"),
        ({"speculation": "ngram:2", "ahead": True}, "--async with"),
        ({"speculation": "draft:2", "draft_model": "tiny"}, "verified token by token"),
    ],
)
def test_what_does_not_go_together_is_one_line(options, says):
    with pytest.raises(ExecutorError, match=says):
        live(**options)
