"""Generated workloads show the distributions that they were asked for, and come out the same every time."""

from pathlib import Path

import numpy as np
import pytest

from workloads import generate, read_trace, write_trace
from workloads.example import example_trace

EXAMPLE = Path(__file__).parents[2] / "examples/trace.csv"


def test_the_example_is_what_the_generator_makes(tmp_path: Path) -> None:
    again = write_trace(example_trace(), tmp_path / "trace.csv")
    assert again.read_bytes() == EXAMPLE.read_bytes()


def test_the_example_has_the_shape_of_the_azure_conversation_trace() -> None:
    trace = read_trace(EXAMPLE)
    span_s = trace.arrival_ns[-1] / 1e9
    assert 595 < span_s < 600
    assert len(trace) / span_s == pytest.approx(5.5, rel=0.03)
    assert np.percentile(trace.prompt_tokens, [50, 90, 99]) == pytest.approx([1020, 2734, 4142], rel=0.01)
    assert np.percentile(trace.output_tokens, [50, 90, 99]) == pytest.approx([129, 424, 601], rel=0.01)


def test_same_seed_same_trace_and_lengths_do_not_depend_on_the_rate() -> None:
    slow, again, fast = (
        generate(requests=500, arrivals=f"poisson:{rate}", prompt="uniform:1,4000", seed=5) for rate in (1, 1, 2)
    )
    assert slow.same_requests(again)
    assert slow.prompt_tokens.tolist() == fast.prompt_tokens.tolist()
    assert np.abs(slow.arrival_ns - 2 * fast.arrival_ns).max() <= 2000
