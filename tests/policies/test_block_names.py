"""What full blocks are called where only a trace says what they hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from policies.kv_memory.block_names import TraceNames
from policies.work.request import Request


def turn(**facts: Any) -> Any:
    return SimpleNamespace(request=Request(4, 0, max_output_tokens=21, hash_tokens=4, session="a", **facts))


def test_a_turn_goes_on_with_an_answer_of_the_turn_whose_hashes_end_where_its_own_were_missed() -> None:
    names, later = TraceNames(), turn(prompt_tokens=16, prefix_hashes=(7, 8, 9, 10))
    earlier = turn(prompt_tokens=8, prefix_hashes=(7, 8))
    # Its third block was missed by its own name: it may be the earlier turn's answer.
    assert names.name(later, 2, 4) != names.name(earlier, 2, 4)
    assert names.history(later, 2, 4, first_missed=2) == names.name(earlier, 2, 4)


def test_a_preempted_turn_that_finds_its_own_answer_looks_no_further_than_its_hashes() -> None:
    names, track = TraceNames(), turn(prompt_tokens=4, prefix_hashes=(0,))
    # Blocks 1 to 3 of its answer were found, the fifth block was not: there is no hash that far.
    assert names.history(track, 4, 4, first_missed=4) == names.name(track, 4, 4)
