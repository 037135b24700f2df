"""Whose request it is, and what somebody predicts of it: read, drawn, kept and told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from policies.work.request import Request
from workloads import Trace, TraceError, generate, read_trace
from workloads.generating.predictions import with_predictions
from workloads.priorities import notes_on_turns


@pytest.mark.parametrize("name", ["tenant", "User", "user_id", "API Key", "customerId", "Organization", "client_id"])
def test_a_tenant_goes_by_many_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"arrival_s,prompt_tokens,output_tokens,{name}\n0,5,5,acme\n1,5,5,\n2,5,5,7\n")
    trace = read_trace(path)
    assert trace.tenant == ["acme", None, "7"]
    assert not trace.notes
    assert trace.request(0) == Request(0, 0, 5, 5, tenant="acme")


def test_the_more_telling_name_is_taken_and_the_other_is_said(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,user,tenant\n0,5,5,ann,acme\n")
    trace = read_trace(path)
    assert trace.tenant == ["acme"]
    assert any("'user'" in note for note in trace.notes)


def test_a_session_is_a_program_where_nothing_else_is_named() -> None:
    trace = Trace("t", np.zeros(2), np.ones(2), np.ones(2), np.ones(2), session=["a", "b"], program=[None, "p"])
    assert [trace.request(row).program for row in (0, 1)] == ["a", "p"]
    assert trace.take(slice(1, 2)).program == ["p"]


def test_tenants_are_drawn_by_shares_and_a_session_has_one() -> None:
    trace = generate(requests=2000, arrivals="poisson:5", tenants="heavy=8,light=1,other=1", seed=1)
    assert trace.tenant is not None
    counts = Counter(trace.tenant)
    assert counts["heavy"] == pytest.approx(1600, abs=80)
    assert counts["light"] == pytest.approx(200, abs=60)
    turns = generate(requests=40, arrivals="poisson:5", turns="fixed:3", tenants="a=1,b=1")
    assert turns.tenant is not None
    assert turns.session is not None
    assert len(set(zip(turns.session, turns.tenant))) == 40
    with pytest.raises(TraceError, match="tenants: found 'heavy', expected shares"):
        generate(requests=5, tenants="heavy")


def answers(*lengths: int, limit: int = 50) -> Trace:
    count = len(lengths)
    return Trace("t", np.arange(count), np.ones(count), np.array(lengths), np.full(count, limit))


def test_an_oracle_is_as_wrong_as_it_is_told_to_be() -> None:
    trace = generate(requests=4000, output="fixed:1000")
    assert with_predictions(trace, "oracle:0", 0).predicted_tokens.tolist() == [1000] * 4000  # type: ignore[union-attr]
    predicted = with_predictions(trace, "oracle:0.5", 3)
    assert predicted.predicted_tokens is not None
    errors = np.log(predicted.predicted_tokens / 1000)
    assert np.median(errors) == pytest.approx(0, abs=0.03)
    assert errors.std() == pytest.approx(0.5, abs=0.03)
    assert predicted.request(7).predicted_tokens == predicted.predicted_tokens[7]
    assert "oracle:0.5" in predicted.notes[-1]


def test_a_bucket_is_named_by_its_upper_edge() -> None:
    predicted = with_predictions(answers(1, 2, 3, 4, 10, 20), "buckets:2", 0).predicted_tokens
    assert predicted is not None
    # "higher" median of six: the fourth; the rest lies in the bucket up to the largest.
    assert predicted.tolist() == [4, 4, 4, 4, 20, 20]


def test_a_quantile_is_of_the_tenants_answers_before() -> None:
    trace = replace(answers(10, 100, 20, 30, 200), tenant=["x", "y", "x", "x", "y"])
    predicted = with_predictions(trace, "quantile:0.5", 0).predicted_tokens
    assert predicted is not None
    assert predicted.tolist() == [50, 50, 10, 20, 100]


@pytest.mark.parametrize("text", ["oracle", "oracle:-1", "buckets:2.5", "quantile:2", "quantile:nan", "magic:1"])
def test_a_predictor_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(TraceError, match=f"predict: found '{text}', expected oracle:SIGMA"):
        with_predictions(answers(1), text, 0)


def test_predictions_are_made_before_a_file_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at},5,{9 * at + 1}\n" for at in range(9)))
    whole = read_trace(path, predict="oracle:1", seed=4)
    assert read_trace(path, predict="oracle:1", seed=4, limit=3).same_requests(whole.head(3))


@pytest.mark.parametrize(
    ("policy", "column"), [("vtc", "tenant"), ("weighted_fair", "tenant"), ("predicted_sjf", "predicted_tokens")]
)
def test_a_policy_that_finds_nothing_to_go_by_is_told(policy: str, column: str) -> None:
    (note,) = notes_on_turns(answers(1, 2), policy)
    assert note.startswith(f"policy {policy}: the trace has no column {column}, so ")
    held = {"tenant": ["x", None]} if column == "tenant" else {"predicted_tokens": [3, 0]}
    assert notes_on_turns(replace(answers(1, 2), **held), policy) == []  # type: ignore[arg-type]
    assert notes_on_turns(answers(1, 2), "chunked") == []
