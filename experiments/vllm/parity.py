"""Scheduler parity: does `vllm_v1` plan, step by step, what a real vLLM engine planned?

The engine's own step log gives the start time of every step; requests enter at the times it logged. Nothing is
predicted here, so any difference is a difference between schedulers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiments.errors import ExperimentError
from policies import (
    BlockLedger,
    Chunk,
    CountingLedger,
    Decodes,
    ExtentLedger,
    Host,
    KVLedger,
    Request,
    Scheduler,
    make_policy,
)
from policies.edges.settings import LARGEST, shown
from profiler.measurements.bounded_parquet import log_rows

Row = tuple[str, int, int]


@dataclass(frozen=True)
class Parity:
    """Outcome of a comparison; `divergence` holds both sides of the first step that differs."""

    steps: int
    matched: int
    free_blocks_checked: int
    preemptions: int
    divergence: Mapping[str, Any] | None

    @property
    def exact(self) -> bool:
        return self.divergence is None and self.matched == self.steps


class LoggedRequest(NamedTuple):
    """A request as the engine logged it; name: its id, whatever that looks like."""

    name: str
    added_ns: int
    prompt_tokens: int
    output_tokens: int


def compare_with_vllm(
    steps_path: Path,
    requests_path: Path,
    *,
    token_budget: int,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    prefix_caching: bool = False,
    long_prefill_token_threshold: int = 0,
    free_order: str = "0.32",
    reserve_full: bool = True,
    by_id: bool = False,
) -> Parity:
    """Drive `vllm_v1` with a vLLM step log and compare every step: ids, batch order, tokens and contexts.

    num_blocks counts the null block, as vLLM's own pool size does. Queue lengths, preemptions and free blocks are
    compared too where the log has them. by_id: with the executor's prefix cache instead of the simulator's.
    """
    steps = _read_steps(steps_path)
    requests = _read_requests(requests_path)
    names = [request.name for request in requests]
    knobs = {
        "long_prefill_token_threshold": long_prefill_token_threshold,
        "reserve_full": reserve_full,
        "prefix_caching": prefix_caching,
        "free_order": free_order,
    }
    policy = make_policy("vllm_v1", knobs)
    sizes = {"token-budget": token_budget, "block-size": block_size, "max-num-seqs": max_num_seqs}
    for name, size in sizes.items():
        if not 1 <= size <= LARGEST:
            raise ExperimentError(f"--{name}: found {size}, expected 1 to {LARGEST:.0e}")
    if not 2 <= num_blocks <= LARGEST:
        raise ExperimentError(f"--num-blocks: found {num_blocks}, expected at least 2 (block 0 is never handed out)")
    ledger: KVLedger
    if not prefix_caching:
        ledger = CountingLedger(num_blocks - 1, block_size)
    elif by_id:
        ledger = BlockLedger(num_blocks - 1, block_size, prefix_caching=True, free_order=free_order)  # type: ignore[arg-type]
    else:
        ledger = ExtentLedger(num_blocks - 1, block_size, free_order=free_order)  # type: ignore[arg-type]
    scheduler = Scheduler(policy, ledger, Host(), token_budget=token_budget, max_num_seqs=max_num_seqs)
    arrivals = sorted(range(len(requests)), key=lambda row: (requests[row].added_ns, row))
    next_arrival = 0
    checked = 0
    for number, step in enumerate(steps):
        now_ns = round(step["t"] * 1e9)
        while next_arrival < len(arrivals):
            row = arrivals[next_arrival]
            logged_request = requests[row]
            if logged_request.added_ns > now_ns:
                break
            request = Request(row, now_ns, logged_request.prompt_tokens, logged_request.output_tokens)
            track = scheduler.add(request, now_ns)
            if track.status == "rejected":
                raise ExperimentError(f"{requests_path}: request {logged_request.name}: {track.reason}")
            next_arrival += 1
        batch = scheduler.plan(now_ns)
        ours: dict[str, Any] = {"reqs": _rows(batch.parts, names) if batch else []}
        logged: dict[str, Any] = {"reqs": [(str(id), tokens, context) for id, tokens, context in step["reqs"]]}
        counts = {
            "waiting": len(scheduler.queues.waiting),
            "running": scheduler.queues.num_running,
            "preempted": len(batch.preempted) if batch else 0,
            "free_blocks": ledger.free_blocks,
        }
        for name, value in counts.items():
            if name in step:
                ours[name], logged[name] = value, step[name]
                checked += name == "free_blocks"
        if ours != logged:
            divergence = {"step": number, "ours": ours, "vllm": logged}
            return Parity(len(steps), number, checked, scheduler.preemptions, divergence)
        if batch is not None:
            end_ns = round(steps[number + 1]["t"] * 1e9) if number + 1 < len(steps) else now_ns + 1
            scheduler.complete(batch, end_ns)
    return Parity(len(steps), len(steps), checked, scheduler.preemptions, None)


def _rows(parts: Sequence[Chunk | Decodes], names: Sequence[str]) -> list[Row]:
    """A batch as the log writes it: (request, tokens, context before), in batch order. names: of requests, by row."""
    rows: list[Row] = []
    for part in parts:
        if isinstance(part, Chunk):
            rows.append((names[part.track.request.id], part.tokens, part.prefix))
        else:
            # Prompts that this batch completes have joined the cohort too; they were not decoded in it.
            decoded = [track for track in part.cohort.members() if track.decodes_from <= part.step]
            rows.extend((names[track.request.id], 1, track.context - 1) for track in decoded)
    return rows


def _read_requests(path: Path) -> list[LoggedRequest]:
    requests = []
    for where, row in _read_lines(path, {"id", "prompt", "output"}):
        added_s = row.get("added", row.get("arrival", 0.0))
        if type(row["id"]) not in (int, str):
            raise ExperimentError(f"{where}: id: found {shown(row['id'])}, expected a whole number or a text")
        for name, least in (("prompt", 1), ("output", 1)):
            if not _is_whole(row[name], least):
                raise ExperimentError(f"{where}: {name}: found {shown(row[name])}, expected a whole number above 0")
        if not _is_time(added_s):
            raise ExperimentError(f"{where}: added: found {shown(added_s)}, expected seconds")
        requests.append(LoggedRequest(str(row["id"]), round(added_s * 1e9), row["prompt"], row["output"]))
    if len({request.name for request in requests}) < len(requests):
        raise ExperimentError(f"{path}: found an id twice, expected each once")
    return requests


def _read_steps(path: Path) -> list[dict[str, Any]]:
    """Each with a time `t` and `reqs`: lists of request, tokens, context before."""
    steps: list[dict[str, Any]] = []
    for where, step in _read_lines(path, {"t", "reqs"}):
        if not _is_time(step["t"]) or (steps and step["t"] < steps[-1]["t"]):
            raise ExperimentError(f"{where}: t: found {shown(step['t'])}, expected seconds, not before the last step")
        rows = step["reqs"]
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 3 for row in rows):
            raise ExperimentError(f"{where}: reqs: found {shown(rows)}, expected lists of request, tokens, context")
        steps.append(step)
    return steps


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= LARGEST


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9


def _read_lines(path: Path, needed: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each row stands, and the row."""
    found = False
    for where, row in log_rows(path, ExperimentError):
        missing = needed - row.keys() if isinstance(row, dict) else needed
        if missing:
            raise ExperimentError(f"{where}: found no {', '.join(sorted(missing))}")
        found = True
        yield where, row
    if not found:
        raise ExperimentError(f"{path}: found no rows, expected one JSON object a line")
