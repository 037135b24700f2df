"""Scheduler parity: does `vllm_v1` plan, step by step, what a real vLLM engine planned?

The engine's own step log gives the start time of every step; requests enter at the times it logged. Nothing is
predicted here, so any difference is a difference between schedulers. What a speculating engine's model decided is fed
in step by step: how many drafts were accepted, and how many every request holds afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiments.errors import ExperimentError
from policies import (
    Batch,
    BlockLedger,
    Chunk,
    CountingLedger,
    Decodes,
    ExtentLedger,
    Host,
    KVLedger,
    PolicyError,
    Request,
    Scheduler,
    Speculation,
    Track,
    Verified,
    make_policy,
)
from policies.edges.settings import LARGEST, shown
from profiler.measurements.bounded_parquet import log_rows

Row = tuple[str, int, int] | tuple[str, int, int, int]

PLAIN, SPECULATING = 3, 6
"""Fields of a request in a step: id, tokens, context before; and drafts scheduled, drafts accepted, tokens appended."""


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
    """A request as the engine logged it; name: its id, whatever that looks like. before_step: the first step that was
    planned with it in the queue, -1 where only the time is known."""

    name: str
    added_ns: int
    before_step: int
    prompt_tokens: int
    output_tokens: int

    def comes_after(self, step: int, now_ns: int) -> bool:
        """Whether it is not in the queue yet when a step is planned."""
        return self.before_step > step if self.before_step >= 0 else self.added_ns > now_ns


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
    speculation: str = "",
    max_model_len: int = 0,
    by_id: bool = False,
) -> Parity:
    """Drive `vllm_v1` with a vLLM step log and compare every step: ids, batch order, tokens and contexts.

    num_blocks counts the null block, as vLLM's own pool size does. Queue lengths, preemptions and free blocks are
    compared too where the log has them. speculation: method and drafts a step, such as ngram:4, of a log whose requests
    have drafts. max_model_len: the engine's longest sequence, 0 where no request comes near it. by_id: with the
    executor's prefix cache instead of the simulator's.
    """
    steps = _read_steps(steps_path)
    drafting = _speculation(speculation, steps_path, steps)
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
    if not 0 <= max_model_len <= LARGEST:
        raise ExperimentError(f"--max-model-len: found {max_model_len}, expected at least 1, or 0 for no limit")
    free: dict[str, Any] = {
        "free_order": free_order,
        "drops_last_hit": drafting is not None and drafting.drops_last_hit,
    }
    ledger: KVLedger
    if not prefix_caching:
        ledger = CountingLedger(num_blocks - 1, block_size, max_model_len)
    elif by_id:
        ledger = BlockLedger(num_blocks - 1, block_size, max_model_len, prefix_caching=True, **free)
    else:
        ledger = ExtentLedger(num_blocks - 1, block_size, max_model_len, **free)
    scheduler = Scheduler(
        policy,
        ledger,
        Host(speculation=drafting),
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len or None,
    )
    rows = {name: row for row, name in enumerate(names)}
    arrivals = sorted(range(len(requests)), key=lambda row: (requests[row].added_ns, row))
    next_arrival = 0
    checked = 0
    for number, step in enumerate(steps):
        now_ns = round(step["t"] * 1e9)
        while next_arrival < len(arrivals):
            row = arrivals[next_arrival]
            logged_request = requests[row]
            if logged_request.comes_after(number, now_ns):
                break
            prompt, output = logged_request.prompt_tokens, logged_request.output_tokens
            if max_model_len:
                # vLLM ends an answer at its longest sequence, whatever limit was declared.
                output = max(1, min(output, max_model_len - prompt))
            request = Request(row, now_ns, prompt, output)
            track = scheduler.add(request, now_ns)
            if track.status == "rejected":
                raise ExperimentError(f"{requests_path}: request {logged_request.name}: {track.reason}")
            next_arrival += 1
        batch = scheduler.plan(now_ns)
        ours: dict[str, Any] = {"reqs": _rows(batch.parts, names, drafting is not None) if batch else []}
        logged: dict[str, Any] = {"reqs": [(str(row[0]), *row[1 : 3 + (drafting is not None)]) for row in step["reqs"]]}
        counts = {
            "waiting": len(scheduler.queues.waiting),
            "running": scheduler.queues.num_running,
            "preempted": [names[track.request.id] for track in batch.preempted] if batch else [],
            "free_blocks": ledger.free_blocks,
        }
        for name, value in counts.items():
            if name in step:
                ours[name], logged[name] = value, step[name]
                if name == "preempted" and isinstance(step[name], list):
                    logged[name] = [str(id) for id in step[name]]
                elif name == "preempted":
                    ours[name] = len(batch.preempted) if batch else 0
                checked += name == "free_blocks"
        if ours != logged:
            divergence = {"step": number, "ours": ours, "vllm": logged}
            return Parity(len(steps), number, checked, scheduler.preemptions, divergence)
        if batch is not None:
            end_ns = round(steps[number + 1]["t"] * 1e9) if number + 1 < len(steps) else now_ns + 1
            if drafting is None:
                scheduler.complete(batch, end_ns)
                continue
            appended = _complete_as_logged(scheduler, batch, step, rows, end_ns)
            expected = {row[0]: row[5] for row in step["reqs"]}
            if appended != {str(id): count for id, count in expected.items()}:
                ours["appended"], logged["appended"] = appended, {str(id): count for id, count in expected.items()}
                divergence = {"step": number, "ours": ours, "vllm": logged}
                return Parity(len(steps), number, checked, scheduler.preemptions, divergence)
    return Parity(len(steps), len(steps), checked, scheduler.preemptions, None)


def _speculation(text: str, path: Path, steps: Sequence[Mapping[str, Any]]) -> Speculation | None:
    width = next((len(step["reqs"][0]) for step in steps if step["reqs"]), PLAIN)
    if not text and width == SPECULATING:
        raise ExperimentError(f"{path}: found requests with drafts, expected --speculation, such as ngram:4")
    if not text:
        return None
    if width == PLAIN:
        raise ExperimentError(f"--speculation: found {text}, but the requests of {path} have no drafts")
    try:
        return Speculation.parse(text)
    except PolicyError as error:
        raise ExperimentError(f"--speculation: {error}") from None


def _complete_as_logged(
    scheduler: Scheduler, batch: Batch, step: Mapping[str, Any], rows: Mapping[str, int], end_ns: int
) -> dict[str, int]:
    """Complete a step with the drafts that the engine's model accepted and made; returns the tokens appended, by id."""
    unknown = [id for id, _ in step.get("proposed", ()) if str(id) not in rows]
    if unknown:
        raise ExperimentError(f"step at t {step['t']}: proposed: found {shown(unknown[0])}, which is no request")
    held = {rows[str(id)]: count for id, count in step.get("proposed", ())}
    batch.accepted = {rows[str(row[0])]: row[4] for row in step["reqs"]}
    batch.proposed = held
    tracks: dict[str, tuple[Track, int]] = {}
    for row in step["reqs"]:
        track = scheduler.tracks[rows[str(row[0])]]
        tracks[str(row[0])] = track, track.delivered
    scheduler.complete(batch, end_ns)
    scheduled = {track.request.id for track, _ in tracks.values()}
    for request_id, count in held.items():
        # Whoever was left out keeps its drafts, and the log says so.
        if request_id not in scheduled and request_id in scheduler.tracks:
            scheduler.tracks[request_id].drafts = count
    return {name: track.delivered - before for name, (track, before) in tracks.items()}


