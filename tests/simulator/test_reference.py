"""The fast path against the reference simulator: every row, every token, to the nanosecond.

They share configs, knobs, cost models and routers, and nothing of scheduler, cohorts, ledger, recorder or clock.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from metrics import Recorder, RunTables, read_run
from policies import BatchShape, StatefulPolicy
from policies.edges.errors import InputError
from policies.registry import BUILT_IN, policy_class
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.reference import Cluster, refuse
from simulator.reference.pages import PAGES
from simulator.simulation import make_cluster_plan, replay, simulate
from tests.hardening.crowd import case
from tests.simulator.constant_cost import ConstantCost, trace_of
from workloads import Trace

MORE = int(os.environ.get("MORE", "0"))
"""MORE=10 in the environment: ten times as many runs, and others every time."""

S = 1_000_000_000


class Leaving(ConstantCost):
    """Chunks leave something to the three steps after them."""

    def aftermath(self, shape: BatchShape) -> list[int]:
        return [10_000_000, 20_000_000, 1_000_000 * shape.prefill_tokens]


class Slowing(ConstantCost):
    """Stages that differ, and chunks that pay for their prefix."""

    def stage_ns(self, shape: BatchShape, stage: int = 0) -> int:
        looked_back = sum(prefix for _, prefix in shape.chunks)
        return super().stage_ns(shape, stage) * (1 + stage % 3) + 1_000_000 * looked_back


def rows_of(run: RunTables, table: str, *, without: str = "") -> list[tuple[Any, ...]]:
    """Sorted rows; NaN equals NaN, and floats show every digit."""
    columns = run.table(table).to_pydict()
    values = [columns[name] for name in columns if name != without]
    return sorted(tuple(map(repr, row)) for row in zip(*values))


def token_times(run: RunTables) -> dict[int, list[float]]:
    """Every token's time of every request, seconds."""
    tokens, segments = run.table("tokens").to_pydict(), run.table("segments").to_pydict()
    steps = dict(zip(zip(*(tokens[name] for name in ("replica", "rank", "cohort", "step"))), tokens["time_s"]))
    times: dict[int, list[float]] = {}
    for request, *where, first, end in zip(*segments.values()):
        times.setdefault(request, []).extend(steps[(*where, step)] for step in range(first, end))
    return times


def assert_same(trace: Trace, options: dict[str, Any], cost: ConstantCost | None) -> None:
    """Both simulators write the same rows, which number of which cohort aside."""
    plan = make_cluster_plan(ReplayConfig(**options), trace, cost)
    recorder, reference = Recorder(), Cluster(trace, plan)
    simulate(trace, plan, recorder)
    reference.run()
    assert reference.ended == len(trace)
    fast, slow = recorder.tables(), reference.recording.tables()
    assert rows_of(fast, "requests") == rows_of(slow, "requests")
    assert rows_of(fast, "iterations", without="cohorts") == rows_of(slow, "iterations", without="cohorts")
    assert rows_of(fast, "stages") == rows_of(slow, "stages")
    assert token_times(fast) == token_times(slow)


