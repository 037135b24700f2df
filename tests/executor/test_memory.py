"""Real copies: swapped, recomputed and prefix-hit requests give the same tokens as requests that ran undisturbed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.kv_memory.host_copies import HostCache
from executor.serving.replay import replay_live
from policies.kv_memory.swap import Move
from tests.executor.test_mixed_batches import check, model, serve, small_trace
from workloads.trace import Trace

LENGTHS = [(37, 17), (5, 21), (64, 13), (21, 19), (40, 12)]
# 8 tokens x 2 layers x (keys and values) x 16 floats of 8 bytes are 4 KiB a block: pages of 2 blocks.
PAGE_MIB = 8 / 1024


@pytest.mark.parametrize("policy", ["chunked", "vllm_v1", "prefill_priority"])
@pytest.mark.parametrize("how", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_requests_answer_as_if_they_had_run_alone(policy: str, how: str, ahead: bool) -> None:
    loaded = model("float64", "torch", "reference")
    trace = small_trace(LENGTHS)
    run = serve(
        loaded,
        trace,
        policy=policy,
        block_size=8,
        num_blocks=14,
        watermark=0.0,
        ahead=ahead,
        preemption=how,
        swap_gib=0.001,
        swap_page_mib=PAGE_MIB,
    )
    check(loaded, trace, run, exact=True)
    memory = run.config["memory"]
    assert memory["preemptions_by_swap"] + memory["preemptions_by_recompute"] > 0
    assert (memory["preemptions_by_swap"] > 0) or how != "swap"
    if how == "swap":
        assert memory["swap_out_bytes"] == run.summary["swap_out_bytes"] > 0
        assert memory["swap_in_bytes"] > 0


def test_a_host_memory_that_is_too_small_loses_pages_and_no_answer() -> None:
    loaded = model("float64", "torch", "reference")
    trace = small_trace(LENGTHS)
    run = serve(
        loaded,
        trace,
        policy="vllm_v1",
        block_size=8,
        num_blocks=12,
        watermark=0.0,
        preemption="swap",
        swap_gib=4 * PAGE_MIB / 1024,
        swap_page_mib=PAGE_MIB,
    )
    check(loaded, trace, run, exact=True)
    assert run.config["memory"]["swap_pages_peak"] <= 4


@pytest.mark.parametrize("ladder", ["none", "preempt,plain", "preempt,offload", "preempt,oversubscribe", "all"])
def test_the_ladder_changes_no_answer(ladder: str) -> None:
    loaded = model("float64", "torch", "reference")
    trace = small_trace(LENGTHS)
    run = serve(
        loaded,
        trace,
        policy="chunked",
        knobs={"chunk_size": 32},
        block_size=8,
        num_blocks=14,
        watermark=0.0,
        ladder=ladder,
        swap_gib=0.001,
        swap_page_mib=PAGE_MIB,
        trouble_from=0.5,
        plain_tokens=32,
    )
    check(loaded, trace, run, exact=True)


def test_an_overloaded_engine_says_when_to_retry() -> None:
    loaded = model("float64", "torch", "reference")
    run = serve(loaded, small_trace(LENGTHS), policy="chunked", ladder="reject", max_wait_s=1e-6)
    assert set(run.tables.column("requests", "status")) == {"rejected"}
    assert all("overloaded" in reason and "retry after" in reason for reason in run.tables.column("requests", "reason"))


def test_a_later_turn_reuses_what_was_really_said_and_answers_alike() -> None:
    loaded = model("float64", "torch", "reference")
    trace = conversation()
    config = LiveConfig(policy="chunked", block_size=8, as_fast_as_possible=True)
    plain = replay_live(trace, config, loaded=loaded)
    shared = replay_live(trace, replace(config, prefix_caching=True), loaded=loaded)
    assert shared.answers == plain.answers
    # Turn 1 leaves 24 + 8 - 1 tokens of keys and values, three full blocks; turn 2 48 + 8 - 1, six.
    assert shared.tables.column("requests", "cached_tokens").tolist() == [0, 24, 48]
    assert plain.summary["cached_tokens"] == 0
    assert shared.summary["prefix_hit_requests"] == 2


@pytest.mark.parametrize("known_by", ["prefix_hashes", "session", "prompt_ids"])
def test_both_worlds_find_the_same_blocks_whatever_the_trace_knows_them_by(known_by: str) -> None:
    from simulator import replay

    trace = conversation()
    if known_by == "session":
        trace = replace(trace, prefix_hashes=None, hash_tokens=0)
    elif known_by == "prompt_ids":
        ids = [[7] * 16 + [row] * (tokens - 16) for row, tokens in enumerate(trace.prompt_tokens.tolist())]
        trace = replace(trace, prefix_hashes=None, hash_tokens=0, session=None, prompt_ids=ids)
    live = replay_live(
        trace,
        loaded=model("float64", "torch", "reference"),
        policy="chunked",
        block_size=8,
        prefix_caching=True,
        as_fast_as_possible=True,
    )
    simulated = replay(trace, policy="chunked", block_size=8, prefix_caching=True, cost_model="roofline")
    expected = [0, 16, 16] if known_by == "prompt_ids" else [0, 24, 48]
    assert live.tables.column("requests", "cached_tokens").tolist() == expected
    assert simulated.tables.column("requests", "cached_tokens").tolist() == expected


def conversation() -> Trace:
    prompt, output = np.array([24, 48, 72]), np.array([8, 8, 8])
    hashes = [tuple(range(tokens // 8)) for tokens in prompt.tolist()]
    return Trace(
        "talk",
        np.zeros(3),
        prompt,
        output,
        output,
        prefix_hashes=hashes,
        hash_tokens=8,
        session=["a"] * 3,
        after_row=np.array([-1, 0, 1]),
        think_ns=np.zeros(3),
    )


def test_copies_are_exact_and_go_where_they_are_told() -> None:
    cache = model("float32", "torch", "reference").new_cache(12, 8)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.pool.clone()
    host = HostCache(cache, 6)
    host.copy_out([Move(0, 2, [3, 7], [4, 5]), Move(1, 1, [1], [0])])
    cache.poison([1, 3, 7])
    host.copy_in([Move(1, 1, [7], [0]), Move(0, 2, [1, 3], [4, 5])])
    assert torch.equal(cache.pool[:, :, [1, 3, 7]], before[:, :, [3, 7, 1]])
    rest = [block for block in range(13) if block not in (1, 3, 7) and block < cache.pool.shape[2]]
    assert torch.equal(cache.pool[:, :, rest], before[:, :, rest])


def test_mistakes_are_named() -> None:
    with pytest.raises(ExecutorError, match="--preemption: found 'drop'"):
        LiveConfig(preemption="drop")
    with pytest.raises(ExecutorError, match="--swap-gib: found 0"):
        LiveConfig(swap_gib=0.0)


@pytest.mark.parametrize("ladder", ["none", "preempt,offload", "all"])
def test_a_burst_of_fifty_long_prompts_loses_nobody(ladder: str) -> None:
    """A thousandth of 50 prompts of 100,000 tokens among chats, in a pool of two and a half of them."""
    loaded = model("float32", "torch", "reference")
    trace = small_trace([(100, 4)] * 50 + [(9, 6)] * 20)
    run = serve(
        loaded,
        trace,
        policy="vllm_v1",
        block_size=8,
        num_blocks=34,
        watermark=0.0,
        ladder=ladder,
        swap_gib=0.001,
        swap_page_mib=PAGE_MIB,
        trouble_from=0.5,
        max_wait_s=30.0,
    )
    summary = run.summary
    assert summary["requests"] == summary["finished"] + summary["rejected"] == 70
    assert summary["rejected"] == 0 or ladder == "all"
    assert int(run.tables.column("iterations", "free_blocks").min()) >= 0
    if ladder == "none":
        assert summary["preemptions"] == 0


def test_a_live_run_says_what_of_its_trace_it_does_not_use(tmp_path) -> None:
    import json

    from tests.hardening.command_line import run

    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,priority,colour\n0,9,2,1,red\n0,9,2,0,blue\n")
    done = run("executor", "replay", path, "--model", "tiny", "--prefix-caching", "--json")
    assert done.code == 0, done.err
    notes = json.loads(done.out)["notes"]
    for start in ("Not used: column 'colour'.", "column priority is not used", "prefix caching: nothing in the trace"):
        assert any(note.startswith(start) for note in notes)
        assert f"note: {start}" in done.err