def _rows(parts: Sequence[Chunk | Decodes | Verified], names: Sequence[str], with_drafts: bool) -> list[Row]:
    """A batch as the log writes it: (request, tokens, context before, and drafts where it has them), in batch order.
    names: of requests, by row."""
    rows: list[Row] = []
    for part in parts:
        if isinstance(part, Chunk):
            row = names[part.track.request.id], part.tokens, part.prefix
            rows.append((*row, 0) if with_drafts else row)
        elif isinstance(part, Verified):
            rows.append((names[part.track.request.id], part.tokens, part.context, part.drafts))
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
        step = row.get("before_step")
        if step is not None and not _is_whole(step, 0):
            raise ExperimentError(f"{where}: before_step: found {shown(step)}, expected the number of a step, from 0")
        before_step = -1 if step is None else step
        requests.append(LoggedRequest(str(row["id"]), round(added_s * 1e9), before_step, row["prompt"], row["output"]))
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
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise ExperimentError(f"{where}: reqs: found {shown(rows)}, expected lists of request, tokens, context")
        lengths = {len(row) for row in rows} | ({len(steps[-1]["reqs"][0])} if steps and steps[-1]["reqs"] else set())
        if lengths and lengths not in ({PLAIN}, {SPECULATING}):
            raise ExperimentError(
                f"{where}: reqs: found {shown(rows)}, expected lists of request, tokens, context, and with speculation "
                "drafts scheduled, drafts accepted, tokens appended, alike in all steps"
            )
        for name in ("reqs", "proposed"):
            for row in step.get(name, ()):
                if not isinstance(row, list) or len(row) < 2 or not all(_is_whole(value, 0) for value in row[1:]):
                    raise ExperimentError(f"{where}: {name}: found {shown(row)}, expected an id and whole numbers")
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
