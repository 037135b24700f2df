"""The request inspector's data: for chosen requests, when each waited, which iterations it rode in, what stalled it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrics.drawing.text_tables import format_value
from metrics.measures.summary import STALL_BOUND_S
from metrics.measures.token_times import TokenTimes
from metrics.run_folder.tables import RunTables

Ints = NDArray[np.int64]

MOST_REQUESTS = 240
WORST_GAPS = 4
"""Longest gaps of a request that are explained, besides those above the stall bound."""
MOST_EXPLAINED = 12


def inspected_requests(run: RunTables) -> dict[str, Any]:
    """The requests that are worth a look: the slowest by each measure, those that did not finish, and some others."""
    inspector = _Inspector(run)
    rows = inspector.chosen()
    total = run.rows("requests")
    return {
        "of": total,
        "how": "all requests"
        if len(rows) == total
        else "the slowest to first token, by longest gap and end to end; those that did not finish; and an even sample",
        "requests": [inspector.describe(row) for row in rows.tolist()],
    }


class _Inspector:
    """Columns of a run that describing one request after another needs."""

    def __init__(self, run: RunTables) -> None:
        self.run = run
        self.tokens = TokenTimes(run)
        names = (
            "request",
            "replica",
            "rank",
            "prompt_tokens",
            "output_tokens",
            "status",
            "reason",
            "preemptions",
            "cached_tokens",
        )
        self.columns = {name: run.column("requests", name) for name in names}
        self.moments = {
            name: run.column("requests", f"{name}_s") for name in ("arrival", "admitted", "first_token", "finished")
        }
        self.iteration = {
            name: run.column("iterations", name)
            for name in ("replica", "iteration", "decodes", "chunk_tokens", "running", "waiting", "free_blocks")
        }
        self.end_ns = run.column_ns("iterations", "end_s")
        self.start_ns = run.column_ns("iterations", "start_s")
        self.planned_ns = run.column_ns("iterations", "planned_s")
        self.engine = run.engines("iterations")
        self.engine_of_request = run.engines("requests")
        self.order = np.lexsort((self.end_ns, self.engine))
        self.chunks = run.chunks()
        self.chunk_order = np.argsort(self.chunks["request"], kind="stable")
        self.chunk_request = self.chunks["request"][self.chunk_order]
        self.chunk_of_row = np.searchsorted(self.chunks["row"], np.arange(len(self.end_ns) + 1))
        self.by_engine = {
            int(engine): self.order[self.engine[self.order] == engine] for engine in np.unique(self.engine)
        }

    def chosen(self) -> Ints:
        total = len(self.columns["request"])
        if total <= MOST_REQUESTS:
            return np.arange(total)
        ttft = np.nan_to_num(self.moments["first_token"] - self.moments["arrival"], nan=-1)
        e2e = np.nan_to_num(self.moments["finished"] - self.moments["arrival"], nan=-1)
        ended_badly = np.flatnonzero(self.columns["status"] != "finished")[:40]
        longest = self._longest_gaps()
        parts = [np.argsort(-ttft, kind="stable")[:60], np.argsort(-longest, kind="stable")[:60]]
        parts += [np.argsort(-e2e, kind="stable")[:30], ended_badly, np.linspace(0, total - 1, 50).astype(np.int64)]
        return np.unique(np.concatenate(parts))

    def _longest_gaps(self) -> Ints:
        """Per request the longest time between two of its tokens, from running maxima over its segments."""
        tokens = self.tokens
        longest = np.zeros(len(self.columns["request"]), dtype=np.int64)
        for first, last, row in zip(tokens.first.tolist(), tokens.last.tolist(), tokens.request_row.tolist()):
            if last - first > 1:
                longest[row] = max(longest[row], int(tokens.gaps_ns[first + 1 : last].max()))
        np.maximum.at(longest, tokens.request_row[tokens.bridges], tokens.bridge_ns)
        return longest

    def describe(self, row: int) -> dict[str, Any]:
        """One request: facts, story, chunks it was prefilled in, gaps between its tokens (microseconds)."""
        times = self.tokens.of_request(row)
        gaps = np.diff(times)
        facts = {name: _plain(column[row]) for name, column in self.columns.items()}
        chunks = self._chunks_of(int(facts["request"]))
        story = [*self._waiting(row), *self._prefill(row, chunks), *self._stalls(row, times, gaps), *self._end(row)]
        return {
            **facts,
            **{f"{name}_s": _plain(column[row]) for name, column in self.moments.items()},
            "longest_gap_s": float(gaps.max() / 1e9) if len(gaps) else None,
            "story": story,
            "chunks": [
                [
                    int(self.iteration["iteration"][r]),
                    int(self.start_ns[r] // 1000),
                    int(self.end_ns[r] // 1000),
                    tokens,
                    prefix,
                ]
                for r, tokens, prefix in chunks
            ],
            "first_us": int(times[0] // 1000) if len(times) else None,
            "gaps_us": np.diff(times // 1000).tolist(),
        }

    def _chunks_of(self, request: int) -> list[tuple[int, int, int]]:
        low, high = np.searchsorted(self.chunk_request, [request, request + 1])
        own = np.sort(self.chunk_order[low:high])
        columns = (self.chunks["row"][own], self.chunks["tokens"][own], self.chunks["prefix"][own])
        return list(zip(*(column.tolist() for column in columns)))

    def _waiting(self, row: int) -> list[str]:
        arrival, admitted = self.moments["arrival"][row], self.moments["admitted"][row]
        if np.isnan(admitted):
            return [f"Arrived at {arrival:.3f} s and was never scheduled."]
        waited = admitted - arrival
        text = f"Arrived at {arrival:.3f} s, first scheduled {_s(waited)} later"
        during = self._between(row, round(arrival * 1e9), round(admitted * 1e9))
        if waited < 0.001 or not len(during):
            return [text + "."]
        running, waiting = int(self.iteration["running"][during].max()), int(self.iteration["waiting"][during].max())
        blocks = self.run.config.get("num_blocks")
        memory = ""
        if blocks:
            least = int(self.iteration["free_blocks"][during].min())
            memory = f", at least {least / blocks:.0%} of the KV blocks free"
        return [
            f"{text}, while {len(during)} iterations ran: up to {running} requests running and {waiting} waiting"
            f"{memory}."
        ]

    def _prefill(self, row: int, chunks: list[tuple[int, int, int]]) -> list[str]:
        if not chunks:
            return []
        rows = [r for r, _, _ in chunks]
        cached = int(self.columns["cached_tokens"][row])
        text = f"Prefilled in {len(chunks)} chunk{'s' if len(chunks) > 1 else ''} "
        text += f"({sum(tokens for _, tokens, _ in chunks)} tokens) in iterations {self._named(rows)}"
        first, last = self.start_ns[rows[0]] / 1e9, self.end_ns[rows[-1]] / 1e9
        text += f", from {first:.3f} to {last:.3f} s"
        between = self._between(row, int(self.start_ns[rows[0]]), int(self.end_ns[rows[-1]]))
        without = len(set(between.tolist()) - set(rows))
        if without:
            text += f"; {without} iterations in between ran without it"
        return [text + (f"; {cached} tokens came from the prefix cache." if cached else ".")]

    def _stalls(self, row: int, times: Ints, gaps: Ints) -> list[str]:
        """The longest gaps and those above the stall bound, in order, each with what ran in it."""
        if not len(gaps):
            return []
        bound = round(STALL_BOUND_S * 1e9)
        above = np.flatnonzero(gaps > bound)
        worst = np.argsort(-gaps, kind="stable")[:WORST_GAPS]
        typical = float(np.median(gaps))
        worst = worst[gaps[worst] > 1.5 * typical]
        shown = np.unique(np.concatenate([above[np.argsort(-gaps[above], kind="stable")][:MOST_EXPLAINED], worst]))
        lines = [f"{len(times)} tokens, median gap {_s(typical / 1e9)}, {len(above)} gaps above {_s(STALL_BOUND_S)}."]
        lines += [self._why(row, int(gap), int(times[gap]), int(times[gap + 1])) for gap in shown.tolist()]
        if len(above) > MOST_EXPLAINED:
            lines.append(f"{len(above) - MOST_EXPLAINED} more gaps above the bound are not told one by one.")
        return lines

    def _why(self, row: int, token: int, from_ns: int, to_ns: int) -> str:
        """What ran between two tokens of a request: its own iterations carry others' chunks, or run without it."""
        text = f"Token {token + 2} came {_s((to_ns - from_ns) / 1e9)} after the one before (at {to_ns / 1e9:.3f} s): "
        during = self._between(row, from_ns, to_ns)
        if not len(during):
            return text + "no iteration ended in between on its replica."
        request = int(self.columns["request"][row])
        own: list[int] = []
        without: list[int] = []
        for r in during.tolist():
            (own if self.end_ns[r] == to_ns else without).append(r)
        parts = []
        recomputed = [c for r in during.tolist() for c in self._chunks_in(r) if c[0] == request]
        if recomputed:
            again = sum(tokens for _, tokens in recomputed)
            parts.append(f"it had been preempted and {again} tokens were prefilled again")
        if without:
            parts.append(f"{len(without)} iterations ran without it{self._others(without, request)}")
        if own:
            parts.append(f"the one that delivered it took {_s(self._took(own[-1]))}{self._others(own, request)}")
        return text + "; ".join(parts) + "."

    def _others(self, rows: list[int], request: int) -> str:
        """`, prefilling 2048 tokens of requests 4, 7 and 9`."""
        tokens: dict[int, int] = {}
        for r in rows:
            for other, count in self._chunks_in(r):
                if other != request:
                    tokens[other] = tokens.get(other, 0) + count
        if not tokens:
            return ""
        largest = sorted(tokens, key=lambda other: -tokens[other])[:4]
        names = ", ".join(map(str, largest)) + (" and others" if len(tokens) > 4 else "")
        return f", prefilling {sum(tokens.values()):,} tokens of request{'s' if len(tokens) > 1 else ''} {names}"

    def _end(self, row: int) -> list[str]:
        status, at = self.columns["status"][row], self.moments["finished"][row]
        if status == "finished":
            return [f"Finished at {at:.3f} s, {_s(at - self.moments['arrival'][row])} after it arrived."]
        return [f"Ended at {at:.3f} s: {status} ({self.columns['reason'][row]})."]

    def _between(self, row: int, from_ns: int, to_ns: int) -> Ints:
        """Iterations of the request's replica that ended in (from, to], in order."""
        rows = self.by_engine.get(int(self.engine_of_request[row]), np.empty(0, np.int64))
        ends = self.end_ns[rows]
        low, high = np.searchsorted(ends, [from_ns, to_ns], "right")
        return np.asarray(rows[low:high])

    def _chunks_in(self, r: int) -> list[tuple[int, int]]:
        low, high = self.chunk_of_row[r], self.chunk_of_row[r + 1]
        return list(zip(self.chunks["request"][low:high].tolist(), self.chunks["tokens"][low:high].tolist()))

    def _took(self, r: int) -> float:
        return float(self.end_ns[r] - self.start_ns[r]) / 1e9

    def _named(self, rows: list[int]) -> str:
        numbers = [str(self.iteration["iteration"][r]) for r in rows]
        return ", ".join(numbers) if len(numbers) <= 6 else f"{', '.join(numbers[:3])} ... {numbers[-1]}"


def _s(seconds: float) -> str:
    return format_value("x_s", float(seconds))


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value != value else value
