"""Whatever a trace says equal beginnings with, the cache of a simulated run finds them."""

import json
from pathlib import Path

import numpy as np
import pytest

from simulator import replay
from workloads import Trace, read_trace
from workloads.generating.shared_prefixes import what_prompts_share, with_prefix_hashes

NS = 1_000_000_000
PREFIX, OWN = list(range(16)), [list(range(100 + 4 * row, 104 + 4 * row)) for row in range(20)]
"""Twenty prompts of 320 tokens in blocks of 16: sixteen blocks in common, four of their own. 19 of 20 find the 16."""


def cached_share(trace: Trace, **options: object) -> float:
    return float(replay(trace, prefix_caching=True, cost_model="roofline", **options).summary["cached_share"])  # type: ignore[arg-type]


@pytest.fixture
def vidur(tmp_path: Path) -> Path:
    rows = ["arrived_at,num_prefill_tokens,num_decode_tokens,block_hash_ids,block_size,session_id"]
    rows += [f'{2 * row},320,20,"{PREFIX + own}",16,{row}' for row, own in enumerate(OWN)]
    (file := tmp_path / "vidur.csv").write_text("\n".join(rows))
    return file


@pytest.fixture
def hashed(tmp_path: Path) -> Path:
    (file := tmp_path / "hashed.jsonl").write_text(
        "".join(
            json.dumps({"arrival_s": 2 * row, "prompt_tokens": 320, "output_tokens": 20, "hash_ids": PREFIX + own})
            + "\n"
            for row, own in enumerate(OWN)
        )
    )
    return file


def test_hash_ids_and_vidurs_block_hash_ids_hit_alike(vidur: Path, hashed: Path) -> None:
    expected = 19 * 16 * 16 / (20 * 320)
    assert expected == 0.76
    assert cached_share(read_trace(vidur)) == cached_share(read_trace(hashed)) == expected


def with_ids(tmp_path: Path, name: str) -> Path:
    """Six prompts of 80 ids: 64 in common, so that five find four blocks: 5 * 64 / 480 = 66.7 %."""
    rows = [
        {"arrival_s": row, "prompt_tokens": 80, "output_tokens": 4, name: [*range(5, 69), *[100 + row] * 16]}
        for row in range(6)
    ]
    (file := tmp_path / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("name", ["prompt_ids", "input_tok_ids"])
def test_prompt_token_ids_hit_where_they_agree_whatever_the_block_size(tmp_path: Path, name: str) -> None:
    trace = read_trace(with_ids(tmp_path, name))
    assert cached_share(trace) == pytest.approx(2 / 3)
    assert cached_share(trace, block_size=32) == pytest.approx(2 / 3)
    assert cached_share(trace, block_size=48) == pytest.approx(5 * 48 / 480)


def talk(history: str = "in_prompt") -> Trace:
    """Two sessions. a: 100 + 20, then 180 (it holds the 120), then 50 (it does not), then 90 (it holds the 50 + 10)."""
    prompts, outputs = np.array([100, 30, 180, 50, 90]), np.array([20, 5, 10, 10, 10])
    return Trace(
        "talk", np.arange(5) * 100 * NS, prompts, outputs, outputs, session=["a", "b", "a", "a", "a"], history=history
    )


def test_turns_longer_than_what_came_before_find_it_and_others_find_nothing() -> None:
    names = with_prefix_hashes(talk(), 16).prefix_hashes
    assert names is not None
    assert names[2][:6] == names[0]
    assert not set(names[3]) & set(names[2])
    assert names[4][:3] == names[3]
    run = replay(talk(), prefix_caching=True, cost_model="roofline")
    # Turn 2 finds the whole blocks of 100 + 20 - 1 stored tokens, turn 4 those of 50 + 10 - 1.
    assert run.tables.frame("requests")["cached_tokens"].tolist() == [0, 0, 112, 0, 48]
    assert "2 of 3 later turns are taken to hold their session so far" in run.notes[0]
    assert cached_share(talk("none")) == 0
    assert what_prompts_share(talk("none")) == ""
