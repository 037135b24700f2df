"""KV memory under pressure in virtual time: transfers by hand, what a session finds again, and nobody lost in a burst."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.edges.errors import PolicyError
from policies.registry import policy_names
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.replica.host_link import HostLink
from simulator.replica.replica_kind import make_engine
from simulator.simulation import replay
from tests.simulator.constant_cost import ConstantCost, trace_of

S = 1_000_000_000
MIB = 2**20


def run(trace, cost=None, **options):
    config = ReplayConfig(policy=options.pop("policy", "vllm_v1"), **options)
    return replay(trace, config, cost=cost or ConstantCost(device_ns=S))


def test_a_link_serves_each_direction_in_turn_and_both_at_once():
    link = HostLink(1e9, latency_ns=10)
    assert link.move(0, 1000, 0) == 1010
    assert link.move(500, 0, 2000) == 2510, "the other direction is free"
    assert link.move(500, 1000, 0) == 2020, "this one is not: 510 ns of waiting"
    assert link.move(0, 90, 80) == 2120 + 480, "out first, then in, behind what comes in already"
    assert (link.busy_ns, link.waited_ns) == (1010 + 2010 + 1010 + 100 + 90, 510 + 2020 + 390)


# 2 requests of 64 + 64 tokens want 8 blocks of 16 each and find 12: at 97 tokens each, one has to go.
TIGHT = {"num_blocks": 12, "model": "llama-3.1-8b", "swap_bandwidth": 128 * 1024 * 16.0, "swap_gib": 1.0}


def test_a_batch_waits_for_what_it_swaps():
    """At one block (2 MiB of keys and values) a second, six blocks out hold the next batch up by 6 s, and so do they
    when they come back; everything else takes a second a step."""
    trace = trace_of([(0, 64, 64), (0, 64, 64)])
    swapped = run(trace, preemption="swap", **TIGHT)
    recomputed = run(trace, preemption="recompute", **{**TIGHT, "swap_bandwidth": None})
    assert (swapped.summary["preemptions_by_swap"], recomputed.summary["preemptions_by_recompute"]) == (1, 1)
    assert swapped.summary["swap_out_bytes"] == swapped.summary["swap_in_bytes"] == 6 * 2 * MIB
    assert swapped.summary["iterations"] == recomputed.summary["iterations"]
    assert swapped.summary["duration_s"] == pytest.approx(recomputed.summary["duration_s"] + 12, abs=1e-3)
    assert swapped.summary["swap_link_busy_s"] == pytest.approx(12, abs=1e-3)


def test_auto_recomputes_where_the_link_is_slow_and_swaps_where_it_is_fast():
    trace = trace_of([(0, 64, 64), (0, 64, 64)])
    for bandwidth, kind in ((1e3, "recompute"), (1e12, "swap")):
        summary = run(trace, preemption="auto", **{**TIGHT, "swap_bandwidth": bandwidth}).summary
        assert summary[f"preemptions_by_{kind}"] == 1


def test_leaps_cross_swapping_runs_unchanged():
    trace = trace_of([(row / 3, 40 + row % 7, 30 + row % 11) for row in range(40)])
    runs = [
        run(trace, preemption="swap", num_blocks=40, leaps=leaps, swap_bandwidth=1e8, policy="chunked")
        for leaps in (True, False)
    ]
    assert runs[0].summary["preemptions_by_swap"] > 0
    for name in ("requests", "iterations", "tokens", "segments"):
        tables = [run.tables.table(name).to_pydict() for run in runs]
        assert all(repr(tables[0][column]) == repr(tables[1][column]) for column in tables[0]), name


def conversation(hashes=True):
    """Three turns; each prompt is everything said before and 32 new tokens. Answers have 20 tokens."""
    trace = trace_of([(0, 32, 20), (100, 84, 20), (200, 136, 20)])
    names = [tuple(range(tokens // 16)) for tokens in (32, 84, 136)]
    return replace(trace, session=["a"] * 3, prefix_hashes=names if hashes else None, hash_tokens=16 if hashes else 0)


def test_a_later_turn_finds_prompt_and_answer_of_the_earlier_one():
    """Turn 1 leaves 51 tokens of keys and values (its last token has none): 3 blocks, one of them answer alone.
    Turn 2 leaves 103: 6 blocks. Without the answers turn 3 would find 5."""
    found = run(conversation(), prefix_caching=True, num_blocks=100, policy="chunked")
    cached = found.tables.column("requests", "cached_tokens").tolist()
    assert cached == [0, 48, 96]
    assert (found.summary["cached_tokens"], found.summary["prefix_hit_requests"]) == (144, 2)
    assert found.summary["cached_share"] == 144 / (32 + 84 + 136)
    by_session = conversation(hashes=False)
    assert run(by_session, prefix_caching=True, num_blocks=100, policy="chunked").summary["cached_tokens"] == 144
    unknown = run(replace(by_session, history="none"), prefix_caching=True, num_blocks=100, policy="chunked")
    assert unknown.summary["cached_tokens"] == 0


def test_what_a_preempted_request_finds_of_its_own_is_no_hit():
    """Its blocks may still be there when it comes back; nobody was saved a prompt token."""
    result = run(trace_of([(0, 64, 64)] * 2), prefix_caching=True, num_blocks=12, watermark=0.0)
    assert result.summary["preemptions"] > 0
    assert sum(result.tables.column("iterations", "cached_tokens")) > 0
    assert (result.summary["cached_tokens"], result.summary["prefix_hit_requests"]) == (0, 0)


BURST = [(0.001 * row, 100_000, 40) for row in range(50)] + [(5 + row, 200, 100) for row in range(30)]


@pytest.mark.parametrize(
    "ladder", ["none", "preempt", "preempt,plain", "preempt,offload", "preempt,oversubscribe", "all"]
)
def test_a_burst_of_very_long_prompts_loses_nobody(ladder):
    trace = trace_of(BURST)
    cost = ConstantCost(device_ns=5_000_000, per_row_ns=20_000)
    result = run(trace, cost, policy="chunked", ladder=ladder, num_blocks=30_000, max_wait_s=60.0)
    summary = result.summary
    assert summary["requests"] == summary["finished"] + summary["rejected"] == 80
    assert np.min(result.tables.column("iterations", "free_blocks")) >= 0
    reasons = {reason for reason in result.tables.column("requests", "reason") if reason}
    assert all(reason.startswith("overloaded: first token expected after") for reason in reasons)
    assert bool(reasons) == ("reject" in ladder or ladder == "all") == (summary["rejected_overloaded"] > 0)
    if ladder == "none":
        assert summary["preemptions"] == 0


def test_plain_batches_never_mix():
    trace = trace_of(BURST)
    cost = ConstantCost(device_ns=5_000_000, per_row_ns=20_000)
    result = run(trace, cost, policy="chunked", ladder="preempt,plain", num_blocks=30_000, trouble_from=0.01)
    assert result.summary["plain_plans"] > 0
    chunks, decodes = (result.tables.column("iterations", name) for name in ("num_chunks", "decodes"))
    waiting = result.tables.column("iterations", "waiting")
    assert not np.any((chunks > 0) & (decodes > 0) & (waiting > 0))


@pytest.mark.parametrize("policy", ["request_level", "prefill_priority", "orca"])
def test_a_prompt_begun_by_plain_batches_is_ended_by_them(policy):
    """Policies that know whole prompts only would leave the half of it lying there for ever."""
    trace = trace_of([(0, 58, 6), (0, 72, 4)])
    result = run(
        trace,
        ConstantCost(device_ns=S, stages=2),
        policy=policy,
        pp=2,
        ladder="preempt,plain",
        num_blocks=40,
        block_size=4,
        trouble_from=0.3,
        plain_tokens=10,
        max_num_seqs=2,
        token_budget=80,
    )
    assert result.summary["finished"] == 2
    assert result.summary["plain_plans"] > 0


def test_whoever_is_held_back_is_counted_once_however_often_the_policy_asks():
    """Nine wait behind one another for memory that longest answers could need; a leap asks less often than plans do."""
    trace = trace_of([(0, 16, 100)] * 10)
    held = [
        run(trace, num_blocks=8, watermark=0.0, ladder="none", leaps=leaps).summary["held_back"]
        for leaps in (True, False)
    ]
    assert held == [9, 9]


def test_oversubscription_admits_on_the_expected_length():
    """Limits of 400 tokens, answers of 40: counted on in full they keep most requests out."""
    trace = trace_of([(row / 10, 16, 40) for row in range(60)])
    trace = replace(trace, max_output_tokens=np.full(60, 400))
    careful, bold = (
        run(trace, ConstantCost(device_ns=S // 10), policy="orca", num_blocks=200, ladder=ladder).summary
        for ladder in ("preempt", "preempt,oversubscribe")
    )
    assert bold["running_max"] > 2 * careful["running_max"]
    assert bold["e2e_s_mean"] < careful["e2e_s_mean"]
    assert bold["beyond_longest"] > 0
    assert bold["finished"] == careful["finished"] == 60


@pytest.mark.parametrize("pp", [1, 2])
def test_a_batch_that_outgrows_what_was_counted_on_gives_way(pp):
    """Four answers of 4 tokens of 64 allowed, then four of 64: reserved as if they were short, the first batch would
    stand still without a block."""
    trace = replace(trace_of([(0, 16, 4)] * 4 + [(100, 16, 64)] * 4), max_output_tokens=np.full(8, 64))
    summary = run(
        trace,
        ConstantCost(device_ns=S, stages=pp),
        policy="request_level",
        num_blocks=8,
        block_size=16,
        pp=pp,
        ladder="preempt,oversubscribe",
        watermark=0.0,
    ).summary
    assert summary["finished"] == 8
    assert summary["preemptions"] > 0


def test_mistakes_are_named():
    trace = trace_of([(0, 10, 10)])
    for options, message in (
        ({"preemption": "drop"}, "--preemption: found 'drop', expected one of recompute, swap, auto"),
        ({"swap_gib": 0.0}, "--swap-gib: found 0, expected above 0"),
        ({"preemption": "swap", "ladder": "preempt"}, "expected the rung offload"),
        ({"swap_bandwidth": -1.0}, "--swap-bandwidth: found -1"),
    ):
        with pytest.raises(SimulationError, match=message):
            run(trace, **options)
    for options, message in (
        ({"ladder": "preempt,jump"}, "found rung 'jump'"),
        ({"ladder": "offload"}, "offload without preempt"),
        ({"ladder": "all", "risk": 2.0}, "risk: found 2"),
        ({"preemption": "swap", "swap_gib": 0.001}, "expected at least one page"),
    ):
        with pytest.raises(PolicyError, match=message):
            run(trace, **options)


def shared_prompts():
    """Four requests of one 1024-token prefix (two hashes) and 512 tokens of their own, long after each other."""
    trace = trace_of([(100 * row, 1536, 2) for row in range(4)])
    return replace(trace, prefix_hashes=[(1, 2, 10 + row) for row in range(4)], hash_tokens=512)


def test_a_shared_store_serves_prefixes_computed_elsewhere():
    """Round robin over two replicas: each prefix was computed next door. 1024 tokens are 128 MiB, 0.1 s at this NIC."""
    options = {"policy": "chunked", "num_blocks": 1000, "replicas": 2, "router": "round_robin", "kv_latency_s": 0.0}
    cost = ConstantCost(device_ns=S // 100, per_row_ns=1_000_000)
    alone = run(shared_prompts(), cost, **options).summary
    store = run(shared_prompts(), cost, kv_store_gib=4.0, kv_bandwidth=1280 * MIB, **options).summary
    assert store["store_hit_tokens"] == 3 * 1024
    assert store["store_fetch_s_mean"] == pytest.approx((0.1 + 0.1 + 128 * MIB / 64e9) / 3, rel=0.3)
    # 1536 tokens in chunks of 512: 1.536 s and three iterations; with the prefix 0.512 s, one of them, and the fetch.
    assert alone["ttft_s_max"] == pytest.approx(1.566, abs=1e-3)
    assert store["ttft_s_p50"] == pytest.approx(0.522 + 0.1, abs=0.02)
    assert store["store_bytes_in"] == (2 + 4) * 64 * MIB


def test_a_store_that_is_slower_than_computing_is_left_alone():
    cost = ConstantCost(device_ns=S // 100, per_row_ns=10_000)
    options = {"policy": "chunked", "num_blocks": 1000, "replicas": 2, "router": "round_robin"}
    summary = run(shared_prompts(), cost, kv_store_gib=4.0, kv_bandwidth=1e9, **options).summary
    assert summary["store_hit_tokens"] == 1024, "the third request's, which its own host has"


def test_a_full_store_forgets_the_ends_of_old_prefixes_first():
    cost = ConstantCost(device_ns=S // 100, per_row_ns=1_000_000)
    options = {"policy": "chunked", "num_blocks": 1000, "replicas": 2, "router": "round_robin"}
    # Room for two entries of 64 MiB a host: the shared beginning.
    summary = run(shared_prompts(), cost, kv_store_gib=0.125, kv_bandwidth=1e11, **options).summary
    assert summary["finished"] == 4
    assert 0 < summary["store_hit_tokens"] <= 3 * 1024


def test_clients_that_give_up_during_a_fetch_and_hosts_that_die_lose_nobody():
    trace = trace_of([(row * 0.4, 1536, 20) for row in range(30)]).with_timeout(2.5)
    trace = replace(trace, prefix_hashes=[(1, 2, 10 + row) for row in range(30)], hash_tokens=512)
    cost = ConstantCost(device_ns=S // 100, per_row_ns=1_000_000)
    summary = run(
        trace,
        cost,
        policy="chunked",
        num_blocks=1000,
        replicas=2,
        router="round_robin",
        kv_store_gib=4.0,
        kv_bandwidth=2e8,
        failures=("1@5+3",),
    ).summary
    assert summary["finished"] + summary["aborted"] + summary["failed"] == 30
    assert summary["aborted"] > 0


STORE = {
    "policy": "chunked", "num_blocks": 1000, "replicas": 2, "router": "round_robin", "kv_latency_s": 0.0,
    "kv_store_gib": 4.0, "kv_bandwidth": 1280 * MIB,
}  # fmt: skip


def two_prompts(second_s: float):
    """1,536 tokens each, the first 1,024 alike: 128 MiB, 0.1 s on the wire; computed they take 1.024 s."""
    trace = trace_of([(0, 1536, 5), (second_s, 1536, 5)])
    return replace(trace, prefix_hashes=[(1, 2, 10), (1, 2, 11)], hash_tokens=512)


@pytest.mark.parametrize("back", ["", "+0.02"])
def test_what_is_on_its_way_from_a_host_that_dies_does_not_arrive(back):
    cost = ConstantCost(device_ns=S // 100, per_row_ns=1_000_000)
    well = run(two_prompts(5), cost, **STORE)
    ended = run(two_prompts(5), cost, **STORE, failures=(f"0@5.05{back}",))
    assert well.summary["store_hit_tokens"] == 1024
    assert well.tables.column("requests", "first_token_s")[1] == pytest.approx(5 + 0.1 + 0.522, abs=1e-3)
    assert ended.summary["store_hit_tokens"] == 0
    assert ended.tables.column("requests", "first_token_s")[1] == pytest.approx(5.05 + 1.566, abs=1e-3)


def test_what_is_on_its_way_to_a_host_that_dies_starts_over_at_that_moment():
    cost = ConstantCost(device_ns=S // 100, per_row_ns=1_000_000)
    ended = run(two_prompts(5), cost, **STORE, failures=("1@5.05",))
    # Replica 0 has the prefix on its own device.
    assert ended.tables.column("requests", "replica").tolist() == [0, 0]
    assert ended.tables.column("requests", "first_token_s")[1] < 5.05 + 1.6


def test_a_copy_that_was_under_way_when_its_host_died_is_never_served():
    cost = ConstantCost(device_ns=S // 100, per_row_ns=1_000_000)
    end_s = float(run(two_prompts(9), cost, **STORE).tables.column("requests", "finished_s")[0])
    dies = f"0@{end_s + 0.001:.6f}+1"  # 192 MiB take 3 ms over the link to the host
    ended = run(two_prompts(9), cost, **STORE, failures=(dies,)).summary
    assert ended["store_hit_tokens"] == 0
    assert ended["store_bytes_in"] == 3 * 64 * MIB  # the second request's own copy


def test_packed_keys_and_values_make_room_for_more_requests():
    """Requests of 4128 tokens, 4000 of them old: 125 groups of 32 in 4736 instead of 16384 bytes a head and layer."""
    trace = trace_of([(0, 4000, 128)])
    plain, packed = (
        run(trace, kv_compression=kind, block_size=32, policy="chunked").config["num_blocks"]
        for kind in (None, "kivi4")
    )
    assert packed == int(plain * 4128 * 16384 / (4000 * 4736 + 128 * 16384))


def test_packing_takes_the_time_that_its_prices_say_and_leaps_cross_it():
    """One request of 2,000 tokens in one chunk, then 300 decodes: 1,856 + 303 tokens packed, at the window's edge."""
    from profiler import load_hardware, load_model_spec
    from profiler.compression_cost import bound_prices, values_per_token
    from profiler.specs.kv_compression import Compression

    trace = trace_of([(0, 2000, 301)])
    options = {
        "policy": "vllm_v1",
        "token_budget": 4096,
        "num_blocks": 500,
        "kv_compression": "kivi4",
        "block_size": 32,
    }
    times = {
        cost: run(trace, kv_compression_cost=cost, **options).summary["duration_s"] for cost in ("none", "bound", "cpu")
    }
    prices = bound_prices(
        Compression("kivi", 4, 32, 128), load_model_spec("llama-3.1-8b"), load_hardware("h100"), "bfloat16"
    )
    read = sum(context - 128 - 16 for context in range(2000, 2300))
    values = values_per_token(load_model_spec("llama-3.1-8b"))
    expected = (1856 + 300) * values * prices.pack_ns + read * values * prices.decode_read_ns
    assert (times["bound"] - times["none"]) * 1e9 == pytest.approx(expected, rel=1e-3)
    assert times["cpu"] > times["bound"]
    runs = [run(trace, leaps=leaps, **options) for leaps in (True, False)]
    assert runs[0].summary == runs[1].summary
    assert not runs[0].config["calibrated"]


