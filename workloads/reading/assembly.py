"""From understood cells to the columns of a trace: units, clocks, order, failures and give-ups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workloads.cells import EPOCH_S, MAX_SPAN_S, MAX_TIME_S
from workloads.column_names import NS_PER_UNIT, Field, plain
from workloads.ragged import RaggedColumn
from workloads.reading.chunk import place
from workloads.trace import TraceError

Cells = dict[str, Any]
"""Meaning -> float64 column (NaN: nothing stands there), int64 nanoseconds (dates), list of texts, or RaggedColumn."""

HASH_TOKENS = (512, 16, 32, 64, 128, 256, 1024, 2048)
"""Tokens per prefix hash that files use, Mooncake's first: tried in this order where a file does not say."""

SLOW_GAP_S, QUICK_GAP_S = 20.0, 0.002
"""Mean gaps that few services have: above the first, times in ms may have been read as s; below the second, s as ms."""
SLOW_LOAD, QUICK_LOAD = 10.0, 1e6
"""Tokens per second, prompts and answers, between which nearly every recorded service lies."""
SHORT_GAP_MS = 100.0
DECIDING_ROWS = 1000
"""Of the first so many is asked which unit their times are in: the same ones, whatever window is read."""
DOUBTED_FROM = 10
"""Fewer requests have no rate to speak of."""


@dataclass(frozen=True)
class Options:
    """How a file is read; kind: its format, once that is known."""

    path: str
    skip: bool = False
    sort: bool = False
    hash_tokens: int | None = None
    kind: str = ""


def assemble(
    cells: Cells, places: NDArray[np.int64], found: dict[str, Field], options: Options, notes: list[str]
) -> dict[str, Any]:
    """The arguments of a Trace, all but its name and provenance; and elapsed_ns, how long answers took (or None).

    places: (row, line) of each row. notes: what was said on the way. Raises TraceError that names the cell.
    """
    return _Assembly(cells, places, found, options, notes).columns()


def out_of_order(options: Options, field: Field, where: tuple[int, int], time: Any, before: Any) -> TraceError:
    """The complaint about an arrival before that of the row above."""
    return TraceError(
        f"{options.path}, {place(*where)}, column {field.column!r}: found {_number_text(time)}, expected a time not "
        f"before that of the row above ({_number_text(before)}); sort the file, or pass --on-unsorted sort"
    )


def _number_text(number: Any) -> str:
    """A number as the file had it; dates were kept as whole nanoseconds since 1970."""
    return str(np.datetime64(int(number), "ns")) if isinstance(number, np.int64) else f"{number:.15g}"


def _seconds(span_s: float) -> str:
    return f"{span_s:,.0f}" if span_s >= 100 else f"{span_s:.3g}"


class Calls(NamedTuple):
    """Of calls that name their parents: session and turn of each, and its parent's row (-1: none)."""

    session: list[str | None]
    turn: NDArray[np.int64]
    parent_row: NDArray[np.int64]


