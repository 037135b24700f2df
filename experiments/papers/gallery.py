"""A page of all figures: each with its question, verdict, and the papers' numbers beside ours."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.errors import ExperimentError
from experiments.running.stage_files import read_json
from policies.edges.output_file import write_text

LARGEST_PNG = 150_000
"""Bytes; the narrow picture stands in for a wide one that is larger."""

HEAD = """# Gallery

Each figure below is measured by `python -m experiments run all` and can be made again from one command and one file of
`experiments/papers/figures/` or `layouts/` beside it. Papers' numbers stand beside ours only to compare: no cost model
is fitted to them. *Holds* means that all which the paper says there and we check comes out here too; *holds in part*
says how much of it does. A cost model called `roofline` knows nothing but specifications (docs/concepts/costs.md);
`fitted` ones rest on kernels measured with other software than the papers' engines had: where both stand beside each
other, neither is the paper's.
"""

CLAIMS_HEAD = (
    "Numbers that are often said about scheduling, held against our own runs (`python -m experiments claims`). Where a "
    "claim names no setting, the mildest one under which it can be judged was taken."
)


def write_gallery(results: Path, out: Path, claims_file: Path | None = None, beside: Path | None = None) -> int:
    """Write `out` and the pictures beside it (folder of its name); returns how many figures. ExperimentError if none.

    claims_file: what `claims --out` wrote, for a table at the end. beside: results of the same experiments under
    another cost model, whose numbers get a column of their own.
    """
    claims = [] if claims_file is None else _claims(claims_file)
    rows = _results(results)
    others = {row["experiment"]: row for row in _results(beside)} if beside is not None else {}
    pictures = out.with_suffix("")
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        for row in rows:
            name = row["experiment"]
            shutil.copyfile(_picture(results / name, name), pictures / f"{name}.png")
        write_text(out, _page(rows, claims, pictures.name, others), ExperimentError)
    except OSError as error:
        raise ExperimentError(f"{out}: cannot be written: {error.strerror}") from None
    return len(rows)


def _claims(file: Path) -> list[dict[str, Any]]:
    found = read_json(file)
    wanted = {"says", "setting", "ours", "verdict", "cost_models"}
    if not isinstance(found, list) or any(not isinstance(row, dict) or wanted - set(row) for row in found):
        raise ExperimentError(f"{file}: found something else, expected what `python -m experiments claims --out` wrote")
    return found


def _results(folder: Path) -> list[dict[str, Any]]:
    found = sorted(folder.glob("*/*.json")) if folder.is_dir() else []
    rows = [content for file in found if (content := _read(file)) is not None]
    if not rows:
        raise ExperimentError(f"{folder}: found no results, expected those of `python -m experiments run all`")
    return rows


def _page(
    figures: Sequence[Mapping[str, Any]],
    claims: Sequence[Mapping[str, Any]],
    folder: str,
    others: Mapping[str, Mapping[str, Any]],
) -> str:
    heads = ["figure", "verdict", "costs", *(["with other costs"] if others else [])]
    lines = [HEAD, f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in figures:
        name = row["experiment"]
        cells = [f"[{name}](#{name})", row["verdict"], "<br>".join(row["cost_models"])]
        if others:
            other = others.get(name)
            cells.append("-" if other is None or _same_costs(row, other) else f"{other['verdict']} ({_kinds(other)})")
        lines.append(f"| {' | '.join(cells)} |")
    for row in figures:
        lines += ["", *_section(row, folder, others.get(row["experiment"]))]
    if claims:
        lines += [
            "",
            "## Claims",
            "",
            CLAIMS_HEAD,
            "",
            "| claim | setting | ours | verdict | costs |",
            "|---|---|---|---|---|",
        ]
        for row in claims:
            costs = "<br>".join(dict.fromkeys(row["cost_models"]))
            lines.append(f"| {row['says']} | {row['setting']} | {row['ours']} | **{row['verdict']}** | {costs} |")
    return "\n".join(lines) + "\n"


def _section(row: Mapping[str, Any], folder: str, other: Mapping[str, Any] | None) -> list[str]:
    name = row["experiment"]
    lines = [
        f"## {name}",
        "",
        f"{row['question']} ({row['source']})",
        "",
        f"![{row['question']}]({folder}/{name}.png)",
        "",
        f"**{row['verdict'][0].upper()}{row['verdict'][1:]}.** `python -m experiments run {name}`"
        + (" (quick)" if row["quick"] else ""),
        "",
    ]
    lines += [f"- {'yes' if check['holds'] else '**no**'}: {check['text']}" for check in row["checks"]]
    if other is not None and _same_costs(row, other):
        other = None
    if other is not None:
        lines += ["", f"With {_kinds(other)} costs: {other['verdict']}."]
    if row["comparisons"]:
        lines += ["", *_numbers(row, other)]
    lines += ["", "Setting: " + "; ".join(f"{key} {_spoken(value)}" for key, value in row["setting"].items()) + "."]
    if row["note"]:
        lines += ["", row["note"]]
    return lines


def _numbers(row: Mapping[str, Any], other: Mapping[str, Any] | None) -> list[str]:
    """Ours, perhaps ours under other costs, and the paper's."""
    heads = ["", f"ours ({_kinds(row)})", *([f"ours ({_kinds(other)})"] if other is not None else []), "paper"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    more = {each["what"]: each for each in other["comparisons"]} if other is not None else {}
    for each in row["comparisons"]:
        unit = f" {each['unit']}" if each["unit"] else ""
        cells = [f"{each['what']} ({each['source']})", _with_difference(each)]
        if other is not None:
            cells.append(_with_difference(more[each["what"]]) if each["what"] in more else "-")
        lines.append(f"| {' | '.join(cells)} | {each['paper']:.4g}{unit} |")
    return lines


def _same_costs(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(row["cost_models"] == other["cost_models"])


def _with_difference(each: Mapping[str, Any]) -> str:
    unit = f" {each['unit']}" if each["unit"] else ""
    return f"{each['ours']:.4g}{unit} ({each['ratio'] - 1:+.0%})"


def _kinds(row: Mapping[str, Any]) -> str:
    """fitted, roofline, or both."""
    return " and ".join(dict.fromkeys(name.split(" ")[0] for name in row["cost_models"]))


def _spoken(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_spoken(inner)}" for key, inner in value.items()) + "}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _picture(folder: Path, name: str) -> Path:
    """The wide picture if it is small enough, else the narrow one."""
    for suffix in ("-wide", ""):
        file = folder / f"{name}{suffix}.png"
        if file.exists() and file.stat().st_size <= LARGEST_PNG:
            return file
    raise ExperimentError(f"{folder}: found no picture of at most {LARGEST_PNG:,} bytes")


def _read(file: Path) -> dict[str, Any] | None:
    content = read_json(file)
    return content if isinstance(content, dict) and "experiment" in content else None
