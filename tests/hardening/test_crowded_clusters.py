"""Everything at once: random clusters that mix policies, memory measures, pipelines, pools, routers, failures and
scaling (`crowd.py`), and what has to hold of any run whatever was mixed.

Most tests try one feature; faults between two live where nobody looks for both. A cluster that makes no sense has to be
refused in one line; every other one has to end everybody, count every token once, leave no block taken, and be the same
run on the plain path and with blocks that have ids. `MORE=10` in the environment tries ten times as many cases,
`FIRST=1234` begins at another number.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from metrics import Recorder, RunTables, summarise
from metrics.run_folder.columns import TABLES
from policies import make_scheduler
from policies.edges.errors import InputError
from simulator.cluster.cluster import Cluster
from simulator.cluster.pools import make_cluster_plan
from simulator.config import ReplayConfig
from simulator.replica import replica_kind as engine
from simulator.simulation import simulate
from tests.hardening.crowd import Case, case
from workloads import Trace

CASES = 60 * int(os.environ.get("MORE", "1"))
FIRST = int(os.environ.get("FIRST", "0"))


def run(each: Case, *, by_id: bool = False, plain: bool = False) -> tuple[RunTables, Cluster]:
    config = ReplayConfig(**each.options, leaps=not plain)
    made = partial(make_scheduler, by_id=True) if by_id else make_scheduler
    with patch.object(engine, "make_scheduler", made):
        plan = make_cluster_plan(config, each.trace, each.cost)
        recorder = Recorder()
        cluster = simulate(each.trace, plan, recorder)
    return recorder.tables(), cluster


def in_order(tables: RunTables, name: str) -> list[str]:
    """The rows of a table, those of each replica in their own order."""
    rows = tables.table(name).to_pylist()
    if name not in ("requests", "segments"):
        rows.sort(key=lambda row: row["replica"])
    return [repr(row) for row in rows]


def faults(each: Case) -> Iterator[str]:
    """Everything that a run of this case breaks."""
    try:
        tables, cluster = run(each)
    except InputError as error:
        if "never ended" in str(error) or "promise" in str(error):
            yield str(error)
        return
    policies = {each.options["policy"], *(pool.get("policy") for pool in each.options.get("pools", ()))}
    yield from _ends(each.trace, tables, answers_together="request_level" in policies)
    yield from _batches(each, tables, cluster)
    yield from _leftovers(cluster)
    summarise(tables, warmup="auto", slo="ttft_p99=1,tbt_p99=0.1")
    for name, (other, other_cluster) in {
        "again": run(each),
        "plain": run(each, plain=True),
        "by id": run(each, by_id=True),
        "plain by id": run(each, by_id=True, plain=True),
    }.items():
        for table in TABLES:
            if (ours := in_order(tables, table)) != (theirs := in_order(other, table)):
                first = next((pair for pair in zip(ours, theirs) if pair[0] != pair[1]), (len(ours), len(theirs)))
                yield f"{name}: {table}: {first[0]} and {first[1]}"
                break
        if cluster.facts() != other_cluster.facts():
            yield f"{name}: facts: {cluster.facts()} and {other_cluster.facts()}"


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _ends(trace: Trace, tables: RunTables, *, answers_together: bool) -> Iterator[str]:
    """Every request ends once, with a reason, with its tokens, each after the one before. answers_together: it may end
    later than with its last token, together with its batch."""
    rows = tables.table("requests").to_pylist()
    if sorted(row["request"] for row in rows) != list(range(len(trace))):
        yield f"requests: {len(rows)} rows of {len(trace)}"
    times = {(row["replica"], row["cohort"], row["step"]): row["time_s"] for row in tables.table("tokens").to_pylist()}
    tokens = defaultdict(list)
    for part in tables.table("segments").to_pylist():
        tokens[part["request"]] += [
            times[part["replica"], part["cohort"], step] for step in range(part["from_step"], part["to_step"])
        ]
    aborting = trace.abort_ns is not None
    for row in rows:
        number = row["request"]
        who = f"request {number} ({row['status']})"
        got = tokens[number]
        if len(got) != row["output_tokens"]:
            yield f"{who}: {len(got)} token times, {row['output_tokens']} tokens"
        if any(later <= earlier for earlier, later in zip(got, got[1:])):
            yield f"{who}: token times go back: {got}"
        if row["status"] == "finished":
            if row["output_tokens"] != trace.output_tokens[number] or row["reason"]:
                yield f"{who}: {row['output_tokens']} tokens of {trace.output_tokens[number]}, {row['reason']!r}"
            if got and (got[-1] > row["finished_s"] if answers_together else got[-1] != row["finished_s"]):
                yield f"{who}: last token at {got[-1]}, finished at {row['finished_s']}"
        elif not row["reason"]:
            yield f"{who}: no reason"
        elif row["status"] == "aborted" and not aborting:
            yield f"{who}: nobody gives up"
        elif row["output_tokens"] >= trace.output_tokens[number]:
            yield f"{who}: has all its tokens"
        if row["status"] == "rejected" and got:
            yield f"{who}: rejected after {len(got)} tokens"
        if got and got[0] != row["first_token_s"]:
            yield f"{who}: first token at {got[0]}, told {row['first_token_s']}"
        if not got and not np.isnan(row["first_token_s"]):
            yield f"{who}: first token told, none delivered"
        moments = [row["arrival_s"], row["admitted_s"], row["first_token_s"], row["finished_s"]]
        known = [moment for moment in moments if not np.isnan(moment)]
        if known != sorted(known):
            yield f"{who}: {moments}"
        if trace.after_row is None and _ns(row["arrival_s"]) != trace.arrival_ns[number]:
            yield f"{who}: arrived at {row['arrival_s']}"
        elif trace.after_row is not None and trace.after_row[number] >= 0:
            before = next(other for other in rows if other["request"] == trace.after_row[number])
            if _ns(row["arrival_s"]) != _ns(before["finished_s"]) + trace.think_ns[number]:
                yield f"{who}: arrived at {row['arrival_s']} after {before['finished_s']}"


def _batches(each: Case, tables: RunTables, cluster: Cluster) -> Iterator[str]:
    """Batches in time, within their limits, of whoever is there, each token of a prompt computed after the one before."""
    trace, requests = each.trace, {row["request"]: row for row in tables.table("requests").to_pylist()}
    rows = sorted(tables.table("iterations").to_pylist(), key=lambda row: (row["replica"], row["iteration"]))
    stages = defaultdict(list)
    for row in tables.table("stages").to_pylist():
        stages[row["replica"], row["iteration"]].append(row)
    calm = not each.options.get("failures") and trace.abort_ns is None and not each.options.get("autoscale")
    last: dict[int, dict[str, Any]] = {}
    stage_free: dict[tuple[int, int], float] = {}
    computed: dict[int, int] = {}
    sampled = cached = 0
    lives = defaultdict(list)
    for life in cluster.lives:
        lives[life.replica].append(life)
    for row in rows:
        replica = cluster.replicas[row["replica"]]
        scheduler, pool = replica.scheduler, cluster.plan.pools[cluster.pool_number(replica)]
        who = f"replica {row['replica']}, iteration {row['iteration']}"
        if not row["planned_s"] <= row["start_s"] <= row["end_s"]:
            yield f"{who}: {row['planned_s']}, {row['start_s']}, {row['end_s']}"
        if not any(
            life.up_ns <= _ns(row["planned_s"]) and (life.down_ns < 0 or _ns(row["end_s"]) <= life.down_ns)
            for life in lives[row["replica"]]
        ):
            yield f"{who}: its replica was not up from {row['planned_s']} to {row['end_s']}"
        before = last.get(row["replica"])
        if before is not None and (
            row["end_s"] < before["end_s"]
            or row["planned_s"] < before["planned_s"]
            or (calm and row["iteration"] != before["iteration"] + 1)
        ):
            yield f"{who}: after {before['iteration']}, planned {before['planned_s']} then {row['planned_s']}, ended {before['end_s']} then {row['end_s']}"
        last[row["replica"]] = row
        used = row["chunk_tokens"] + row["decodes"]
        if used + row["dummy_tokens"] <= 0:
            yield f"{who}: an empty batch"
        if used > scheduler.token_budget or row["running"] > scheduler.max_num_seqs:
            yield f"{who}: {used} tokens of {scheduler.token_budget}, {row['running']} running of {scheduler.max_num_seqs}"
        if not 0 <= row["free_blocks"] <= pool.engine.num_blocks:
            yield f"{who}: {row['free_blocks']} blocks free of {pool.engine.num_blocks}"
        if row["chunk_tokens"] != sum(chunk["tokens"] for chunk in row["chunks"]) or row["num_chunks"] != len(
            row["chunks"]
        ):
            yield f"{who}: {row['chunk_tokens']} chunk tokens, {row['chunks']}"
        if row["decodes"] != sum(cohort["size"] for cohort in row["cohorts"]):
            yield f"{who}: {row['decodes']} decodes, {row['cohorts']}"
        if row["sampled"] != row["decodes"] + sum(chunk["samples"] for chunk in row["chunks"]):
            yield f"{who}: {row['sampled']} sampled"
        sampled += row["sampled"]
        cached += row["cached_tokens"]
        for chunk in row["chunks"]:
            request = requests[chunk["request"]]
            if not request["arrival_s"] <= row["planned_s"] <= request["finished_s"]:
                yield f"{who}: computes request {chunk['request']} at {row['planned_s']}, there from {request['arrival_s']} to {request['finished_s']}"
            if (
                chunk["tokens"] < 1
                or chunk["prefix"] + chunk["tokens"] > request["prompt_tokens"] + request["max_output_tokens"]
            ):
                yield f"{who}: chunk {chunk}"
            so_far = computed.get(chunk["request"], 0)
            whole = (
                calm
                and not request["preemptions"]
                and not request["cached_tokens"]
                and len(cluster.plan.pools) == 1
                and cluster.store is None
            )
            if whole and chunk["prefix"] != so_far:
                yield f"{who}: chunk {chunk} after {so_far} tokens"
            computed[chunk["request"]] = chunk["prefix"] + chunk["tokens"]
            if whole and chunk["samples"] != (chunk["prefix"] + chunk["tokens"] == request["prompt_tokens"]):
                yield f"{who}: chunk {chunk} of a prompt of {request['prompt_tokens']}"
        parts = sorted(stages[row["replica"], row["iteration"]], key=lambda part: part["stage"])
        for part in parts:
            free = stage_free.get((row["replica"], part["stage"]), 0.0)
            if part["start_s"] < free or part["end_s"] < part["start_s"]:
                yield f"{who}: stage {part['stage']} from {part['start_s']} to {part['end_s']}, free from {free}"
            stage_free[row["replica"], part["stage"]] = part["end_s"]
        for one, other in zip(parts, parts[1:]):
            if _ns(other["start_s"]) < _ns(one["end_s"]) + _ns(one["send_s"]):
                yield f"{who}: stage {other['stage']} begins before its input is there"
        if parts and (parts[0]["start_s"] != row["start_s"] or parts[-1]["end_s"] > row["end_s"]):
            yield f"{who}: stages do not agree with the batch"
    delivered = sum(row["output_tokens"] for row in requests.values())
    thrown = sum(row["preemptions"] for row in requests.values())
    # Whoever plans ahead computes a token beyond an end that nobody could foresee.
    ahead = any(scheduler.chase_decodes for scheduler in (replica.scheduler for replica in cluster.replicas))
    if delivered > sampled or (calm and not thrown and not ahead and delivered != sampled):
        yield f"{delivered} tokens delivered, {sampled} sampled, {thrown} preemptions"


def _leftovers(cluster: Cluster) -> Iterator[str]:
    """Nobody is left anywhere, and nothing is owed."""
    if cluster.journeys or cluster._home or cluster._stranded or cluster._fetching or cluster.ended != cluster.expected:
        yield f"cluster: {cluster.journeys}, {cluster._home}, {cluster._stranded}, {cluster._fetching}, {cluster.ended}"
    if cluster._kv is not None and (cluster._kv._moves or cluster._kv._unplaced or any(cluster._kv._queues.values())):
        yield f"moves: {cluster._kv._moves}, {cluster._kv._unplaced}, {cluster._kv._queues}"
    if cluster.store is not None and cluster.store._fetches:
        yield f"store: {cluster.store._fetches}"
    for replica in cluster.replicas:
        scheduler = replica.scheduler
        queues, ledger, who = scheduler.queues, scheduler.ledger, f"replica {replica.number}"
        found = {
            "tracks": len(scheduler.tracks),
            "parts": [part for part in queues.parts if getattr(part, "size", 1)],
            "waiting": len(queues.waiting),
            "running": queues.num_running,
            "prefill": queues.prefill_tokens,
            "promised": queues.decode_tokens_promised,
            "held": scheduler.handover.held,
            "expected": scheduler.handover.expected,
            "taken": ledger.total_blocks - ledger.free_blocks,
        }
        if replica._flights and not any(life.replica == replica.number and life.down_ns >= 0 for life in cluster.lives):
            batches = [flight[0] for flight in replica._flights]
            if any(batch.joins or any(part[2] for part in batch.grown) for batch in batches):
                found["flights"] = len(batches)
        if scheduler.admission is not None:
            found["counted on"] = [
                *scheduler.admission._promised,
                scheduler.admission._expected_blocks,
                scheduler.admission._longest_blocks,
            ]
            found["counted on"] = [value for value in found["counted on"] if value]
        if scheduler.swap is not None:
            swap = scheduler.swap
            found |= {
                "swapped": swap.held,
                "pages": swap.memory.pages - swap.free_pages,
                "double": len(swap._free) - len(set(swap._free)),
            }
        if any(found.values()):
            yield f"{who}: left behind: { {name: value for name, value in found.items() if value} }"


@pytest.mark.parametrize("number", range(FIRST, FIRST + CASES, 10))
def test_whatever_is_mixed_everybody_ends_every_token_counts_once_and_all_paths_agree(number: int) -> None:
    for one in range(number, min(number + 10, FIRST + CASES)):
        found = list(faults(case(one)))
        assert found == [], f"case {one}: {len(found)}: " + "\n".join(found[:5])