KNOBS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "prefill_priority": {"max_prompts": st.integers(0, 3)},
    "orca": {
        "max_batch_size": st.integers(0, 5),
        "max_prompts": st.integers(0, 3),
        "reserve": st.sampled_from(["limit", "longest"]),
    },
    "request_level": {
        "max_batch_size": st.integers(1, 5),
        "keep_finished": st.booleans(),
        "early_return": st.booleans(),
        "max_delay_s": st.sampled_from([0.0, 1.5]),
        "reserve": st.sampled_from(["limit", "longest"]),
    },
    "chunked": {"chunk_size": st.integers(1, 40)},
    "goodput_drafts": {"chunk_size": st.integers(1, 40)},
    "predicted_sjf": {
        "chunk_size": st.integers(1, 40),
        "output_weight": st.sampled_from([0.0, 2.0]),
        "ageing": st.sampled_from([0.0, 3.0]),
    },
    "decode_maximal": {"chunk_size": st.integers(1, 40), "align": st.sampled_from(["shrink", "pad", "none"])},
    "dynamic_chunk": {
        "rule": st.sampled_from(["pd_ratio", "tbt_slo", "prefix_aware"]),
        "large": st.just(32),
        "middle": st.just(24),
        "small": st.just(16),
        "largest": st.integers(1, 64),
        "first": st.integers(8, 64),
        "merge": st.booleans(),
        "tbt_target_s": st.floats(0.3, 1.5),
        "align": st.sampled_from(["shrink", "pad", "none"]),
        "prefill_heavy": st.floats(0.5, 1),
        "decode_heavy": st.floats(0, 0.5),
    },
    "shortest_prompt_first": {
        "chunk_size": st.integers(1, 40),
        "ageing": st.sampled_from([0.0, 7.0]),
        "window": st.integers(1, 5),
    },
    "most_in_time": {
        "chunk_size": st.integers(1, 40),
        "ttft_s": st.floats(0.5, 20),
        "tbt_s": st.floats(0.3, 3),
        "use": st.sampled_from([0.5, 1.0]),
        "lost": st.sampled_from([0.0, 0.3, 1.0]),
        "window": st.integers(1, 6),
    },
    "slo_aware": {
        "chunk_size": st.integers(1, 60),
        "ttft_s": st.floats(0.5, 9),
        "tbt_s": st.floats(0.3, 2),
        "classes": st.sampled_from(["", "chat:ttft=3,tbt=0.4"]),
        "relegate": st.booleans(),
        "window": st.integers(1, 5),
    },
    "vllm_v1": {
        "long_prefill_token_threshold": st.sampled_from([0, 7]),
        "reserve_full": st.booleans(),
        "free_order": st.sampled_from(["0.19", "0.32"]),
        "scheduling": st.sampled_from(["fcfs", "priority"]),
    },
}


