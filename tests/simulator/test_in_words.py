"""The sentence below a comparison, on summaries written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.studies.in_words import advice_in_words


def summary(ttft: float, tbt: float, load: float | None = None, **changes: Any) -> dict[str, Any]:
    counts = {"requests": 10, "measured": 9, "finished": 10}
    return {"ttft_s_p99": ttft, "tbt_s_p99": tbt, "overloaded": load is not None, "load": load, **counts, **changes}


def test_who_falls_behind_is_named_and_who_has_most_room_below_the_tightest_bound() -> None:
    """Of TTFT 2 s and TBT 0.2 s, a uses 10 and 5 %, b 5 and 40 %."""
    found = advice_in_words({"a": summary(0.2, 0.01), "b": summary(0.1, 0.08), "slow": summary(90.0, 0.01, load=1.31)})
    assert found == (
        "Under this load every policy but slow keeps up; a stays furthest below TTFT P99 2,000 ms and TBT P99 200 ms "
        "of these (200 ms, 10.0 ms)."
    )


def test_a_missed_objective_is_said() -> None:
    found = advice_in_words({"a": summary(3.0, 0.01), "b": summary(5.0, 0.01)})
    assert found.startswith(
        "Under this load every policy keeps up; none meets TTFT P99 2,000 ms and TBT P99 200 ms, a misses"
    )


def test_where_all_fall_behind_the_least_loaded_is_named() -> None:
    found = advice_in_words({"a": summary(90.0, 0.1, load=1.5), "b": summary(80.0, 0.1, load=1.2)})
    assert found.startswith("Under this load no policy keeps up")
    assert "least under b (1.20 times" in found


def test_one_that_refuses_requests_is_not_advised() -> None:
    found = advice_in_words({"a": summary(0.1, 0.01, finished=5), "b": summary(1.0, 0.1)})
    assert "; b stays furthest below" in found


@pytest.mark.parametrize(
    "summaries", [{}, {"a": summary(1.0, 0.1)}, {"a": summary(1.0, 0.1), "b": summary(1.0, 0.1, measured=0)}]
)
def test_nothing_is_said_of_one_run_or_of_runs_that_measured_nothing(summaries: dict[str, Any]) -> None:
    assert advice_in_words(summaries) == ""