def test_packed_keys_and_values_are_stored_and_sent_packed():
    options = {"policy": "chunked", "num_blocks": 1000, "replicas": 2, "router": "round_robin", "block_size": 32}
    cost = ConstantCost(device_ns=S // 100, per_row_ns=1_000_000)
    full, packed = (
        run(shared_prompts(), cost, kv_store_gib=4.0, kv_compression=kind, **options).summary["store_bytes_in"]
        for kind in (None, "kivi4")
    )
    assert packed == full * 4736 // 16384


def test_a_prompt_that_never_fits_takes_no_room_from_those_that_do():
    """A token of Llama-3.1-8B takes 2 x (2 x 4096 + 3 x 14336) = 102,400 bytes of activations and 131,072 of KV: what an
    RTX 4090 has left is divided by both, and a prompt of 100,000 tokens is rejected by the pool that this gives."""

    def pool(policy, longest):
        return (
            make_engine(ReplayConfig(gpu="rtx4090", policy=policy), trace_of([(0, longest - 10, 10)])).num_blocks * 16
        )

    short, whole = pool("orca", 2048), pool("orca", 100_000)
    left = short * 131_072 + 2048 * 102_400
    assert whole == pytest.approx(left / (131_072 + 102_400), abs=17)
    found = replay(trace_of([(0, 100_000, 20), (S, 500, 20)]), ReplayConfig(gpu="rtx4090", policy="orca"))
    assert (found.summary["rejected"], found.summary["finished"]) == (1, 1)


@pytest.mark.parametrize("policy", policy_names())
def test_prompts_beyond_every_table_finish_or_are_rejected_by_name(policy):
    trace = trace_of([(0, 500, 20), (1, 1_000_000, 20), (2, 100_000, 20), (3, 500, 20)])
    for gpu, finished in (("rtx4090", 2), ("h100", 3)):
        found = replay(trace, ReplayConfig(gpu=gpu, policy=policy))
        assert (found.summary["finished"], found.summary["rejected"]) == (finished, 4 - finished)
        assert "--max-model-len" in found.tables.requests["reason"][1].as_py()


def test_the_pool_leaves_room_for_the_largest_batch():
    """A token of Llama-3.1-8B takes 2 x (2 x 4096 + 3 x 14336) bytes of activations, a block of 16 tokens 2 MiB: 20,480
    more tokens a batch are 1,000 blocks fewer. Whole prompts without a budget count with the longest request."""

    def blocks(longest=1000, **options):
        return make_engine(ReplayConfig(gpu="h100", **options), trace_of([(0, longest - 10, 10)])).num_blocks

    assert (
        blocks(policy="vllm_v1")
        == blocks(policy="chunked", knobs={"chunk_size": 64})
        == blocks(policy="slo_aware", longest=22528)
    )
    for wide in ({"policy": "vllm_v1", "token_budget": 22528}, {"policy": "prefill_priority", "longest": 22528}):
        assert blocks(policy="vllm_v1") - blocks(**wide) == pytest.approx(1000, abs=1)
    assert blocks(policy="orca") - blocks(policy="orca", longest=22528) == pytest.approx(1000, abs=1)
    assert (
        blocks(policy="vllm_v1", max_num_seqs=8)
        == blocks(policy="vllm_v1")
        > blocks(policy="vllm_v1", max_num_seqs=4096)
    )
