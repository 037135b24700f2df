"""Engines that speculate, in virtual time: tokens that come together, acceptance processes, and what it all costs."""

from __future__ import annotations

import numpy as np
import pytest

from metrics import read_run
from metrics.run_folder.drafts import acceptance_curve, drafts_of_run
from policies import BatchShape, PolicyError, Speculation
from profiler import load_cost_model, load_hardware, load_model_spec
from profiler.speculation_cost import DraftingPrices, SpeculatingCost, eagle_head
from simulator import replay
from simulator.errors import SimulationError
from simulator.simulation import ReplayConfig
from simulator.speculation.acceptance import Curve, evenly, make_acceptance
from simulator.studies.advise import advise
from tests.simulator.constant_cost import ConstantCost, trace_of
from workloads import Trace, generate

MS = 10**6


def run(trace, cost=None, **options):
    settings = {"policy": "vllm_v1", "gpu": "h100", "cost_model": "roofline", "speculation": "ngram:4"}
    return replay(trace, ReplayConfig(**{**settings, **options}), cost=cost)


def test_tokens_that_are_accepted_come_together():
    """Prompt in 10 ms, then two drafts of four accepted in each step of 10 ms + 1 ms a row: 3 + 3 + 3 tokens."""
    cost = ConstantCost(10 * MS, per_row_ns=MS)
    found = run(trace_of([(0.0, 5, 10)]), cost, acceptance="mean=2", max_model_len=64)
    # What looking n-grams up takes on the host: 2 us, and 1 ns a token of context (5, 5, 8, 11).
    assert found.tables.column("tokens", "time_s") == pytest.approx(
        [0.015] + [0.030] * 3 + [0.045] * 3 + [0.060] * 3, abs=5e-5
    )
    times = found.tables.column_ns("tokens", "time_s")
    assert len(np.unique(times)) == 4
    summary = found.summary
    assert summary["iterations"] == 4
    assert (summary["draft_tokens"], summary["accepted_tokens"]) == (12, 6)
    assert (summary["acceptance_rate"], summary["acceptance_length"], summary["tokens_per_decode"]) == (0.5, 3, 3)
    assert summary["acceptance_by_position"] == "1.000 1.000 0.000 0.000"
    # Three gaps of 15 ms; time per output token is a third of that.
    assert summary["tbt_s_mean"] == pytest.approx(0.015, abs=1e-5)
    assert summary["tpot_s_mean"] == pytest.approx(0.005, abs=1e-5)
    assert found.tables.column("iterations", "draft_tokens").tolist() == [0, 4, 4, 4]
    assert found.tables.column("iterations", "decode_context_total").tolist() == [0, 5, 8, 11]
    assert found.tables.column("iterations", "draft_context_total").tolist() == [0, 20, 32, 44]


def test_an_answer_that_ends_in_mid_draft_has_its_own_length():
    found = run(trace_of([(0.0, 5, 9)]), ConstantCost(10 * MS), acceptance="mean=4", max_model_len=64)
    # 1 + 5 + 3 of 5.
    drafts = drafts_of_run(found.tables)
    assert drafts.delivered.tolist() == [5, 3]
    assert (drafts.accepted.tolist(), drafts.position.tolist()) == ([4, 4], [1, 6])


def test_curves_are_what_their_words_say():
    # 0.8 each: at least 1, 2, 3 with 0.8, 0.64, 0.512, and so on beyond the end.
    assert Curve.each((0.8,)).accepted(4, 0.5) == 3
    assert Curve.each((0.8,)).accepted(4, 0.409) == 4
    assert Curve.each((0.8,)).accepted(2, 0.1) == 2
    assert Curve.each((0.9, 0.5)).accepted(4, 0.3) == 2
    assert Curve.reached((0.8, 0.5, 0.3)).accepted(4, 0.29) == 3
    # Between two whole numbers one of both is drawn, so that the mean is kept.
    drawn = [Curve.mean(1.3).accepted(4, evenly(0, row, 5, 0)) for row in range(4000)]
    assert set(drawn) == {1, 2}
    assert np.mean(drawn) == pytest.approx(1.3, abs=0.03)


