"""The judging batches run anywhere; what they reach is measured on the device they are for."""

from __future__ import annotations

import pytest
import torch

from executor.checks.self_test import report_lines, self_test
from executor.machine.ceilings import Ceilings, measure_ceilings
from executor.measuring.judged_batches import aims, measure_aims
from executor.model.loading import load_model
from tests.executor.recorded_graph import RecordedGraph

CEILINGS = Ceilings("paper", "float32", 1e11, 1e12, 0, 0, 0.0)


def test_every_batch_is_timed_with_and_without_graphs_and_told_as_a_share_of_its_bound() -> None:
    loaded = load_model("nano", device="cpu", kernels="plain_device", attention="paged", max_tokens=512)
    rows = list(measure_aims(loaded, CEILINGS, wanted=aims(scale=32), repeats=1, new_capture=RecordedGraph))
    assert [(row["batch"], row["variant"]) for row in rows[:3]] == [
        ("decode", "plain"),
        ("decode", "graphs"),
        ("prefill", "plain"),
    ]
    assert len(rows) == 10
    for row in rows:
        assert row["share"] == pytest.approx(row["bound_s"] / row["seconds"])
    assert rows[0]["reached"] == (rows[0]["share"] >= 0.8)
    assert rows[-1]["reached"] is None


def test_the_batches_are_those_of_the_aims() -> None:
    decode, prefill, mixed, long, short = aims()
    assert (decode.shape.decodes, decode.shape.decode_context_total) == (64, 65536)
    assert prefill.shape.chunks == ((2048, 0),)
    assert (mixed.shape.prefill_tokens, mixed.shape.decodes) == (448, 64)
    assert (long.shape.decodes, long.shape.decode_context_max, long.seconds) == (32, 2000, 7.3e-3)
    assert short.longest == 1152


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_kernel_that_runs_on_this_gpu_passes(dtype: torch.dtype) -> None:
    checks = self_test(torch.device("cuda"), dtype)
    failed = [check for check in checks if check.case and not check.passed]
    assert not failed, "\n".join(report_lines(failed))
    assert {"triton", "paged", "reference"} <= {check.kernel for check in checks if check.passed}


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_aims_are_reached_on_this_gpu() -> None:
    """A statement about speed, kept out of ordinary runs by its marks: the best variant of each batch."""
    device = torch.device("cuda")
    loaded = load_model("llama-3.1-8b", device="cuda", dtype="bfloat16", max_tokens=4096)
    rows = list(measure_aims(loaded, measure_ceilings(device, torch.bfloat16)))
    for batch in {row["batch"] for row in rows if row["reached"] is not None}:
        assert any(row["reached"] for row in rows if row["batch"] == batch), [r for r in rows if r["batch"] == batch]
