"""Many validations in one folder: models x traces, all policies and loads; resumable, one report over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.running.report_document import Block, Bullets, Heading, Table, Text, write_document
from experiments.running.stage_files import write_json
from experiments.validation.comparing.settings import Settings
from experiments.validation.comparing.statistics import OUTSIDE, TOO_NOISY, WITHIN_AIM, WITHIN_SPREAD
from experiments.validation.pages.report import MARKS, in_short, ranked_as_told, trust, write_report
from experiments.validation.stages import Validation
from policies.edges.distinct_names import distinct_names, file_forms, folder_names

if TYPE_CHECKING:
    from experiments.validation.comparing.result import Result
    from experiments.validation.comparing.statistics import Comparison

SUMMED = ("ttft_s_mean", "tpot_s_mean", "tpot_s_p90", "e2e_s_mean", "e2e_s_p90")


@dataclass(frozen=True)
class Part:
    """One validation of the whole: its folder's name and its settings."""

    name: str
    settings: Settings


@dataclass(frozen=True)
class ModelShare:
    """A model, the rows [first, last) of each trace that it serves, and its time for a profile: a slow model gets
    fewer requests and more time."""

    model: str
    rows: tuple[int, int]
    budget_s: float


def parts_of(base: Settings, traces: Sequence[Path], shares: Sequence[ModelShare]) -> list[Part]:
    """Every model with every trace; the quick ones first. Their names are folders within the one of the whole."""
    models = distinct_names([share.model for share in shares])
    days = distinct_names([str(trace) for trace in traces], file_forms)
    names = iter(folder_names([f"{model}-{day}" for model in models for day in days]))
    return [
        Part(
            next(names),
            replace(
                base,
                trace=str(trace),
                rows=share.rows,
                budget_s=share.budget_s,
                engine=replace(base.engine, model=share.model),
            ),
        )
        for share in shares
        for trace in traces
    ]


def validate_all(
    parts: Sequence[Part], out: Path, say: Callable[[str], None], *, anyway: bool = False
) -> list[tuple[Part, Result]]:
    """Each part in its own folder; what is done is not done again. The overall report is written after every part, so
    that an interrupted run leaves one too."""
    done: list[tuple[Part, Result]] = []
    for number, part in enumerate(parts):

        def say_part(text: str, number: int = number, part: Part = part) -> None:
            say(f"[{number + 1} of {len(parts)}, {part.name}] {text}")

        result = Validation(part.settings, out / part.name, anyway=anyway, say=say_part).run()
        write_report(result, out / part.name)
        done.append((part, result))
        write_overall(done, out, len(parts))
    return done


def write_overall(done: Sequence[tuple[Part, Result]], out: Path, total: int) -> list[Path]:
    """report.md, report.html and report.json over all parts done so far."""
    written = write_document(out, "report", overall(done, total))
    content = {part.name: {"in_short": in_short(result)} for part, result in done}
    write_json(out / "report.json", content)
    return written


def overall(done: Sequence[tuple[Part, Result]], total: int) -> list[Block]:
    """Counts over everything, errors by part and policy, and each part's findings."""
    rows = [row for _, result in done for row in result.comparisons if row.verdict]
    alone, told = counted([row.verdict for row in rows]), counted([row.rescaled_verdict for row in rows])
    agreements = [found for _, result in done for found in result.agreements.values()]
    batches = sum(found.iterations for found in agreements)
    matched = sum(found.matched for found in agreements)
    rankings = [found for _, result in done for found in result.rankings]
    lost = sum(result.lost for _, result in done)
    everything = [row for _, result in done for row in result.comparisons]
    story: list[Block] = [
        Heading("Predictions held against live runs", 1),
        Text(f"{len(done)} of {total} parts are done. Each part has a report of its own in its folder."),
        Bullets(
            [
                f"Aims, of {len(rows)} statistics: {alone}.",
                f"The same at the speed told beside the live runs: {told}.",
                *trust(everything),
                f"Batch agreement: {matched:,} of {batches:,} live batches planned again; "
                f"{sum(found.exact for found in agreements)} of {len(agreements)} runs exact to the last token.",
                f"Ranking: {sum(found.agreed for found in rankings)} of {sum(found.decided for found in rankings)} "
                "decided pairs of policies in the live order, "
                f"{sum(ranked_as_told(result) for _, result in done)} at the speed told beside each live run.",
                f"Lost requests: {lost}.",
            ]
        ),
        Heading("Errors"),
        Text(
            "Predicted over live, minus 1: by the profile alone, then at the speed told beside the live runs; in "
            "brackets the spread of the live repeats."
        ),
        errors_table(done),
    ]
    for part, result in done:
        story += [Heading(part.name), Bullets(in_short(result))]
    return story


def counted(verdicts: Sequence[str]) -> str:
    """How many statistics have each verdict, in words."""
    names = (WITHIN_AIM, WITHIN_SPREAD, *([TOO_NOISY] if TOO_NOISY in verdicts else []), OUTSIDE)
    return ", ".join(f"{verdicts.count(name)} {name}" for name in names)


def errors_table(done: Sequence[tuple[Part, Result]]) -> Table:
    """Predicted over live, minus 1, by the profile alone and at the speed told beside the live runs, and in brackets
    the live spread; one row per part, load and policy."""
    lines: list[Sequence[str]] = []
    for part, result in done:
        found: dict[tuple[float, str], dict[str, Any]] = {}
        for row in result.comparisons:
            found.setdefault((row.load, row.policy), {})[row.statistic] = row
        for (load, policy), by_statistic in found.items():
            cells = []
            for statistic in SUMMED:
                row = by_statistic.get(statistic)
                cells.append("" if row is None else in_a_cell(row))
            verdicts = {row.verdict for row in by_statistic.values()}
            worst = next(
                name
                for name in (OUTSIDE, TOO_NOISY, WITHIN_SPREAD, WITHIN_AIM)
                if name in verdicts or name == WITHIN_AIM
            )
            lines.append((f"{part.name}, {load:.0%}, {policy}", *cells, worst))
    return Table(("part, load, policy", *SUMMED, "worst verdict"), lines, MARKS)


def in_a_cell(row: Comparison) -> str:
    """Both errors of a statistic and its spread: "+5.1, -0.4% (7.0%)"; only the first where no speed was told."""
    if row.rescaled_error != row.rescaled_error:
        return f"{row.error:+.1%} ({row.spread:.1%})"
    return f"{100 * row.error:+.1f}, {row.rescaled_error:+.1%} ({row.spread:.1%})"