def test_a_process_has_classes_columns_and_seeds():
    trace = Trace(
        "t", np.zeros(3, np.int64), np.full(3, 8), np.full(3, 8), np.full(3, 8), slo=["chat", "code", None],
        acceptance=np.array([0.0, 0.5, 1.0]),
    )  # fmt: skip
    speculation = Speculation("ngram", 4)

    class Asked:
        def __init__(self, row):
            self.request = trace.request(row)

    process = make_acceptance("chat:0.9;code:curve=0.5,0.1;0.3", None, speculation, trace, 0)
    assert [process.curve_of(Asked(row)).at_least[0] for row in range(3)] == [0.9, 0.5, 0.3]
    process = make_acceptance("trace", None, speculation, trace, 0)
    assert [process.curve_of(Asked(row)).at_least[0] for row in range(3)] == [0.0, 0.5, 1.0]
    assert evenly(0, 1, 2, 0) != evenly(1, 1, 2, 0)
    for text, says in (
        ("", "expected 0.7"),
        ("1.2", "expected 0 to 1"),
        ("curve=0.5,0.6", "shares that rise"),
        ("mean=-1", "expected 0 to 64"),
        ("chat:0.5", "an entry without a class"),
        ("video:0.5;0.3", "expected the trace's"),
        ("geometric=0.5", "expected 0.7"),
        ("each=", "expected 0.7"),
        ("nan", "expected a number"),
    ):
        with pytest.raises(SimulationError, match=says):
            make_acceptance(text, None, speculation, trace, 0)


def test_the_same_step_goes_the_same_way_under_every_policy_and_a_run_can_be_played_again(tmp_path):
    trace = generate(requests=30, arrivals="poisson:20", prompt="uniform:20,200", output="uniform:5,60", seed=1)
    curves = []
    for policy in ("chunked", "vllm_v1", "prefill_priority"):
        found = run(trace, policy=policy, acceptance="0.7", drafts_found=0.6)
        drafts = drafts_of_run(found.tables)
        key = np.lexsort((drafts.position, drafts.request))
        curves.append(np.stack([drafts.request, drafts.position, drafts.verified, drafts.accepted])[:, key])
    assert np.array_equal(curves[0], curves[1])
    assert np.array_equal(curves[0], curves[2])
    assert acceptance_curve(curves[0][2], curves[0][3])[:2] == pytest.approx([0.7, 0.49], abs=0.08)
    found.write(tmp_path / "run")
    again = run(trace, policy="chunked", acceptance=f"requests={tmp_path / 'run'}", seed=5)
    drafts = drafts_of_run(again.tables)
    key = np.lexsort((drafts.position, drafts.request))
    assert np.array_equal(
        curves[0], np.stack([drafts.request, drafts.position, drafts.verified, drafts.accepted])[:, key]
    )
    # The curve alone: other steps, the same shares.
    shares = run(trace, policy="chunked", acceptance=f"curve={tmp_path / 'run'}", seed=5).summary
    assert shares["acceptance_rate"] == pytest.approx(found.summary["acceptance_rate"], abs=0.06)
    assert shares["drafted_share"] == pytest.approx(found.summary["drafted_share"], abs=0.06)
    assert read_run(tmp_path / "run").drafts()["request"].size == len(curves[0][0])
    other = generate(requests=30, arrivals="poisson:20", prompt="uniform:20,200", output="uniform:5,60", seed=2)
    with pytest.raises(SimulationError, match="prompt tokens, which is not"):
        run(other, acceptance=f"requests={tmp_path / 'run'}")


def test_nothing_accepted_delivers_as_without_and_time_tells_what_verifying_costs():
    trace = generate(requests=12, arrivals="poisson:30", prompt="uniform:20,200", output="uniform:5,40", seed=1)
    cost = ConstantCost(10 * MS)
    without = run(trace, cost, speculation=None, knobs={"async_scheduling": False}).tables
    nothing = run(trace, cost, acceptance="0").tables
    assert nothing.column("requests", "output_tokens").tolist() == without.column("requests", "output_tokens").tolist()
    assert nothing.column("iterations", "draft_tokens").sum() > 0
    assert nothing.rows("tokens") == trace.output_tokens.sum()


SHAPE = BatchShape((), 8, 8 * 1000, 1000, 0, 40, 0, 32, 32 * 1000, 4)