@st.composite
def traces(draw: st.DrawFn, *, prefixes: bool = False) -> Trace:
    """Up to a dozen requests, some at the same moment, some impatient, some in closed loops, some of a class."""
    rows = draw(
        st.lists(
            st.tuples(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.7]), st.integers(1, 40), st.integers(1, 25)),
            min_size=1,
            max_size=12,
        )
    )
    count = len(rows)

    def each(values: st.SearchStrategy[Any]) -> Any:
        return draw(st.lists(values, min_size=count, max_size=count))

    at = np.cumsum([gap for gap, _, _ in rows])
    trace = trace_of([(arrival, prompt, output) for arrival, (_, prompt, output) in zip(at, rows)])
    more: dict[str, Any] = {"max_output_tokens": trace.output_tokens + np.array(each(st.integers(0, 5)))}
    if draw(st.booleans()):
        more |= {"priority": each(st.integers(-1, 1)), "slo": each(st.sampled_from([None, "chat"]))}
        more |= {"tenant": each(st.sampled_from([None, "x"])), "predicted_tokens": each(st.integers(0, 30))}
    if prefixes:
        texts = each(st.sampled_from([(1, 2, 3, 4, 5), (1, 2, 9, 10, 11), (6, 7, 8, 12, 13)]))
        hashes = [text[: -(-int(tokens) // 8)] for text, tokens in zip(texts, trace.prompt_tokens)]
        more |= {"hash_tokens": 8, "prefix_hashes": hashes}
        if draw(st.booleans()):
            more["session"] = each(st.sampled_from([None, "a", "b"]))
    if draw(st.booleans()):
        waits = [draw(st.integers(-1, row - 1)) for row in range(count)]
        more |= {"after_row": waits, "think_ns": each(st.sampled_from([0, S // 3, S]))}
    trace = replace(trace, **more)
    return trace.with_timeout(draw(st.sampled_from([4.0, 9.7]))) if draw(st.booleans()) else trace


@st.composite
def configs(draw: st.DrawFn, policy: str, trace: Trace) -> tuple[dict[str, Any], ConstantCost]:
    """What both simulators run: often in memory too small for all, with any pipeline and any number of replicas."""
    knobs = {name: draw(values) for name, values in KNOBS[policy].items()}
    longest = int((trace.prompt_tokens + trace.max_output_tokens).max())
    options: dict[str, Any] = {
        "policy": policy,
        "block_size": 4,
        "watermark": draw(st.sampled_from([None, 0.0, 0.1])),
        "num_blocks": int((-(-longest // 4) + draw(st.integers(0, 12) | st.integers(0, 150))) * 1.12) + 1,
        "pp": draw(st.sampled_from([1, 1, 2, 3])),
        "replicas": draw(st.sampled_from([1, 1, 2, 3])),
        "router": draw(
            st.sampled_from(
                [
                    "round_robin",
                    "least_outstanding_requests",
                    "least_outstanding_tokens",
                    "random",
                    "power_of_two",
                    "least_kv",
                    "session_affinity",
                    "prefix_affinity",
                ]
            )
        ),
        "max_num_seqs": draw(st.sampled_from([None, None, 2, 5])),
        "leaps": draw(st.booleans()),
        "pp_overlap": draw(st.booleans()),
        "chase_chunks": draw(st.booleans()),
    }
    if policy == "vllm_v1":
        options["token_budget"] = draw(st.sampled_from([None, 30]))
        knobs["async_scheduling"] = options["pp"] == 1 and draw(st.booleans())
    options["knobs"] = knobs
    kind = draw(st.sampled_from([ConstantCost, Leaving, Slowing]))
    cost = kind(
        device_ns=draw(st.sampled_from([1, S // 3, S // 10])),
        before_ns=draw(st.sampled_from([0, S // 30])),
        after_ns=draw(st.sampled_from([0, 777, S // 20])),
        per_row_ns=draw(st.sampled_from([0, 1_000_003])),
        per_context_ns=draw(st.sampled_from([0, 10_007])),
        transfer_ns=draw(st.sampled_from([0, S // 15])),
        stages=options["pp"],
        tile=8,
    )
    return options, cost


@pytest.mark.parametrize("policy", KNOBS)
@given(st.data())
@settings(max_examples=25 * max(1, MORE), deadline=None, derandomize=not MORE)
def test_the_fast_path_does_what_the_reference_does(policy: str, data: st.DataObject) -> None:
    trace = data.draw(traces())
    options, cost = data.draw(configs(policy, trace))
    note(repr((options, cost)))
    assert_same(trace, options, cost)


@given(st.data())
@settings(max_examples=40 * max(1, MORE), deadline=None, derandomize=not MORE)
def test_prefix_hits_and_evictions_are_those_of_the_reference(data: st.DataObject) -> None:
    """Which block is found and which is overwritten next shows in who has to prefill what."""
    trace = data.draw(traces(prefixes=True))
    policy = data.draw(st.sampled_from(["vllm_v1", "chunked", "prefill_priority", "orca", "slo_aware"]))
    options, cost = data.draw(configs(policy, trace))
    options |= {"prefix_caching": True, "router": data.draw(st.sampled_from(["prefix_affinity", "session_affinity"]))}
    note(repr((options, cost)))
    assert_same(trace, options, cost)


def expressed(number: int) -> bool:
    """Compare a random cluster, where the reference simulator has pages for all of it and the fast path runs it."""
    crowd = case(number)
    try:
        refuse(make_cluster_plan(ReplayConfig(**crowd.options), crowd.trace, crowd.cost))
    except InputError:
        return False
    assert_same(crowd.trace, crowd.options, crowd.cost)
    return True


def test_random_clusters_agree_wherever_the_reference_can_express_them() -> None:
    """Real cost models, tensor parallelism and attention apart from the FFN among them."""
    first = 0 if not MORE else 1_000
    assert sum(expressed(number) for number in range(first, first + 100 * max(1, MORE))) > 15


def test_a_run_of_the_reference_has_the_summary_and_the_tables_of_any_run(tmp_path: Path) -> None:
    trace = trace_of([(0.2 * i, 20 + 7 * i % 50, 5 + i % 9) for i in range(30)])
    options: dict[str, Any] = {"policy": "vllm_v1", "num_blocks": 9, "replicas": 2, "warmup": "3"}
    cost = ConstantCost(device_ns=S // 3, per_row_ns=1_000_003)
    fast, slow = (replay(trace, ReplayConfig(**options), cost=cost, reference=flag) for flag in (False, True))
    assert slow.summary.keys() == fast.summary.keys()
    assert slow.summary["preemptions"] > 0
    for key, value in fast.summary.items():
        assert slow.summary[key] == (pytest.approx(value, nan_ok=True) if isinstance(value, float) else value), key
    read = read_run(slow.write(tmp_path / "run"))
    assert read.config["replay"]["reference"]
    assert rows_of(read, "iterations") == rows_of(slow.tables, "iterations")


def test_a_token_computed_in_vain_belongs_to_nobody() -> None:
    """Planned ahead, an answer of 2 of 5 allowed tokens is decoded once more: that step is in no segment."""
    trace = replace(trace_of([(0, 4, 2)]), max_output_tokens=np.array([5]))
    run = replay(
        trace,
        ReplayConfig(policy="vllm_v1", knobs={"async_scheduling": True}, num_blocks=9, reference=True),
        cost=ConstantCost(device_ns=S),
    )
    assert run.tables.table("tokens").to_pydict()["time_s"] == [1.0, 2.0, 3.0]
    assert run.tables.table("segments").to_pydict()["to_step"] == [2]


POLICY_OF_ONES_OWN = """
from dataclasses import dataclass
from policies import Policy

@dataclass(frozen=True)
class Mine(Policy):
    def plan(self, queues, draft, kv, host, now_ns):
        draft.decode_all()
"""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"failures": ("0@1",), "replicas": 2}, "--failures (replicas that die)"),
        ({"autoscale": {"most": 3}}, "--autoscale (autoscaling)"),
        ({"ladder": "preempt,plain"}, "--ladder (the overload ladder)"),
        ({"preemption": "swap"}, "--preemption swap (KV swapped to host memory)"),
        ({"kv_store_gib": 1.0, "prefix_caching": True}, "--kv-store-gib (a shared KV store)"),
        ({"pools": ({"role": "prefill"}, {"role": "decode"})}, "--pool role=prefill (KV that moves)"),
    ],
)
def test_what_the_reference_cannot_express_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(SimulationError) as refused:
        replay(trace_of([(0, 4, 2)]), ReplayConfig(reference=True, **options))
    assert str(refused.value) == f"--reference: cannot express {named}; leave one of the two out"


def test_a_policy_without_a_page_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(POLICY_OF_ONES_OWN)
    name = f"{tmp_path / 'mine.py'}:Mine"
    with pytest.raises(
        SimulationError, match=r"--policy .*mine.py:Mine \(it has a page for each built-in policy without a state"
    ):
        replay(trace_of([(0, 4, 2)]), ReplayConfig(policy=name, num_blocks=9, reference=True))


def test_every_built_in_policy_without_a_state_has_a_page() -> None:
    without = {name for name in BUILT_IN if not issubclass(policy_class(name), StatefulPolicy)}
    assert {policy_class(name) for name in without} == set(PAGES)
    assert set(KNOBS) == without
    for name in set(BUILT_IN) - without:
        with pytest.raises(SimulationError, match=rf"--policy {name} \(it has a page for each built-in policy without"):
            replay(trace_of([(0, 4, 2)]), ReplayConfig(policy=name, num_blocks=9, reference=True))
