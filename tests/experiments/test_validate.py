"""The whole loop on a small model: every stage, batches that agree, nobody lost. No timing is asserted."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.errors import ExperimentError
from experiments.running.report_document import Heading, Table, Text, as_html, as_markdown
from experiments.validation.comparing.batch_agreement import agreement, scheduler_of
from experiments.validation.comparing.fed_with_measured_times import Fed, at_moments
from experiments.validation.comparing.live_side import EngineChoice, PolicyChoice
from experiments.validation.comparing.machine_drift import Probe, speed_around
from experiments.validation.comparing.settings import Settings, claim_folder
from experiments.validation.comparing.statistics import (
    OUTSIDE,
    WITHIN_AIM,
    WITHIN_SPREAD,
    Comparison,
    Iterations,
    compare,
    pooled_error,
    rank,
)
from experiments.validation.existing_runs import validate_against
from experiments.validation.pages.interactive_report import write_explorable
from experiments.validation.pages.report import aims_in_short, gauge_in_short, write_report
from experiments.validation.stages import Validation
from policies import Policy
from policies.edges.distinct_names import folder_name
from workloads import Trace, write_trace

NANO = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 192, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 8192,
    "max_position_embeddings": 32768, "torch_dtype": "float32", "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
POLICIES = ("chunked:chunk_size=64", "vllm_v1", "prefill_priority")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_trace(path: Path, count: int = 14) -> Path:
    rng = np.random.default_rng(7)
    prompts, outputs = rng.integers(8, 300, count), rng.integers(1, 40, count)
    prompts[3] = 5000  # longer than the model reaches: rejected in both worlds
    arrivals = np.cumsum(rng.exponential(0.05, count) * 1e9).astype(np.int64)
    return write_trace(Trace("small", arrivals, prompts, outputs, outputs), path / "small.csv")


@pytest.mark.slow
def test_the_whole_loop_agrees_batch_by_batch_and_loses_nobody(tmp_path: Path) -> None:
    settings = Settings(
        trace=str(small_trace(tmp_path)),
        policies=POLICIES,
        rows=(0, 14),
        repeats=1,
        budget_s=5.0,
        ensemble=2,
        engine=EngineChoice(model="nano", device="cpu", threads=1, max_num_seqs=6, token_budget=256),
    )
    # A folder called like a model of the table, which it is not: its shape is simulated, not its name looked up.
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(NANO))
    settings = replace(settings, engine=replace(settings.engine, model=str(folder)))
    out = tmp_path / "out"
    said: list[str] = []
    result = Validation(settings, out, say=said.append).run()
    at = settings.loads[0], POLICIES[0]
    assert result.simulated[at].config["model"] == str(out / "model" / "llama-3.1-8b.toml")
    assert result.simulated[at].config["model_flops"] == result.live[at][0].config["model_flops"]
    live = out / "load-0.6" / "live" / f"{folder_name(POLICIES[0])}-1"
    against = validate_against(
        [live], cost_model=str(out / "model.json"), gpu=None, model=None, options={}, say=said.append
    )
    assert all(isinstance(fed, Fed) and fed.exact for fed in against.fed.values())
    assert len(result.agreements) == len(POLICIES)
    for name, found in result.agreements.items():
        assert found.exact, (name, found.divergence)
        assert found.share == 1.0
        assert found.requests == found.requests_matched == 14
        fed = result.fed[name]
        assert isinstance(fed, Fed), fed
        assert fed.exact, (name, fed.divergence)
    assert result.lost == 0
    # One prompt is longer than the model, and one is longer than the budget for a policy that takes prompts whole.
    assert result.ends == {"finished": 14 * len(POLICIES) - 4, "rejected": 4}
    assert result.iterations.measured_s.size == sum(found.iterations for found in result.agreements.values())
    written = write_report(result, out)
    page = written[1].read_text()
    assert 'src="http' not in page  # one file, no outside requests
    assert "data:image/png;base64" in page
    assert json.loads((out / "report.json").read_text())["lost"] == 0
    assert len(result.probes) == len(POLICIES) + 1  # before each live run and after the last
    explored = write_explorable(tmp_path / "explore.html", result).read_text()
    assert all(f"{policy} predicted" in explored and f"{policy} live" in explored for _, policy in result.simulated)
    # Started again, nothing is measured or run a second time.
    live = sorted(path.stat().st_mtime_ns for path in out.rglob("requests.parquet"))
    again: list[str] = []
    Validation(settings, out, say=again.append).run()
    assert again == []
    assert sorted(path.stat().st_mtime_ns for path in out.rglob("requests.parquet")) == live
    with pytest.raises(ExperimentError, match="another loads"):
        Validation(replace(settings, loads=(0.9,)), out)


def test_a_folder_knows_its_inputs_by_their_content(tmp_path: Path) -> None:
    trace = small_trace(tmp_path)
    policy = tmp_path / "my.py"
    policy.write_text("import dataclasses\nfrom policies.chunked import Chunked\n\n\n@dataclasses.dataclass(frozen=True)\n"
                      "class Mine(Chunked):\n    pass\n")  # fmt: skip
    settings = Settings(trace=str(trace), policies=(f"{policy}:Mine:chunk_size=64", "orca"), rows=(0, 14))
    claim_folder(tmp_path / "out", settings, None)
    claim_folder(tmp_path / "out", replace(settings, repeats=9), None)
    for file, more in ((trace, "9,9,9\n"), (policy, "# edited\n")):
        before = file.read_text()
        file.write_text(before + more)
        with pytest.raises(ExperimentError, match=rf"other inputs: \S*{file.name} \(sha256 .* --anyway"):
            claim_folder(tmp_path / "out", settings, None)
        claim_folder(tmp_path / "out", settings, None, anyway=True)
        file.write_text(before)
    claim_folder(tmp_path / "out", settings, None)


def test_a_live_run_is_rescaled_by_the_probes_on_its_two_sides() -> None:
    probes = [
        Probe(when, float(at), speed, speed, 1.0)
        for at, (when, speed) in enumerate(
            [("before a", 9.0), ("before a", 1.0), ("before b", 2.0), ("after the last run", 4.0)]
        )
    ]  # the first belongs to a run that was interrupted
    assert speed_around(probes, "a") == 1.5
    assert speed_around(probes, "b") == 3.0
    assert speed_around(probes, "of an older folder") == 3.0  # the median of all
    assert speed_around([], "a") == 1.0


def test_a_live_run_with_preemptions_and_a_prefix_cache_is_planned_again_exactly() -> None:
    from executor.config import LiveConfig
    from executor.serving.replay import load_for, replay_live

    rng = np.random.default_rng(3)
    count = 10
    prompts, outputs = rng.integers(40, 90, count), rng.integers(20, 60, count)
    trace = Trace(
        "shared prefixes",
        np.zeros(count, np.int64),
        prompts,
        outputs,
        outputs,
        hash_tokens=16,
        prefix_hashes=[tuple(range(prompt // 16)) if row % 2 else () for row, prompt in enumerate(prompts)],
    )
    loaded = load_for(LiveConfig(model="nano"), 160)
    for knobs, blocks in (({}, 22), ({"prefix_caching": True}, 24), ({"async_scheduling": True}, 26)):
        run = replay_live(
            trace, LiveConfig(model="nano", policy="vllm_v1", knobs=knobs, num_blocks=blocks), loaded=loaded
        )
        assert run.summary["preemptions"] > 0
        found = agreement(run.tables, trace, scheduler_of(run.tables))
        assert found.exact, found.divergence
        assert found.requests_matched == count


def test_a_scheduler_that_plans_otherwise_is_told_by_its_first_batch() -> None:
    from executor.config import LiveConfig
    from executor.serving.replay import replay_live

    trace = Trace("two", np.array([0, 0]), np.array([100, 30]), np.array([5, 5]), np.array([5, 5]))
    run = replay_live(trace, LiveConfig(model="nano", policy="chunked", knobs={"chunk_size": 64}))
    run.tables.config["knobs"] = {**run.tables.config["knobs"], "chunk_size": 32}
    found = agreement(run.tables, trace, scheduler_of(run.tables))
    assert not found.exact
    assert found.matched == 0
    assert found.divergence is not None
    assert found.divergence["iteration"] == 0
    assert found.divergence["live"]["chunks"] == [(0, 64, 0, False)]
    assert found.divergence["simulated"]["chunks"] == [(0, 32, 0, False)]


def test_a_policy_fed_live_durations_is_told_the_live_moment() -> None:
    @dataclass(frozen=True)
    class Clockwork(Policy):
        tick: int = 3

        def plan(self, queues: Any, draft: Any, kv: Any, host: Any, now_ns: int) -> None:
            draft.append((self.tick, now_ns))

    told: list[tuple[int, int]] = []
    moved = at_moments(Clockwork(tick=5), lambda now_ns: {100: 107}.get(now_ns, now_ns))
    for now_ns in (100, 200):
        moved.plan(None, told, None, None, now_ns)  # type: ignore[arg-type]
    assert told == [(5, 107), (5, 200)]
    assert isinstance(moved, Clockwork)


def row(policy: str, simulated: float, live: tuple[float, float, float], aim: float | None = 0.03) -> Comparison:
    low, middle, high = live
    return Comparison(
        policy, 0.6, "tpot_s_mean", simulated, simulated, simulated, middle, low, high, simulated, 0.0, 3, aim
    )


def test_a_verdict_is_the_aim_or_the_spread_whichever_is_larger() -> None:
    assert row("a", 1.02, (1.0, 1.0, 1.0)).verdict == WITHIN_AIM
    assert row("a", 1.08, (0.95, 1.0, 1.05)).verdict == WITHIN_SPREAD
    assert row("a", 1.12, (0.95, 1.0, 1.05)).verdict == OUTSIDE
    assert row("a", 1.5, (1.0, 1.0, 1.0), aim=None).verdict == ""


def test_errors_are_pooled_over_runs_and_live_values_counted_in_the_interval() -> None:
    rows = [
        replace(row("a", 1.0, (0.5, 1.0, 2.0)), low=0.6, high=2.0, live_values=(0.5, 1.0, 2.0)),
        replace(row("b", 2.0, (2.0, 2.0, 2.0)), live_values=(2.0,)),
    ]
    assert [each.inside for each in rows] == [2, 1]
    # logarithms of predicted over live: log 2, 0, -log 2, 0; their standard deviation is log 2 x sqrt(2 / 3)
    assert pooled_error(rows, "tpot_s_mean") == pytest.approx((0.0, math.log(2) * math.sqrt(2 / 3) / 2, 4))
    assert pooled_error(rows[1:], "tpot_s_mean") is None


def test_only_policies_whose_repeats_do_not_overlap_are_ranked() -> None:
    rows = [row("a", 1.0, (0.9, 1.0, 1.1)), row("b", 2.0, (1.05, 1.2, 1.3)), row("c", 1.5, (2.0, 2.1, 2.2))]
    (found,) = rank(rows, ["tpot_s_mean"])
    assert (found.pairs, found.decided, found.agreed) == (3, 2, 1)
    assert found.wrong == (("b", "c"),)
    assert found.live_order == ("a", "b", "c")
    assert found.simulated_order == ("a", "c", "b")
    assert rank([replace(one, repeats=1) for one in rows], ["tpot_s_mean"])[0].decided == 0


def test_ttft_is_aimed_at_only_up_to_sixty_per_cent_load() -> None:
    summary = {"ttft_s_mean": 1.0, "tpot_s_mean": 1.0}
    for load, aim in ((0.6, 0.05), (0.9, None)):
        rows = {r.statistic: r for r in compare("a", load, summary, [], [], [summary, summary])}
        assert rows["ttft_s_mean"].aim == aim
        assert rows["tpot_s_mean"].aim == 0.03


@pytest.mark.parametrize(
    ("text", "message"),
    [("chunked:chunk_size", "expected knob=value"), ("nobody", "nobody"), ("chunked:chunk_size=0", "at least")],
)
def test_a_policy_that_is_none_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyChoice.parse(text)


def test_a_document_says_the_same_in_both_forms(tmp_path: Path) -> None:
    blocks = [Heading("Title <1>", 1), Text("a `b` & c"), Table(("x", "y"), [("one|two", "3")], {"3": "bad"})]
    assert as_markdown(blocks) == "# Title <1>\n\na `b` & c\n\n| x | y |\n| --- | ---: |\n| one\\|two | 3 |\n"
    page = as_html(blocks, tmp_path)
    assert "<h1>Title &lt;1&gt;</h1>" in page
    assert "<p>a <code>b</code> &amp; c</p>" in page
    assert "<td class=bad>3</td>" in page


def test_a_report_says_how_many_live_runs_had_a_gauge() -> None:
    gauged = {"a": (1.2, 1.1), "b": (1.0, 1.0)}
    assert "during the live runs" in gauge_in_short(gauged, 2)[0]
    assert "during 2 of 5 live runs" in gauge_in_short(gauged, 5)[0]


def test_a_spread_that_holds_any_prediction_is_no_success() -> None:
    calm = [row("a", 1.05, (0.95, 1.0, 1.05))] * 3
    wild = [row("a", 1.05, (0.4, 1.0, 1.6))] * 3
    counted = "Aims: 0 of 3 statistics within the aim, {} more within the live repeats' own spread, 0 outside."
    assert aims_in_short(calm) == counted.format(3)
    assert aims_in_short(wild).startswith(counted.format(0) + " 3 cannot be told: the repeats differ by 120% in the")
    assert "told" not in aims_in_short([row("a", 1.01, (0.4, 1.0, 1.6))])  # within the aim itself
    assert aims_in_short([]).startswith("Aims: 0 of 0")


def test_expected_experts_are_held_against_counted_ones_where_both_are_known() -> None:
    some = np.array([1.0, 2.0, 4.0, 1.0])
    counted, expected = np.array([8.0, 10.0, math.nan, 6.0]), np.array([9.0, 10.0, 12.0, 5.0])
    tokens, none = np.array([100, 0, 0, 0]), np.zeros(4, np.int64)
    found = Iterations(some, some, some, tokens, none, some > 0, expected, counted)
    everything = found.groups()[-1]
    assert everything["experts_counted"] == pytest.approx(8.0)
    assert everything["experts_expected"] == pytest.approx(8.0)
    assert everything["experts_median_error"] == pytest.approx(1 / 8)
    dense = replace(found, counted_experts=np.full(4, math.nan))
    assert "experts_counted" not in dense.groups()[-1]
    assert Iterations.joined([found, found]).groups()[-1]["iterations"] == 8
