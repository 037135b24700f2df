"""`vllm_v1` against step logs of a real vLLM engine, step by step."""

from __future__ import annotations

import json

import pytest

from experiments.errors import ExperimentError
from experiments.vllm.parity import compare_with_vllm
from profiler.measurements.bounded_parquet import log_rows
from profiler.measurements.facts import STEP_LOGS
from tests.shared_data import ORIGINALS

LOGS = [
    ("fp32_t2q_512", 199, 0, {"num_blocks": 512, "block_size": 128}),
    ("nano_rate2_512", 3761, 0, {"num_blocks": 4096, "block_size": 128}),
    ("preempt_b512_k250", 487, 6, {"num_blocks": 250, "block_size": 32}),
    ("preempt_cache_b512_k250", 509, 7, {"num_blocks": 250, "block_size": 32, "prefix_caching": True}),
    ("preempt_cache_b512_k250", 509, 7, {"num_blocks": 250, "block_size": 32, "prefix_caching": True, "by_id": True}),
    ("spec_b512", 117, 0, {"num_blocks": 4096, "block_size": 32, "speculation": "ngram:4", "max_model_len": 2048}),
    (
        "spec_preempt_b512_k90",
        228,
        5,
        {"num_blocks": 90, "block_size": 32, "speculation": "ngram:4", "max_model_len": 2048},
    ),
]


@pytest.mark.parametrize(("name", "steps", "preemptions", "engine"), LOGS)
def test_every_step_is_planned_as_vllm_planned_it(name, steps, preemptions, engine):
    result = compare_with_vllm(
        STEP_LOGS / f"steps_{name}.parquet",
        STEP_LOGS / f"reqs_{name}.parquet",
        token_budget=512,
        max_num_seqs=64,
        **engine,
    )
    assert result.divergence is None
    assert (result.steps, result.matched, result.preemptions) == (steps, steps, preemptions)
    assert result.free_blocks_checked == steps


@pytest.mark.parametrize("by_id", [False, True])
def test_the_older_free_list_order_misses_one_step_of_the_newer_engine(by_id):
    """0.19 put every freed block at the tail; the log of 0.32 tells the two apart at step 272."""
    result = compare_with_vllm(
        STEP_LOGS / "steps_preempt_cache_b512_k250.parquet",
        STEP_LOGS / "reqs_preempt_cache_b512_k250.parquet",
        token_budget=512,
        max_num_seqs=64,
        num_blocks=250,
        block_size=32,
        prefix_caching=True,
        free_order="0.19",
        by_id=by_id,
    )
    assert result.divergence is not None
    assert result.divergence["step"] == 272


def test_lines_of_an_original_log_are_rows_of_the_carried_one():
    for name in ("steps_fp32_t2q_512", "reqs_fp32_t2q_512"):
        lines = [row for _, row in log_rows(ORIGINALS / f"vllm_cpu_steps/{name}.jsonl")]
        rows = [row for _, row in log_rows(STEP_LOGS / f"{name}.parquet")][: len(lines)]
        for line in lines:
            line["reqs"] = [[int(request), *rest] for request, *rest in line.get("reqs", [])]
        assert [{key: line[key] for key in row} for row, line in zip(rows, lines, strict=True)] == rows


def test_a_divergence_shows_both_sides(tmp_path):
    steps, requests = tmp_path / "steps.jsonl", tmp_path / "reqs.jsonl"
    requests.write_text('{"id": 0, "prompt": 6, "output": 2, "added": 0.0}\n')
    rows = [[["0", 4, 0]], [["0", 2, 4]], [["0", 1, 7]]]
    steps.write_text("".join(json.dumps({"t": t, "reqs": reqs}) + "\n" for t, reqs in enumerate(rows)))
    result = compare_with_vllm(steps, requests, token_budget=4, num_blocks=8, block_size=4, max_num_seqs=2)
    assert (result.steps, result.matched) == (3, 2)
    assert result.divergence == {
        "step": 2,
        "ours": {"reqs": [("0", 1, 6)]},
        "vllm": {"reqs": [("0", 1, 7)]},
    }


def test_requests_may_have_names_of_any_kind(tmp_path):
    steps, requests = tmp_path / "steps.jsonl", tmp_path / "reqs.jsonl"
    requests.write_text(
        '{"id": "chatcmpl-b", "prompt": 3, "output": 1, "added": 0.5}\n'
        '{"id": 99, "prompt": 2, "output": 2, "added": 0.0}\n'
    )
    rows = [(0.0, [["99", 2, 0]]), (1.0, [["99", 1, 2], ["chatcmpl-b", 3, 0]])]
    steps.write_text("".join(json.dumps({"t": t, "reqs": reqs}) + "\n" for t, reqs in rows))
    result = compare_with_vllm(steps, requests, token_budget=8, num_blocks=8, block_size=4, max_num_seqs=2)
    assert result.exact, result.divergence