def _filled(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Times with each missing one as the last before it (0 where there is none)."""
    known = ~np.isnan(times)
    last = np.maximum.accumulate(np.where(known, np.arange(len(times)), -1))
    filled: NDArray[np.float64] = np.where(
        last >= 0, times[np.maximum(last, 0)], np.nanmin(times) if known.any() else 0
    )
    return filled


class _Assembly:
    def __init__(
        self,
        cells: Cells,
        places: NDArray[np.int64],
        found: dict[str, Field],
        options: Options,
        notes: list[str],
    ) -> None:
        self.cells = cells
        self.found = found
        self.options = options
        self.places = places
        self.notes = list(notes)
        self.rows = np.arange(len(cells["prompt_tokens"]))  # row of the trace -> row of the cells
        self.order = self.rows  # row of the trace -> its row before sorting
        self.unit = found["arrival"].unit if "arrival" in found and found["arrival"].unit else "s"

    def columns(self) -> dict[str, Any]:
        self._drop_failures()
        arrival_ns = self._arrival_ns()
        delayed = self._delayed(arrival_ns)
        arrival_ns = self._sorted(arrival_ns)
        output_tokens = self._whole("output_tokens")
        declared = self.cells.get("max_output_tokens")
        limit = output_tokens if declared is None else self._whole("max_output_tokens", output_tokens)
        hashes, hash_tokens = self._hashes()
        after_row, think_ns, joins = self._closed_loop()
        if delayed is not None:
            after_row, think_ns = self._in_order(*delayed)
        calls = self._calls()
        return {
            "arrival_ns": arrival_ns,
            "prompt_tokens": self._whole("prompt_tokens"),
            "output_tokens": output_tokens,
            "max_output_tokens": limit,
            "prefix_hashes": hashes,
            "hash_tokens": hash_tokens,
            "session": self._texts("session") if calls is None else calls.session,
            "turn": self._optional("turn", 0) if calls is None else calls.turn,
            "priority": self._optional("priority", 0),
            "slo": self._texts("slo"),
            "acceptance": np.nan_to_num(self.cells["acceptance"][self.rows]) if "acceptance" in self.cells else None,
            "tenant": self._texts("tenant"),
            "program": self._texts("program"),
            "predicted_tokens": self._optional("predicted_tokens", 0),
            "abort_ns": self._abort_ns(arrival_ns),
            "prompt_ids": self._prompt_ids(),
            "after_row": after_row,
            "joins": joins,
            "parent_row": None if calls is None else calls.parent_row,
            "think_ns": think_ns,
            "elapsed_ns": self._time_ns("elapsed") if "elapsed" in self.cells else None,
            "source_format": self.options.kind,
            "notes": tuple(self.notes),
        }

    def _complain(self, meaning: str, wrong: NDArray[np.bool_], expected: str, mend: str = "") -> None:
        """Raises for the first wrong one of self.rows, if any."""
        if not wrong.any():
            return
        index = self.rows[int(np.argmax(wrong))]
        row, line = self.places[index].tolist()
        cell = self.cells[meaning][int(index)]
        shown = _number_text(cell) if isinstance(cell, np.generic) else list(cell)
        raise TraceError(
            f"{self.options.path}, {place(row, line)}, column {self.found[meaning].column!r}: found {str(shown)[:60]}, "
            f"expected {expected}{mend and '; ' + mend}"
        )

    def _drop_failures(self) -> None:
        """BurstGPT marks a failed request by a response of zero tokens."""
        failed = self.cells["output_tokens"] == 0
        if failed.all() and len(failed):
            raise TraceError(
                f"{self.options.path}: found only failed requests (0 response tokens), expected some with an answer"
            )
        if failed.any():
            self.rows = np.flatnonzero(~failed)
            self.order = np.arange(len(self.rows))
            count = f"{int(failed.sum())} of {len(failed)} requests"
            self.notes.append(f"{count} left out: they failed (0 response tokens).")

    def _arrival_ns(self) -> NDArray[np.int64]:
        times = self.cells.get("arrival")
        if times is None:
            return np.zeros(len(self.rows), np.int64)
        times = times[self.rows]
        if "delay" in self.cells and np.isnan(times).any():
            times = _filled(times)
        if times.dtype == np.int64:
            since: NDArray[np.int64] = times - times.min()
            self._complain("arrival", since > MAX_SPAN_S * 1e9, "all dates within ten years of each other")
            return since
        unit = self._unit(times[:DECIDING_ROWS])
        per_s = NS_PER_UNIT["s"] / NS_PER_UNIT[unit]
        self._complain("arrival", times > MAX_TIME_S * per_s, f"a time of at most {MAX_TIME_S * per_s:.0e} {unit}")
        if self.options.kind == "vllm" or times.min() >= EPOCH_S * per_s:
            times = times - times.min()
        self._complain("arrival", times > MAX_SPAN_S * per_s, "a time within ten years of the first")
        arrival_ns: NDArray[np.int64] = np.rint(times * NS_PER_UNIT[unit]).astype(np.int64)
        return arrival_ns

    def _unit(self, times: NDArray[np.float64]) -> str:
        """Said by an option or the name, else by the size of a clock reading, else what the format has unless the
        times look like another unit's (see `_looks`)."""
        field = self.found["arrival"]
        if field.unit:
            return field.unit
        typical = float(np.median(times))
        for unit, least in (("ns", 1e17), ("us", 1e14), ("ms", 1e11)):
            if typical >= least:
                self.notes.append(
                    f"Column {field.column!r} read as {unit} since 1970, because its values are about {typical:.1e}."
                )
                return unit
        usual, other = ("ms", "s") if self.options.kind == "mooncake" else ("s", "ms")
        span, count = float(times.max() - times.min()), len(times)
        if not span or self.options.kind in ("vllm", "vllm_steps", "vidur"):
            return usual
        gap = span / (count - 1)
        fractions = bool((times != np.floor(times)).any())
        looks = {unit: self._looks(unit, gap, fractions) for unit in (usual, other)}
        # Few requests have no rate to speak of; whole milliseconds with a fraction still are seconds.
        sure = count >= DOUBTED_FROM or (other == "s" and fractions)
        documented = self.options.kind == "burstgpt"
        takes_other = sure and not documented and looks[other] - looks[usual] > (other == "ms")
        unit = other if takes_other else usual
        gap_s = gap / (1 if unit == "s" else 1000)
        doubtful = count >= DOUBTED_FROM and (gap_s > SLOW_GAP_S if unit == "s" else gap_s < QUICK_GAP_S)
        if takes_other or doubtful:
            rate = f"one every {_seconds(gap_s)} s" if gap_s > 1 else f"{_seconds(1 / gap_s)} a second"
            left = "ms" if unit == "s" else "s"
            self.notes.append(
                f"Column {field.column!r} read as {unit}: {count:,} requests in {_seconds(gap_s * (count - 1))} s, "
                f"{rate}. If its times are in {left}, pass --time-unit {left} or name it {plain(field.column)}_{left} "
                f"({unit} where this is right)."
            )
        return unit

    def _looks(self, unit: str, gap: float, fractions: bool) -> int:
        """How much like a service's trace the times are in this unit: its rate of requests, its tokens per second; and
        clocks that count milliseconds seldom have a fraction when gaps are short."""
        gap_s = gap / (1 if unit == "s" else 1000)
        rows = self.rows[:DECIDING_ROWS]
        tokens = float(np.mean(self.cells["prompt_tokens"][rows] + self.cells["output_tokens"][rows]))
        seldom = unit == "ms" and fractions and gap < SHORT_GAP_MS
        usual_rate, usual_load = QUICK_GAP_S <= gap_s <= SLOW_GAP_S, SLOW_LOAD <= tokens / gap_s <= QUICK_LOAD
        return int(usual_rate) + int(usual_load) - int(seldom)

    def _sorted(self, arrival_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        back = np.diff(arrival_ns, prepend=arrival_ns[:1]) < 0
        if not back.any():
            return arrival_ns
        if not self.options.sort:
            at = int(np.argmax(back))
            before, time = self.cells["arrival"][self.rows[at - 1]], self.cells["arrival"][self.rows[at]]
            where = tuple(self.places[self.rows[at]].tolist())
            raise out_of_order(self.options, self.found["arrival"], where, time, before)
        order = np.argsort(arrival_ns, kind="stable")
        self.rows, self.order = self.rows[order], order
        self.notes.append(f"Sorted by arrival: {int(back.sum())} rows came before the row above them.")
        return arrival_ns[order]

    def _whole(self, meaning: str, missing: NDArray[np.int64] | int = 0) -> NDArray[np.int64]:
        values = self.cells[meaning][self.rows]
        return np.where(np.isnan(values), missing, np.nan_to_num(values)).astype(np.int64)

    def _optional(self, meaning: str, missing: int) -> NDArray[np.int64] | None:
        return self._whole(meaning, missing) if meaning in self.cells else None

    def _texts(self, meaning: str) -> list[str | None] | None:
        texts = self.cells.get(meaning)
        return None if texts is None else [texts[row] for row in self.rows.tolist()]

    def _time_ns(self, meaning: str) -> NDArray[np.int64]:
        """A span or moment in ns since the trace's start; -1 where nothing stands."""
        values = self.cells[meaning][self.rows]
        per_unit = NS_PER_UNIT[self.found[meaning].unit or self.unit]
        self._complain(meaning, values * (per_unit / 1e9) > MAX_SPAN_S, "a time below ten years")
        return np.where(np.isnan(values), -1, np.rint(np.nan_to_num(values) * per_unit)).astype(np.int64)

    def _abort_ns(self, arrival_ns: NDArray[np.int64]) -> NDArray[np.int64] | None:
        if "abort" not in self.cells and "timeout" not in self.cells:
            return None
        never = np.iinfo(np.int64).max
        abort_ns = np.full(len(self.rows), never)
        if "abort" in self.cells:
            given = self._time_ns("abort")
            self._complain("abort", (given >= 0) & (given < arrival_ns), "a moment after the request's arrival")
            abort_ns = np.where(given >= 0, given, abort_ns)
        if "timeout" in self.cells:
            given = self._time_ns("timeout")
            abort_ns = np.where(given >= 0, np.minimum(abort_ns, arrival_ns + given), abort_ns)
        return np.where(abort_ns == never, -1, abort_ns)

    def _hashes(self) -> tuple[RaggedColumn | None, int]:
        if "prefix_hashes" not in self.cells:
            return None, 0
        hashes: RaggedColumn = self.cells["prefix_hashes"]
        whole = len(self.rows) == len(hashes) and bool((np.diff(self.rows) == 1).all())
        ordered = hashes if whole else hashes.take(self.rows)
        hash_tokens = self._hash_tokens(ordered.lengths)
        most = -(-self.cells["prompt_tokens"][self.rows] // hash_tokens)
        self._complain("prefix_hashes", ordered.lengths > most, f"at most one hash per {hash_tokens} prompt tokens")
        return ordered, hash_tokens

    def _hash_tokens(self, lengths: NDArray[np.int64]) -> int:
        """Said by an option or a column, else the size that gives every prompt the hashes it has."""
        if self.options.hash_tokens is not None:
            return self.options.hash_tokens
        if "hash_tokens" in self.cells:
            sizes = self.cells["hash_tokens"][self.rows]
            self._complain("hash_tokens", ~(sizes == sizes[0]), f"the same number in every row ({sizes[0]:g})")
            if not np.isnan(sizes[0]):
                return int(sizes[0])
        has = lengths > 0
        prompts, lengths = self.cells["prompt_tokens"][self.rows][has], lengths[has]
        fits = [size for size in HASH_TOKENS if (-(-prompts // size) == lengths).all()]
        fits += [size for size in HASH_TOKENS if size not in fits and (prompts // size == lengths).all()]
        chosen = fits[0] if fits else HASH_TOKENS[0]
        if len(prompts) and (chosen != HASH_TOKENS[0] or self.options.kind != "mooncake"):
            why = "as their number and the prompts' lengths say" if fits else "as in Mooncake's traces"
            also = f" ({' or '.join(map(str, fits[1:]))} would fit too)" if fits[1:] else ""
            self.notes.append(
                f"Each of {self.found['prefix_hashes'].column!r} is taken for {chosen} prompt tokens, {why}{also}; "
                "--hash-tokens N says otherwise."
            )
        return chosen

    def _prompt_ids(self) -> RaggedColumn | None:
        if "prompt_ids" not in self.cells:
            return None
        ids: RaggedColumn = self.cells["prompt_ids"].take(self.rows)
        if not ids.lengths.any():
            return None
        wrong = (ids.lengths > 0) & (ids.lengths != self.cells["prompt_tokens"][self.rows])
        self._complain("prompt_ids", wrong, "as many ids as the row has prompt tokens")
        return ids

    def _delayed(self, arrival_ns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Rows that come a delay after their session's last answer, as aiperf's traces have them: the row before and
        the delay, -1 for others. Their arrivals become the earliest possible."""
        if "delay" not in self.cells or "arrival" not in self.cells:
            return None
        values = self.cells["delay"][self.rows]
        delay_ns = np.rint(np.nan_to_num(values, nan=-1.0) * NS_PER_UNIT[self.found["delay"].unit or "ms"])
        self._complain("delay", delay_ns > MAX_SPAN_S * 1e9, "a time below ten years")
        times = self.cells["arrival"][self.rows]
        timeless = np.isnan(times) if times.dtype != np.int64 else np.zeros(len(times), bool)
        after, waits = np.full(len(self.rows), -1, np.int64), np.full(len(self.rows), -1, np.int64)
        names, last = self.cells["session"], dict[str, int]()
        for at, row in enumerate(self.rows.tolist()):
            name = names[row]
            before = last.get(name, -1) if name is not None else -1
            if before >= 0 and delay_ns[at] >= 0:
                after[at], waits[at] = before, int(delay_ns[at])
                arrival_ns[at] = arrival_ns[before] + waits[at]
                timeless[at] = False
            if name is not None:
                last[name] = at
        self._complain("arrival", timeless, "a time, or a delay and an earlier row of its session")
        self.notes.append(f"{int((after >= 0).sum()):,} requests come a delay after their session's last answer.")
        return after, waits

    def _in_order(
        self, after: NDArray[np.int64], waits: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same once rows have been sorted by arrival."""
        place = np.full(len(after) + 1, -1, np.int64)  # the last entry answers for -1
        place[self.order] = np.arange(len(after))
        return place[after[self.order]], waits[self.order]

    def _calls(self) -> Calls | None:
        """Calls that name their parents, as Bailian's traces have them: each chain or tree of calls is a session."""
        if "parent" not in self.cells:
            return None
        calls, parents = self._texts("call") or [], self._texts("parent") or []
        row_of: dict[str, int] = {}
        session: list[str | None] = []
        parent_row, turn = np.full(len(calls), -1, np.int64), np.zeros(len(calls), np.int64)
        unknown = 0
        for row, (call, parent) in enumerate(zip(calls, parents)):
            before = row_of.get(parent, -1) if parent is not None else -1
            unknown += before < 0 and parent not in (None, "-1", "0", call)
            session.append(session[before] if before >= 0 else call)
            if before >= 0:
                parent_row[row], turn[row] = before, turn[before] + 1
            if call is not None:
                row_of[call] = row
        if unknown:
            self.notes.append(f"{unknown:,} calls name a parent that does not come before them: each begins a session.")
        return Calls(session, turn, parent_row)

    def _closed_loop(
        self,
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None, list[tuple[int, ...]] | None]:
        """A file's after_row and joins count its rows from 0; rows left out or moved are followed."""
        if "after_row" not in self.cells:
            return None, None, None
        after = self._whole("after_row", -1)
        file_rows = self.places[self.rows, 0] - 1
        self._complain("after_row", after >= file_rows, "an earlier row (counted from 0), or -1")
        new_row = np.full(int(file_rows.max()) + 2, -1, np.int64)  # the last entry answers for -1
        new_row[file_rows] = np.arange(len(self.rows))
        after = new_row[after]
        self._complain("after_row", after >= np.arange(len(after)), "a row that arrives earlier")
        think = self._time_ns("think") if "think" in self.cells else np.zeros(len(after), np.int64)
        joins = self._joins(after, file_rows, new_row) if "joins" in self.cells else None
        return after, np.maximum(think, 0), joins

    def _joins(
        self, after: NDArray[np.int64], file_rows: NDArray[np.int64], new_row: NDArray[np.int64]
    ) -> list[tuple[int, ...]]:
        wrong = np.zeros(len(after), bool)
        joins: list[tuple[int, ...]] = []
        for at, others in enumerate(self.cells["joins"].take(self.rows)):
            wrong[at] = any(not 0 <= other < file_rows[at] for other in others)
            kept = [] if wrong[at] else [int(new_row[other]) for other in others if new_row[other] >= 0]
            wrong[at] |= any(other >= at for other in kept)
            if after[at] < 0 and kept:
                after[at] = kept.pop(0)
            joins.append(tuple(other for other in dict.fromkeys(kept) if other != after[at]))
        if wrong.any():
            where = place(*self.places[self.rows[int(np.argmax(wrong))]].tolist())
            column = self.found["joins"].column
            raise TraceError(f"{self.options.path}, {where}, column {column!r}: expected earlier rows, counted from 0")
        return joins
