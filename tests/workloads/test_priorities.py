"""A trace's priorities: used, or their loss is told."""

from dataclasses import replace

import numpy as np
import pytest

from workloads import generate
from workloads.priorities import notes_on_priorities


@pytest.mark.parametrize(
    ("policy", "knobs", "said"),
    [
        ("vllm_v1", {}, "--scheduling priority follows"),
        ("vllm_v1", {"scheduling": "priority"}, ""),
        ("slo_aware", {}, ""),
        ("chunked", {}, "chunked does not look at priorities"),
        ("my_policy.py:Mine", {}, ""),
    ],
)
def test_policies_that_do_not_follow_priorities_are_named(policy: str, knobs: dict[str, str], said: str) -> None:
    trace = generate(requests=4)
    told = notes_on_priorities(replace(trace, priority=np.array([0, 5, 0, 0])), policy, knobs)
    assert [said in note for note in told] == ([True] if said else [])
    assert notes_on_priorities(replace(trace, priority=np.array([2, 2, 2, 2])), "chunked", {}) == []
    asked = notes_on_priorities(trace, policy, {"scheduling": "priority"})
    assert "one priority" in asked[0]