@pytest.mark.parametrize(
    ("steps", "requests", "message"),
    [
        ({}, {"id": 1.5}, "reqs.jsonl, line 1: id: found 1.5"),
        ({}, {"prompt": 0}, "prompt: found 0, expected a whole number above 0"),
        ({}, {"output": "4"}, "output: found '?4"),
        ({}, {"added": None}, "added: found"),
        ({"t": "1"}, {}, "steps.jsonl, line 1: t: found"),
        ({"t": 1e300}, {}, "t: found 1e"),
        ({"reqs": [["0", 4]]}, {}, "reqs: found"),
    ],
)
def test_a_log_with_a_wrong_value_is_named_with_its_line(tmp_path, steps, requests, message):
    files = tmp_path / "steps.jsonl", tmp_path / "reqs.jsonl"
    good = {"t": 0.0, "reqs": []}, {"id": 0, "prompt": 6, "output": 2}
    for file, row, wrong in zip(files, good, (steps, requests), strict=True):
        file.write_text(json.dumps({**row, **wrong}) + "\n")
    with pytest.raises(ExperimentError, match=message):
        compare_with_vllm(*files, token_budget=4, num_blocks=8, block_size=4, max_num_seqs=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found no rows"),
        ("{\n", "line 1: cannot be read as JSON"),
        ('{"t": 1}\n', "line 1: found no reqs"),
        ("3\n", "line 1"),
    ],
)
def test_a_broken_log_is_named_with_its_line(tmp_path, text, message):
    steps, requests = tmp_path / "steps.jsonl", tmp_path / "reqs.jsonl"
    steps.write_text(text)
    requests.write_text('{"id": 0, "prompt": 6, "output": 2}\n')
    with pytest.raises(ExperimentError, match=message):
        compare_with_vllm(steps, requests, token_budget=4, num_blocks=8, block_size=4, max_num_seqs=2)


SPECULATING_REQUESTS = """{"id": 0, "prompt": 3, "output": 4, "before_step": 0}
{"id": 1, "prompt": 2, "output": 9, "before_step": 1}
"""


def test_a_speculating_log_is_fed_with_what_was_accepted_and_proposed(tmp_path):
    """The second request would pass the longest sequence, 8; its answer ends there after six tokens."""
    steps, requests = tmp_path / "steps.jsonl", tmp_path / "reqs.jsonl"
    requests.write_text(SPECULATING_REQUESTS)
    rows = [
        ([[0, 3, 0, 0, 0, 1]], [[0, 2]]),
        ([[0, 3, 3, 2, 1, 2], [1, 2, 0, 0, 0, 1]], [[0, 2], [1, 2]]),
        # Two tokens of the answer's four are there: the drafts are not clipped, the tokens are.
        ([[0, 2, 5, 1, 1, 1], [1, 3, 2, 2, 2, 3]], [[1, 2]]),
        ([[1, 2, 5, 1, 1, 2]], []),
    ]
    log = [{"t": t, "reqs": reqs, "proposed": held, "preempted": []} for t, (reqs, held) in enumerate(rows)]
    steps.write_text("".join(json.dumps(step) + "\n" for step in log))
    engine = {"token_budget": 8, "num_blocks": 8, "block_size": 4, "max_num_seqs": 2, "max_model_len": 8}
    result = compare_with_vllm(steps, requests, speculation="ngram:2", **engine)
    assert result.divergence is None
    assert result.matched == 4
    log[2]["reqs"][1][5] = 2
    steps.write_text("".join(json.dumps(step) + "\n" for step in log))
    result = compare_with_vllm(steps, requests, speculation="ngram:2", **engine)
    assert result.divergence["step"] == 2
    assert result.divergence["ours"]["appended"] == {"0": 1, "1": 3}


def test_a_log_with_drafts_wants_to_know_how_they_were_made(tmp_path):
    steps, requests = tmp_path / "steps.jsonl", tmp_path / "reqs.jsonl"
    requests.write_text(SPECULATING_REQUESTS)
    engine = {"token_budget": 8, "num_blocks": 8, "block_size": 4, "max_num_seqs": 2}
    for reqs, speculation, expected in (
        ([[0, 3, 0, 0, 0, 1]], "", "expected --speculation"),
        ([[0, 3, 0]], "ngram:4", "have no drafts"),
        ([[0, 3, 0, 0, 0, 1]], "ngram", "expected a method"),
        ([[0, 3, 0, 0]], "ngram:4", "alike in all steps"),
        ([[0, 3, 0, 0, -1, 1]], "ngram:4", "whole numbers"),
    ):
        steps.write_text(json.dumps({"t": 0, "reqs": reqs}) + "\n")
        with pytest.raises(ExperimentError, match=expected):
            compare_with_vllm(steps, requests, speculation=speculation, **engine)
    steps.write_text(json.dumps({"t": 0, "reqs": [[0, 3, 0, 0, 0, 1]], "proposed": [[7, 1]]}) + "\n")
    with pytest.raises(ExperimentError, match="proposed: found 7"):
        compare_with_vllm(steps, requests, speculation="ngram:4", **engine)
