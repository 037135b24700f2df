"""Scheduler parity: does `vllm_v1` plan, step by step, what a real vLLM engine planned?

The engine's own step log gives the start time of every step; requests enter at the times it logged. Nothing is
predicted here, so any difference is a difference between schedulers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.errors import ExperimentError
from policies import BlockLedger, Chunk, CountingLedger, Decodes, Host, Request, Scheduler, make_policy
from policies.input_file import LOG_BYTES, parse_json, read_text
from policies.settings import LARGEST

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
) -> Parity:
    """Drive `vllm_v1` with a vLLM step log and compare every step: ids, batch order, tokens and contexts.

    num_blocks counts the null block, as vLLM's own pool size does. Queue lengths, preemptions and free blocks are
    compared too where the log has them.
    """
    steps = _read_lines(steps_path, {"t", "reqs"})
    requests = _read_lines(requests_path, {"id", "prompt", "output"})
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
    ledger: BlockLedger | CountingLedger
    if prefix_caching:
        ledger = BlockLedger(num_blocks - 1, block_size, prefix_caching=True, free_order=free_order)  # type: ignore[arg-type]
    else:
        ledger = CountingLedger(num_blocks - 1, block_size)
    scheduler = Scheduler(policy, ledger, Host(), token_budget=token_budget, max_num_seqs=max_num_seqs)
    arrivals = sorted(range(len(requests)), key=lambda row: (_added(requests[row]), row))
    next_arrival = 0
    checked = 0
    for number, step in enumerate(steps):
        now_ns = round(step["t"] * 1e9)
        while next_arrival < len(arrivals):
            row = requests[arrivals[next_arrival]]
            if round(_added(row) * 1e9) > now_ns:
                break
            request = Request(int(row["id"]), now_ns, int(row["prompt"]), int(row["output"]))
            track = scheduler.add(request, now_ns)
            if track.status == "rejected":
                raise ExperimentError(f"{requests_path}: request {row['id']}: {track.reason}")
            next_arrival += 1
        batch = scheduler.plan(now_ns)
        ours: dict[str, Any] = {"reqs": _rows(batch.parts) if batch else []}
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


def _rows(parts: Sequence[Chunk | Decodes]) -> list[Row]:
    """A batch as the log writes it: (request, tokens, context before), in batch order."""
    rows: list[Row] = []
    for part in parts:
        if isinstance(part, Chunk):
            rows.append((str(part.track.request.id), part.tokens, part.prefix))
        else:
            # Prompts that this batch completes have joined the cohort too; they were not decoded in it.
            decoded = [track for track in part.cohort.members() if track.decodes_from <= part.step]
            rows.extend((str(track.request.id), 1, track.context - 1) for track in decoded)
    return rows


def _added(row: Mapping[str, Any]) -> float:
    return float(row.get("added", row.get("arrival", 0.0)))


def _read_lines(path: Path, needed: set[str]) -> list[dict[str, Any]]:
    text = read_text(path, ExperimentError, LOG_BYTES)
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        row = parse_json(line, f"{path}, line {number}", ExperimentError)
        missing = needed - row.keys() if isinstance(row, dict) else needed
        if missing:
            raise ExperimentError(f"{path}, line {number}: found no {', '.join(sorted(missing))}")
        rows.append(row)
    if not rows:
        raise ExperimentError(f"{path}: found no rows, expected one JSON object a line")
    return rows
