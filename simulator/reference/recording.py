"""The tables of a run, row by row: plain lists of what happened, made into columns once at the end.

A request is a cohort of its own here: its number is the request's, its steps are the tokens sampled for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from policies.work.request import Ns
from simulator.reference.books import Job

if TYPE_CHECKING:
    from metrics import RunTables
    from simulator.reference.replica import Flight

TIMES = ("planned", "start", "end", "host_before", "host_after", "device")


class Recording:
    """Rows of all tables, as dictionaries with times in nanoseconds (-1 for never). places: replica and rank of each
    engine, by number."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self.rows: dict[str, list[dict[str, Any]]] = {
            name: [] for name in ("requests", "iterations", "tokens", "segments", "stages")
        }

    def iteration(self, engine: int, flight: Flight, end_ns: Ns, inside: bool) -> None:
        """A batch that has just been delivered."""
        batch = flight.batch
        where = {**self._place(engine), "iteration": batch.number}
        for stage, (start, end, send) in enumerate(flight.stages):
            row = {**where, "stage": stage, "start_s": start / 1e9, "end_s": end / 1e9, "send_s": send / 1e9}
            self.rows["stages"].append(row)
        shape = batch.shape
        times = (batch.planned_ns, flight.stages[0][0], end_ns, flight.before_ns, flight.after_ns, sum(flight.busy_ns))
        chunks = [row for row in batch.rows if row.chunk]
        decodes = [row for row in batch.rows if not row.chunk]
        self.rows["iterations"].append(
            {
                **where,
                **{f"{name}_s": ns / 1e9 for name, ns in zip(TIMES, times)},
                "chunk_tokens": sum(row.tokens for row in chunks),
                "num_chunks": len(chunks),
                "decodes": shape.decodes,
                "decode_context_total": shape.decode_context_total,
                "decode_context_max": shape.decode_context_max,
                "dummy_tokens": shape.dummy_tokens,
                "sampled": shape.sampled,
                "executed_rows": shape.executed_rows,
                "preempted": batch.preempted,
                "running": flight.running,
                "waiting": flight.waiting,
                "free_blocks": flight.free_blocks,
                "cached_tokens": batch.cached_tokens,
                "inside": inside,
                "wall_s": float("nan"),
                "cpu_s": float("nan"),
                "activated_experts": float("nan"),
                "chunks": [
                    {"request": row.job.request.id, "tokens": row.tokens, "prefix": row.prefix, "samples": row.samples}
                    for row in chunks
                ],
                "cohorts": [
                    {"cohort": row.job.request.id, "step": len(row.job.steps) - 1, "size": 1} for row in decodes
                ],
                "draft_tokens": 0,
                "draft_context_total": 0,
                "drafting": 0,
                "drafts": [],
            }
        )

    def request(self, job: Job, engine: int) -> None:
        """A request that has just ended."""
        request = job.request
        times = {"admitted": job.admitted_ns, "first_token": job.first_token_ns, "finished": job.finished_ns}
        self.rows["requests"].append(
            {
                "request": request.id,
                **self._place(engine),
                "arrival_s": request.arrival_ns / 1e9,
                "prompt_tokens": request.prompt_tokens,
                "output_tokens": job.delivered,
                "max_output_tokens": request.max_output_tokens,
                "status": job.status,
                "reason": job.reason,
                **{f"{name}_s": ns / 1e9 if ns >= 0 else float("nan") for name, ns in times.items()},
                "preemptions": job.preemptions,
                "cached_tokens": job.cached,
                "priority": request.priority,
                "session": request.session,
                "slo": request.slo,
                "tenant": request.tenant,
                "program": request.program if request.program != request.session else None,
            }
        )
        where = {**self._place(engine), "cohort": request.id}
        for first, end in job.segments:
            self.rows["segments"].append({"request": request.id, **where, "from_step": first, "to_step": end})
        # Its steps still in flight are added to this list when they are done.
        self.rows["tokens"].append({**where, "steps": job.steps})

    def _place(self, engine: int) -> dict[str, int]:
        return dict(zip(("replica", "rank"), self.places[engine]))

    def tables(self) -> RunTables:
        """The tables of the run, as the fast path writes them but for the numbers of cohorts."""
        import pyarrow as pa

        from metrics import RunTables
        from metrics.run_folder.columns import schema

        tokens = [
            {**{name: row[name] for name in ("replica", "rank", "cohort")}, "step": step, "time_s": ns / 1e9}
            for row in self.rows["tokens"]
            for step, ns in enumerate(row["steps"])
        ]
        requests = sorted(self.rows["requests"], key=lambda row: row["request"])
        segments = sorted(self.rows["segments"], key=lambda row: row["request"])
        rows = {**self.rows, "requests": requests, "segments": segments, "tokens": tokens}
        return RunTables({name: pa.Table.from_pylist(rows[name], schema=schema(name)) for name in rows})
