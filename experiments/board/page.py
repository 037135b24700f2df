"""The board as Markdown, from its plain data alone: whoever has board.json can write board.md again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

HEAD = """# Fidelity board

Every real engine run that the project carries, replayed with the costs that ship. Nothing is fitted for this page, and
every accuracy figure of README and guides is from here or names its own command. Made by

```
python -m experiments board                    # writes docs/evidence/board.md and docs/evidence/board.json again
python -m experiments board --against COMMIT   # what a change makes better, what worse
```

Errors are predicted over measured, minus 1. *Others* is what another project published for the same run.
"""
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
SHOWN = ("mean", "p50", "p90", "p99")


def page(board: Mapping[str, Any]) -> str:
    """The whole page."""
    parts = [HEAD, *_short(board), "## Runs, request by request\n"]
    parts += [_run(entry) for entry in board["runs"]]
    if board["engines"]:
        parts.append(_engines(board))
    if board["ranking"]:
        parts.append(_ranking(board["ranking"]))
    parts.append(_parity(board["parity"]))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _short(board: Mapping[str, Any]) -> Iterable[str]:
    rows = []
    for entry in board["runs"]:
        errors = [percent(error_of(entry, f"{key}_mean_ms")) for key in NAMES]
        others = []
        for tool, values in entry["others"].items():
            means = [percent(values[f"{key}_mean_ms"] / entry["measured"][f"{key}_mean_ms"] - 1) for key in NAMES]
            others.append(f"{tool}: {', '.join(means)}")
        name = _title(entry)
        rows.append(
            (name, *errors, percent(error_of(entry, "output_tokens_per_s")), "; ".join(others), entry["calibrated"])
        )
    heads = (
        "run",
        *(f"{name} mean" for name in NAMES.values()),
        "throughput",
        "others (TTFT, TPOT, E2E)",
        "fitted on this run",
    )
    yield table(heads, rows)
    ranked = board["ranking"]
    if ranked:
        decided, agreed = (sum(row[key] for row in ranked) for key in ("decided", "agreed"))
        asked = [row["winner_named"] for row in ranked if row["winner_named"] is not None]
        noted = "; read the note there" if any(row["note"] for row in ranked) else ""
        yield f"Ranking of policies served live: {agreed} of {decided} decided pairs in the live order."
        known = f"{len(asked)} of {len(ranked)} questions"
        yield f"The live repeats single out a winner in {known}, and it is named in {sum(asked)}{noted}.\n"
    steps, matched = (sum(row[key] for row in board["parity"]) for key in ("steps", "matched"))
    yield f"Scheduler: {matched:,} of {steps:,} steps of real vLLM logs planned alike.\n"


def _run(entry: Mapping[str, Any]) -> str:
    rows = []
    for key, name in NAMES.items():
        for statistic in SHOWN:
            column = f"{key}_{statistic}_ms"
            others = [percent(values[column] / entry["measured"][column] - 1) for values in entry["others"].values()]
            rows.append((f"{name} {statistic}", *_pair(entry, column, "ms"), *others))
    rows.append(("output tokens/s", *_pair(entry, "output_tokens_per_s", ""), *("" for _ in entry["others"])))
    title = f"### {_title(entry)}"
    words = (
        f"Run `{entry['run']}`: {entry['load']}. Costs: {entry['costs']}. Fitted on this run: {entry['calibrated']}."
    )
    heads = ("statistic", "measured", "predicted", "error", *entry["others"])
    return f"{title}\n\n{words}\n\n{table(heads, rows)}"


def _title(entry: Mapping[str, Any]) -> str:
    name, _, variant = entry["run"].partition(", ")
    return f"{entry['engine']}, {entry['model']}, {entry['tp']} x {entry['gpu']}{f', {variant}' if variant else ''}"


def _engines(board: Mapping[str, Any]) -> str:
    rows = []
    for group in board["engine_groups"]:
        errors = [percent(group["median_error"][key], signed=False) for key in NAMES]
        band = f"{group['ttft_in_band']} of {group['rows']}" if group["ttft_in_band"] is not None else ""
        rows.append((group["group"], group["half"], str(group["rows"]), *errors, band))
    heads = ("engine", "half", "rows", *(f"{name} median error" for name in NAMES.values()), "TTFT in band")
    return (
        "## Engines under load, means alone\n\n"
        "Closed loops of a fixed concurrency, and constant rates behind HTTP; single rows are in board.json. Terms\n"
        "of named engines were fitted on half a; half b judges. The TTFT of a closed loop depends on how first\n"
        "arrivals spread, so it is predicted as a band.\n\n" + table(heads, rows)
    )


def _ranking(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        orders = (" < ".join(row[key]) for key in ("live_order", "simulated_order"))
        named = {None: "none is known", True: "yes", False: "no"}[row["winner_named"]]
        asked = (row["study"], f"{row['load']:.0%}", row["statistic"])
        lines.append((*asked, *orders, f"{row['agreed']} of {row['decided']}", named))
    heads = ("study", "load", "statistic", "live, best first", "simulated", "decided pairs right", "winner named")
    notes = [f"**{name}.** {note}\n\n" for name, note in {row["study"]: row["note"] for row in rows}.items() if note]
    return (
        "## Does the simulator name the right winner?\n\n"
        "Policies served live by this project's executor, three repeats each; costs were measured and fitted before\n"
        "the live runs. A pair is decided where the ranges of its repeats do not meet; a winner is known where its\n"
        "repeats lie below all others.\n\n" + "".join(notes) + table(heads, lines)
    )


def _parity(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [(row["log"], f"{row['steps']:,}", f"{row['matched']:,}") for row in rows]
    return "## Scheduler parity\n\n" + table(("log of vLLM 0.32 on a CPU", "steps", "planned alike"), lines)


def _pair(entry: Mapping[str, Any], column: str, unit: str) -> tuple[str, str, str]:
    values = (entry["measured"][column], entry["predicted"][column])
    return (*(f"{value:,.4g} {unit}".strip() if value < 1e4 else f"{value:,.0f} {unit}".strip() for value in values),
            percent(error_of(entry, column)))  # fmt: skip


def error_of(entry: Mapping[str, Any], column: str) -> float:
    return float(entry["predicted"][column] / entry["measured"][column] - 1)


def percent(value: float, signed: bool = True) -> str:
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"