def test_a_batch_pays_for_its_rows_its_drafts_and_the_next_ones():
    """Rows of drafts cost linear layers; keys are read once a request; a head drafts from all rows, then k - 1 times
    from one row a request."""
    spec, gpu = load_model_spec("llama-3.1-8b"), load_hardware("h100")
    inner = load_cost_model(spec, gpu, cost_model="roofline")
    head = load_cost_model(eagle_head(spec), gpu, cost_model="roofline")
    assert eagle_head(spec).layers == 1
    prices = DraftingPrices(step_us=50.0)
    cost = SpeculatingCost.of(inner, "eagle", prices, spec, gpu, drafter=head)
    rows = BatchShape((), 8, 8000, 1000, 32, 40)
    decodes = BatchShape((), 8, 8000, 1000, 0, 8)
    first = head.stage_ns(BatchShape((), 8, 8000, 1000, 32, 8))
    expected = inner.stage_ns(rows) + first + 3 * head.stage_ns(decodes) + 4 * 50_000
    assert cost.stage_ns(SHAPE) == expected + cost.verifying_ns(SHAPE)
    # Five queries of four heads a key: products still hide behind reading the keys.
    assert cost.verifying_ns(SHAPE) == 0
    wide = SHAPE._replace(draft_tokens=512, draft_context_total=512_000, sampled=520)
    assert cost.verifying_ns(wide) > 0
    parts = cost.breakdown(SHAPE)
    assert sum(parts.values()) == sum(cost.host_ns(SHAPE)) + cost.stage_ns(SHAPE)
    assert cost.predict_ns([SHAPE, wide]).tolist() == [cost.stage_ns(SHAPE), cost.stage_ns(wide)]
    assert cost.repeat_ns(SHAPE, 3)[0] == cost.stage_ns(SHAPE)
    # N-grams are looked up on the host: 2 us a request, 1 ns a token of its context.
    ngram = SpeculatingCost.of(inner, "ngram", DraftingPrices(), spec, gpu)
    before, after = inner.host_ns(decodes)
    assert ngram.host_ns(SHAPE) == (before, after + 8 * 2000 + 8000)
    assert ngram.stage_ns(SHAPE) == inner.stage_ns(rows)


def test_an_executor_that_verifies_drafts_as_decodes_pays_for_each():
    class Executor(ConstantCost):
        drafts_are_decodes = True

    spec, gpu = load_model_spec("llama-3.1-8b"), load_hardware("h100")
    cost = SpeculatingCost.of(Executor(MS, per_context_ns=1), "ngram", DraftingPrices(), spec, gpu)
    assert cost.stage_ns(SHAPE) == MS + 5 * 8000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"acceptance": None}, "without --acceptance"),
        ({"speculation": None}, "--acceptance without --speculation"),
        ({"speculation": "draft:3"}, "expected --draft-model"),
        ({"draft_model": "llama-3.2-1b"}, "no other method has one"),
        ({"speculation": "eagle:2", "drafts_found": 0.5}, "a model always drafts"),
        ({"speculation": "draft:3", "draft_model": "qwen3-4b"}, "expected llama-3.1-8b's"),
        ({"reference": True}, "--reference with --speculation"),
        ({"speculation": "ngram:0"}, "expected 1 to 64"),
    ],
)
def test_what_does_not_go_together_is_one_line(options, says):
    with pytest.raises((SimulationError, PolicyError), match=says):
        run(trace_of([(0.0, 5, 9)]), **{"acceptance": "0.5", **options})


def test_advice_says_whether_to_switch_it_on():
    trace = generate(requests=20, arrivals="poisson:4", prompt="uniform:50,200", output="uniform:30,80", seed=1)
    settings = {"gpu": "h100", "cost_model": "roofline", "speculation": "eagle:4"}
    on = advise(trace, ReplayConfig(**settings, acceptance="0.8"))
    assert any(reason.startswith("speculation eagle:4: switch it on") for reason in on.reasons)
    assert on.config.speculation == "eagle:4"
    off = advise(trace, ReplayConfig(**settings, acceptance="0"))
    assert any(reason.startswith("speculation eagle:4: leave it off") for reason in off.reasons)
    assert off.config.speculation is None
    assert off.config.acceptance is None


def test_a_number_is_a_chance_as_well():
    trace = trace_of([(0.0, 5, 9)])
    assert run(trace, acceptance=0.5).summary["draft_tokens"] == run(trace, acceptance="0.5").summary["draft_tokens"]
