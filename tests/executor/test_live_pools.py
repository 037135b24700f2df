"""Prompts in one process, answers in another: the answers of one engine, and every block given back."""

from __future__ import annotations

import numpy as np
import pytest

from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.live_pools import PoolsRun, replay_pools
from executor.live_pools.wire import Moved, Region, copy_times
from executor.model.loading import load_model
from executor.serving.replay import replay_live
from experiments.errors import ExperimentError
from experiments.validation.comparing.hand_overs import compare_hand_overs, fit_link
from workloads.trace import Trace

LENGTHS = [(37, 7), (5, 11), (64, 3), (1, 9), (90, 2), (20, 6), (33, 1), (400, 5)]
CONFIG = LiveConfig(
    model="nano", device="cpu", threads=1, num_blocks=40, as_fast_as_possible=True, policy="prefill_priority", seed=5,
    max_model_len=200,
)  # fmt: skip


def small() -> Trace:
    prompt, output = (np.array([each[at] for each in LENGTHS]) for at in (0, 1))
    return Trace("small", np.zeros(len(LENGTHS)), prompt, output, output)


def test_two_processes_answer_as_one_engine_and_a_full_decode_pool_holds_prompts_back() -> None:
    """Seven blocks of 16 tokens: the request of 90 + 2 tokens takes six of them, so others wait for room."""
    run = replay_pools(small(), CONFIG, decode={"policy": "chunked", "num_blocks": 7})
    alone = replay_live(small(), CONFIG)
    assert run.ended == {**dict.fromkeys(range(7), "finished"), 7: "rejected"}
    assert {row: run.answers[row] for row in range(7)} == {row: alone.answers[row] for row in range(7)}
    # A prompt whose answer is one token stays where it is.
    assert sorted(move.row for move in run.moved) == [0, 1, 2, 3, 4, 5]
    # 4 layers x keys and values x 2 heads x 32 values of 4 bytes: 2 KiB a token, whole blocks of 16 travel.
    assert {move.row: move.size for move in run.moved} == {
        row: -(-LENGTHS[row][0] // 16) * 16 * 2048 for row in range(6)
    }
    for move in run.moved:
        assert 0 < move.asked_ns <= move.begun_ns < move.ended_ns
        assert 0 < move.copied_ns <= move.ended_ns - move.begun_ns
        assert run.ttft_s[move.row] <= move.asked_ns / 1e9 < move.ended_ns / 1e9 < run.e2e_s[move.row]
    assert max(move.waited_s for move in run.moved) > min(move.waited_s for move in run.moved)
    found = compare_hand_overs(run)
    assert (found.moves, found.moved_bytes) == (6, sum(move.size for move in run.moved))
    assert found.predicted_s > 0
    assert found.engines_s >= 0


def test_a_link_is_fitted_to_copies_before_the_run_and_judges_those_in_it() -> None:
    """50 us and 2 GB/s; the run's copies took twice what the link says."""
    copies = [(size, 5e-5 + size / 2e9) for size in (10_000, 200_000, 1_000_000) for _ in range(3)]
    link = fit_link([*copies, (200_000, 9.0)])
    assert link.latency_s == pytest.approx(5e-5)
    assert link.bytes_per_s == pytest.approx(2e9)
    moved = [Moved(row, 10, 100_000, 0, 1_000_000, 2_000_000, 200_000) for row in range(3)]
    run = PoolsRun({}, {}, {}, {}, moved, copies)
    found = compare_hand_overs(run)
    assert found.predicted_s == pytest.approx(1e-4)
    assert found.error == pytest.approx(-0.5)
    assert (found.room_s, found.engines_s) == (pytest.approx(1e-3), pytest.approx(8e-4))
    with pytest.raises(ExperimentError, match="copies of 1 sizes"):
        fit_link(copies[:3])
    with pytest.raises(ExperimentError, match="no request was handed over"):
        compare_hand_overs(PoolsRun({}, {}, {}, {}, [], copies))


def test_blocks_arrive_as_they_were_sent() -> None:
    loaded = load_model("nano", device="cpu", max_tokens=64)
    here, there = loaded.new_cache(9, 16), loaded.new_cache(9, 16)
    here.pool.normal_()
    region = Region.for_pool(here, 4)
    region.put(here, [7, 2, 5])
    region.take(there, [1, 8, 3])
    assert bool((there.pool[:, :, [1, 8, 3]] == here.pool[:, :, [7, 2, 5]]).all())
    assert bool((there.pool[:, :, [2, 4, 5, 6, 7]] == 0).all())
    assert region.block_bytes == 16 * 2048
    copies = copy_times(region, there, repeats=2)
    assert {size for size, _ in copies} == {blocks * region.block_bytes for blocks in (1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("options", "words"),
    [({"tp": 2}, "--tp with live pools"), ({"num_blocks": None}, "found no --num-blocks"),
     ({"temperature": 0.5}, "--temperature with live pools"), ({"device": "cuda"}, "NCCL or NIXL on GPUs")],
)  # fmt: skip
def test_what_cannot_be_handed_over_is_refused(options: dict[str, object], words: str) -> None:
    from dataclasses import replace

    with pytest.raises(ExecutorError, match=words):
        replay_pools(small(), replace(CONFIG, **options))  # type: ignore[arg-type]


def test_times_count_from_arrivals_as_they_were_stretched() -> None:
    """Arrival at 2 s, three times as slow: a first token at 7 s has taken one."""
    from dataclasses import replace
    from types import SimpleNamespace

    from executor.live_pools.engines import Ended
    from executor.live_pools.replay import _result

    late = Trace("late", np.array([2_000_000_000]), np.array([9]), np.array([3]), np.array([3]))
    engine = SimpleNamespace(
        ended={0: Ended(0, "finished", "", [1, 2, 3], 9_000_000_000, None)}, first_token_ns={0: 7_000_000_000}
    )
    for config, ttft_s in ((replace(CONFIG, as_fast_as_possible=False, time_scale=3.0), 1.0), (CONFIG, 7.0)):
        run = _result(late, engine, [], config, config)  # type: ignore[arg-type]
        assert (run.ttft_s, run.e2e_s) == ({0: ttft_s}, {0: ttft_s + 2.0})


def test_the_simulated_pools_have_the_link_of_the_live_ones() -> None:
    """Alone on the link, 90 tokens of 2 KiB take 1 ms and 92,160 ns at 2 GB/s."""
    from experiments.validation.comparing.hand_overs import HandOvers, Link
    from experiments.validation.pools import lines_of, measured, simulated

    one = Trace("one", np.zeros(1), np.array([90]), np.array([4]), np.array([4]))
    found = HandOvers(1, 184_320, Link(1e-3, 2e9), 1e-3, 1e-3, 0.0, 0.0, 0.0)
    facts = simulated(one, CONFIG, "chunked", 40, found, "h100")
    assert facts["finished"] == 1
    assert facts["after_prompt_s_mean"] == pytest.approx(1e-3 + 90 * 2048 / 2e9, rel=0.01)
    assert facts["e2e_s_p50"] > facts["ttft_s_p50"] + 1e-3
    moved = [Moved(0, 90, 184_320, 5_000_000, 6_000_000, 8_000_000, 200_000)]
    live = measured(PoolsRun({0: [1]}, {0: "finished"}, {0: 0.004}, {0: 0.02}, moved, []))
    assert live["after_prompt_s_mean"] == pytest.approx(3e-3)
    lines = lines_of(found, {"live": live, "simulated": facts})
    assert lines[-2].startswith("live: 1 finished, TTFT 4.0 ms, E2E 20.0 ms")
    assert lines[-1].startswith("simulated: 1 finished")
