"""The pipeline study in small: the trace is the paper's, and what the paper claims points the same way."""

from __future__ import annotations

import pytest

from experiments.errors import ExperimentError
from experiments.papers.sarathi_pipeline import PAPER, deployments, pipeline_trace, run_deployment, sarathi_pipeline


def test_lengths_and_ratio_are_the_papers():
    trace = pipeline_trace(2000)
    total = trace.prompt_tokens + trace.output_tokens
    assert (total.min() >= 1024, total.max() <= 4096) == (True, True)
    # Zipf with theta 0.4 over k = 1..3073: mean of k is about 0.6 / 1.6 of the range.
    assert total.mean() == pytest.approx(1024 + 3072 * 0.6 / 1.6, rel=0.02)
    assert (trace.prompt_tokens.sum() / trace.output_tokens.sum()) == pytest.approx(10, rel=0.01)


def test_chunks_even_out_a_pipeline_and_beat_replicas():
    """All of the paper's orderings hold; by how much is for the full study to say."""
    result = sarathi_pipeline(500)
    assert all(row["finished"] == 500 for row in result["outcomes"])
    assert [row["what"] for row in result["ratios"]] == list(PAPER)
    assert all(row["ours"] > 1.1 for row in result["ratios"])


def test_equal_lengths_keep_whole_prompts_in_step():
    """Requests that all begin and end together leave nothing for chunks to mend; spread lengths do."""
    orca = deployments()[1]
    shares = [
        run_deployment(orca, pipeline_trace(400, lengths=lengths, pd=20)).bubble_share
        for lengths in ("fixed:2048", "zipf:0.4,1024,4096")
    ]
    assert shares[0] < 0.1 < 0.4 < shares[1]


def test_a_trace_needs_requests():
    with pytest.raises(ExperimentError, match="found 0 requests"):
        pipeline_trace(0)
