"""Random clusters that mix whatever can be mixed, each drawn from its number alone."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from policies import BatchShape
from tests.simulator.constant_cost import ConstantCost
from workloads import Trace

S = 1_000_000_000
KNOBS: dict[str, tuple[dict[str, Any], ...]] = {
    "request_level": (
        {},
        {"max_batch_size": 2},
        {"max_batch_size": 3, "keep_finished": False, "max_delay_s": 0.2},
        {"reserve": "longest", "early_return": True},
    ),
    "orca": ({}, {"max_batch_size": 3, "max_prompts": 1}, {"reserve": "longest"}),
    "prefill_priority": ({}, {"max_prompts": 1}),
    "decode_maximal": ({"chunk_size": 16, "align": "none"}, {"chunk_size": 32, "align": "shrink"}, {}),
    "dynamic_chunk": (
        {},
        {"rule": "tbt_slo", "tbt_target_s": 0.05, "largest": 64},
        {"rule": "prefix_aware", "first": 64, "merge": True},
    ),
    "chunked": ({}, {"chunk_size": 24}, {"chunk_size": 130}),
    "vllm_v1": (
        {},
        {"reserve_full": False},
        {"async_scheduling": True},
        {"long_prefill_token_threshold": 9},
        {"free_order": "0.19"},
        {"prefix_caching": True},
        {"prefix_caching": True, "async_scheduling": True, "reserve_full": False},
    ),
    "shortest_prompt_first": ({}, {"ageing": 0.0, "chunk_size": 16, "window": 2}),
    "most_in_time": ({}, {"chunk_size": 32, "ttft_s": 0.2, "tbt_s": 0.03, "lost": 0.1}),
    "slo_aware": (
        {},
        {"relegate": False, "chunk_size": 32, "ttft_s": 0.2, "tbt_s": 0.03},
        {"classes": "chat:ttft=0.1,tbt=0.05;batch:ttft=9"},
    ),
}
ROUTERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("random", {}),
    ("round_robin", {}),
    ("least_outstanding_requests", {}),
    ("least_outstanding_tokens", {"decode_weight": 2.5}),
    ("power_of_two", {"by": "tokens", "choices": 3}),
    ("least_kv", {}),
    ("session_affinity", {"spill": 1}),
    ("prefix_affinity", {"uneven_requests": 2, "remembered": 9}),
)
RUNGS = ("preempt", "plain", "offload", "oversubscribe", "reject")


@dataclass
class SlowCost(ConstantCost):
    """Prices in round numbers, so that moments meet, and on demand what chunks leave to the iterations after them."""

    per_pair_ns: int = 0
    leaves_ns: int = 0

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> int:
        pairs = sum([tokens * (tokens + prefix) for tokens, prefix in shape.chunks])
        return super().stage_ns(shape, stage) + self.per_pair_ns * pairs

    def least_ns(self) -> int:
        return self.before_ns + self.device_ns + self.after_ns


class LastingCost(SlowCost):
    def aftermath(self, shape: BatchShape) -> list[int]:
        return [self.leaves_ns // 3, self.leaves_ns] if shape.prefill_tokens > 8 else []


@dataclass(frozen=True)
class Case:
    trace: Trace
    options: dict[str, Any]
    cost: ConstantCost | None


def case(number: int) -> Case:
    rng = Random(f"crowded {number}")

    def maybe(share: float) -> bool:
        return rng.random() < share

    block_size = rng.choice([1, 4, 16])
    trace = _trace(rng, maybe)
    longest = trace.longest
    room = longest // block_size + 2
    policy = rng.choice(list(KNOBS))
    options: dict[str, Any] = {
        "policy": policy,
        "knobs": rng.choice(KNOBS[policy]),
        "block_size": block_size,
        "seed": rng.randrange(9),
        "num_blocks": rng.choice([room, room + room // 3, 2 * room, 6 * room, max(2, room // 2)]),
        "gpu": rng.choice(["a100", "h100"]),
    }
    options["router"], options["router_knobs"] = rng.choice(ROUTERS)
    options["decode_router"], options["decode_router_knobs"] = rng.choice(ROUTERS)
    if maybe(0.3):
        options["max_num_seqs"] = rng.choice([1, 2, 5])
    if maybe(0.3):
        options["token_budget"] = rng.choice([8, 40, 300])
    if maybe(0.2):
        options["watermark"] = rng.choice([0.0, 0.1, 0.3])
    if maybe(0.25):
        options["prefix_caching"] = True
    _memory(rng, maybe, options)
    stages = 1
    if maybe(0.3):
        stages = options["pp"] = rng.choice([2, 3, 4])
        options["pp_overlap"] = maybe(0.6)
        options["chase_chunks"] = maybe(0.4)
        if stages == 3 or maybe(0.3):
            options["layer_split"] = {2: (20, 12), 3: (10, 11, 11), 4: (9, 8, 8, 7)}[stages]
    _cluster(rng, maybe, options, room)
    if maybe(0.15):
        options["tp"] = 2
    if maybe(0.08) and stages == 1 and "tp" not in options:
        options["afd"] = {"attention": 2, "ffn": rng.choice([1, 2]), "micro_batches": rng.choice([1, 3])}
        options["cost_model"] = "roofline"
    cost: ConstantCost | None = None
    if "afd" in options or maybe(0.25):
        options["cost_model"] = "roofline"
    else:
        kind = LastingCost if maybe(0.2) else SlowCost
        cost = kind(
            rng.choice([S // 100, 3_333_331, S // 4]),
            per_row_ns=rng.choice([0, 100_003]),
            per_context_ns=rng.choice([0, 1_009]),
            before_ns=rng.choice([0, 50_000]),
            after_ns=rng.choice([0, 777]),
            transfer_ns=rng.choice([0, 9_001, S // 50]),
            stages=stages,
            tile=rng.choice([1, 8, 128]),
            per_pair_ns=rng.choice([0, 11]),
            leaves_ns=rng.choice([3_001, S // 30]),
        )
    return Case(trace, options, cost)


def _trace(rng: Random, maybe: Any) -> Trace:
    count = rng.choice([2, 8, 25, 60])
    step = rng.choice([0, S // 100, S // 20, S])
    arrival, now = [], 0
    for _ in range(count):
        now += rng.choice([0, 0, step, step * 3])
        arrival.append(now)
    most = rng.choice([6, 80, 400])
    prompt = [rng.randint(1, most) for _ in range(count)]
    output = [1 if maybe(0.15) else rng.randint(1, rng.choice([4, 60])) for _ in range(count)]
    columns: dict[str, Any] = {}
    if maybe(0.5):
        families = rng.choice([1, 3])
        columns["hash_tokens"] = size = rng.choice([4, 16])
        columns["prefix_hashes"] = [
            tuple(1000 * family + at for at in range(tokens // size))
            for tokens, family in ((tokens, rng.randrange(families)) for tokens in prompt)
        ]
    if maybe(0.5):
        columns["session"] = [rng.choice([None, "a", "b", "c"]) for _ in prompt]
    if maybe(0.3):
        columns["priority"] = [rng.randint(0, 2) for _ in prompt]
    if maybe(0.3):
        columns["slo"] = [rng.choice([None, "chat", "batch"]) for _ in prompt]
    if maybe(0.25):
        columns["abort_ns"] = [-1 if maybe(0.5) else at + rng.choice([1, S // 20, S // 3, 3 * S]) for at in arrival]
    if maybe(0.2):
        columns["after_row"] = [rng.randrange(row) if row and maybe(0.6) else -1 for row in range(count)]
        columns["think_ns"] = [rng.choice([0, S // 10]) for _ in prompt]
    limit = [tokens + (0 if maybe(0.5) else rng.randint(0, 30)) for tokens in output]
    return Trace("crowd", *(np.array(column) for column in (arrival, prompt, output, limit)), **columns)


def _memory(rng: Random, maybe: Any, options: dict[str, Any]) -> None:
    if maybe(0.3):
        options["preemption"] = rng.choice(["swap", "auto"])
    if maybe(0.3):
        options["ladder"] = rng.choice(["all", "none", ",".join(rng.sample(RUNGS, rng.randint(1, 4)))])
        options |= {"max_wait_s": rng.choice([0.1, 1.0, 60.0]), "risk": rng.choice([0.0, 0.5, 1.0])}
        options |= {"trouble_from": rng.choice([0.3, 0.9]), "plain_tokens": rng.choice([5, 64, 8192])}
    options["swap_bandwidth"] = rng.choice([1e8, 5e9])
    options["swap_gib"] = rng.choice([0.005, 0.02, 1.0])
    options["swap_page_mib"] = rng.choice([2.0, 5.0])
    options["replicas_per_link"] = rng.choice([1, 1, 2])
    if maybe(0.1):
        options["kv_compression"] = rng.choice(["kivi4", "delta8"])
        options["kv_window"] = 16


def _cluster(rng: Random, maybe: Any, options: dict[str, Any], room: int) -> None:
    replicas = options["replicas"] = rng.choice([1, 1, 2, 3, 5])
    kind = rng.random()
    if kind < 0.35:
        serving = kind < 0.08
        pools = []
        for role in (
            ("serve", "serve")
            if serving
            else rng.choice([("prefill", "decode"), ("decode", "prefill", "decode"), ("prefill", "serve", "decode")])
        ):
            pool: dict[str, Any] = {"role": role, "replicas": rng.choice([1, 2, 3])}
            if maybe(0.5):
                pool["policy"] = rng.choice(list(KNOBS))
                pool["knobs"] = rng.choice(KNOBS[pool["policy"]])
            if maybe(0.4):
                pool["num_blocks"] = rng.choice([room, 2 * room, 5 * room])
            pools.append(pool)
        del options["replicas"]
        replicas = sum(pool["replicas"] for pool in pools)
        options["pools"] = tuple(pools)
        options["layerwise_kv"] = maybe(0.5)
        options["kv_bandwidth"] = rng.choice([1e8, 1e10])
        options["kv_latency_s"] = rng.choice([0.0, 1e-5, 0.05])
    elif kind < 0.45:
        options["kv_store_gib"] = rng.choice([0.002, 0.1])
        options["kv_bandwidth"] = rng.choice([1e9, 1e11])
    if maybe(0.35):
        options["failures"] = tuple(
            f"{rng.randrange(replicas)}@{rng.choice([0, 0.05, 0.3, 1, 4])}{rng.choice(['', '+0.1', '+1', '+1'])}"
            for _ in range(rng.randint(1, 4))
        )
        options["on_failure"] = rng.choice(["requeue", "requeue", "fail"])
    if maybe(0.15):
        options["autoscale"] = {
            "most": 8,
            "by": rng.choice(["queue", "slo"]),
            "interval_s": rng.choice([0.1, 1.0]),
            "startup_s": rng.choice([0.0, 0.7]),
            "queue_high": rng.choice([0.0, 1.0]),
            "patience_s": rng.choice([0.0, 0.5]),
            "running_low": 3.0,
            "ttft_s": 0.3,
            "pool": rng.randrange(len(options.get("pools", (0,)))),
        }
