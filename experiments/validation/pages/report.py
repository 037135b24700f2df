"""The report of a validation: what was predicted, what happened, how far apart, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.running.report_document import Block, Bullets, Heading, Picture, Table, Text, write_document
from experiments.running.stage_files import write_json
from experiments.validation.comparing.machine_drift import changed, typical_speed
from experiments.validation.comparing.pipeline_bubbles import bubble_blocks, bubbles_in_short
from experiments.validation.comparing.settings import load_name
from experiments.validation.comparing.statistics import (
    OUTSIDE,
    TOO_NOISY,
    WITHIN_AIM,
    WITHIN_SPREAD,
    Comparison,
    pooled_error,
    rank,
    verdict_of,
)
from metrics.drawing.text_tables import format_value

if TYPE_CHECKING:
    from experiments.validation.comparing.result import Result

MARKS = {WITHIN_AIM: "good", OUTSIDE: "bad", "100.0 %": "good"}


def write_report(result: Result, folder: Path, name: str = "report") -> list[Path]:
    """NAME.md, NAME.html, NAME.json and figures/ in a folder; returns the first two."""
    written = write_document(folder, name, blocks(result))
    write_json(folder / f"{name}.json", as_dict(result))
    return written


def blocks(result: Result) -> list[Block]:
    """The report's content."""
    from experiments.validation.pages.figures import (
        distributions_figure,
        drift_figure,
        errors_figure,
        iterations_figure,
    )

    settings = result.settings
    story: list[Block] = [
        Heading(f"Prediction and live run: {settings.engine.model}, {result.trace_name}", 1),
        Text(
            f"{result.requests} requests, {', '.join(f'{load_name(load)}' for load in settings.loads)} of the measured "
            f"capacity of {result.capacity:.3g} requests/s, {len(settings.policies)} policies, {settings.repeats} live "
            "repeats of each. Predictions come from the profile alone and were made before the live runs. Errors are "
            "predicted over live, minus 1."
        ),
        Text(verdict_of(result.comparisons)),
        Heading("In short"),
        Bullets(in_short(result)),
        Heading("Statistics"),
        Picture(
            "errors",
            errors_figure(result),
            "Predicted over live. Points: prediction; lines: its interval (5 to 95 % of an ensemble of cost models); "
            "grey: range of the live repeats; green: what is aimed at.",
        ),
    ]
    for load in settings.loads:
        for policy in settings.policies:
            rows = [row for row in result.comparisons if row.load == load and row.policy == policy]
            story += [Heading(f"`{policy}`, {load_name(load)} load", 3), statistics_table(rows)]
    if result.simulated:
        story.append(
            Picture(
                "distributions",
                distributions_figure(result),
                "Every request: solid lines are live repeats, dashed ones the prediction.",
            )
        )
    story += [
        Heading("Batch agreement"),
        Text(
            "Driven with the live run's own moments (arrivals, plans, completions), the scheduler plans every batch "
            "again: same requests, order, tokens, contexts, preemptions and free blocks, and the same time of every "
            "token. Then "
            "the whole simulator runs with each iteration's measured duration in the place of its cost model."
        ),
        agreement_table(result),
    ]
    if result.bubbles:
        story += bubble_blocks(result.bubbles)
    if result.rankings:
        story += [
            Heading("Ranking of the policies"),
            Text(
                "A pair of policies is decided where the ranges of their live repeats do not meet; no others can be "
                "ranked."
            ),
            ranking_table(result),
        ]
    story += [
        Heading("Iterations"),
        Text(
            "Whole times of all live iterations against the fitted model (which contains the disturbances of the "
            "profile's own time). Errors are of single iterations, the bias is of their sum."
        ),
        Picture(
            "iterations", iterations_figure(result.iterations), "Predicted and measured iterations of the live runs."
        ),
        residual_table(result),
        Heading("The profile"),
        profile_table(result),
    ]
    if result.probes:
        story += [
            Heading("Drift"),
            Text(
                "The same few batches before, between and after the live runs, over their fitted times: is this still "
                "the machine that was profiled?"
            ),
            Picture("drift", drift_figure(result.probes), "Above 1 is slower than profiled."),
            drift_table(result),
        ]
    return story


FAMILIES = (("tpot_s", "TPOT"), ("e2e_s", "E2E"), ("ttft_s", "TTFT"))


def aims_in_short(aimed: Sequence[Comparison]) -> str:
    """How many statistics are as near as was aimed at; and what that says where the repeats differ so much."""
    names = (WITHIN_AIM, WITHIN_SPREAD, TOO_NOISY, OUTSIDE)
    by_verdict = {name: sum(row.verdict == name for row in aimed) for name in names}
    text = (
        f"Aims: {by_verdict[WITHIN_AIM]} of {len(aimed)} statistics within the aim, {by_verdict[WITHIN_SPREAD]} more "
        f"within the live repeats' own spread, {by_verdict[OUTSIDE]} outside."
    )
    if by_verdict[TOO_NOISY]:
        spreads = sorted(row.spread for row in aimed if row.spread == row.spread)
        text += (
            f" {by_verdict[TOO_NOISY]} cannot be told: the repeats differ by {spreads[len(spreads) // 2]:.0%} in the "
            "middle of these statistics, and almost any prediction lies within that; run it again on a machine that "
            "does nothing else."
        )
    return text


def in_short(result: Result) -> list[str]:
    """The findings, one sentence each."""
    aimed = [row for row in result.comparisons if row.verdict]
    exact = sum(found.exact for found in result.agreements.values())
    matched = sum(found.matched for found in result.agreements.values())
    total = sum(found.iterations for found in result.agreements.values())
    found = [aims_in_short(aimed)]
    probed = [row.rescaled_verdict for row in aimed]
    if any(probed):
        found.append(
            f"The same at the speed that {_told_by(result)}: "
            f"{probed.count(WITHIN_AIM)} within the aim, {probed.count(WITHIN_SPREAD)} more within the spread, "
            f"{probed.count(OUTSIDE)} outside"
            + (f", {probed.count(TOO_NOISY)} too noisy to tell." if TOO_NOISY in probed else ".")
        )
    left = [abs(row.at_live_speed) for row in aimed if row.at_live_speed == row.at_live_speed]
    if left:
        found.append(
            "Left when each live run is predicted at the speed of its own iterations: "
            f"{sorted(left)[len(left) // 2]:.1%} in the middle of these statistics, {max(left):.1%} at most. The rest "
            "of the error is the level of the costs."
        )
    found += gauge_in_short(result.gauged, sum(map(len, result.live.values())))
    found += trust(result.comparisons)
    for family, title in FAMILIES:
        errors = [row for row in result.comparisons if row.statistic == f"{family}_mean"]
        if errors:
            worst = max(errors, key=lambda row: abs(row.error))
            text = ", ".join(f"{row.error:+.1%}" for row in errors)
            found.append(
                f"{title}, mean: {text} (largest: `{worst.policy}` at {load_name(worst.load)} load, live spread "
                f"{worst.spread:.1%})."
            )
    if total:
        found.append(
            f"Batch agreement: {100 * matched / total:.1f} % of {total:,} live batches planned again, {exact} of "
            f"{len(result.agreements)} runs exact to the last token."
        )
    fed = [found for found in result.fed.values() if not isinstance(found, str)]
    if fed:
        found.append(
            f"The whole simulator, fed the measured durations of the iterations, planned the live batches in "
            f"{sum(one.exact for one in fed)} of {len(fed)} runs, every token at its live nanosecond."
        )
    decided, agreed = sum(r.decided for r in result.rankings), sum(r.agreed for r in result.rankings)
    if result.rankings:
        found.append(
            f"Ranking: {agreed} of {decided} decided pairs of policies in the live order"
            + (f", {ranked_as_told(result)} at the speed told beside each live run." if any(probed) else ".")
        )
    found += bubbles_in_short(result.bubbles)
    found += experts_in_short(result)
    ends = ", ".join(f"{count} {status}" for status, count in sorted(result.ends.items()))
    found.append(f"Requests over all live runs: {ends}; lost: {result.lost}.")
    if result.probes:
        moved = changed(result.probes, result.model.fit.noise.get("repeat_median", 0.0))
        speeds = [probe.speed for probe in result.probes]
        paid = typical_speed(result.probes)
        found.append(
            f"Drift: the machine ran at {min(speeds):.3f} to {max(speeds):.3f} of the profile's time, {paid:.3f} with "
            + (
                "disturbances: it has changed, so part of the errors is the machine's."
                if moved
                else "disturbances: unchanged within the noise."
            )
        )
        taken = min(probe.processor_share for probe in result.probes)
        if taken < 0.97 and result.settings.engine.threads == 1:
            found.append(f"Other processes took the processor: its share of wall time fell to {taken:.0%} in a probe.")
    return found


def experts_in_short(result: Result) -> list[str]:
    """How many experts batches were expected to touch, and how many they did; nothing for a dense model."""
    experts = result.iterations.experts_of(np.ones(len(result.iterations.measured_s), bool))
    if not experts:
        return []
    expected, counted = experts["experts_expected"], experts["experts_counted"]
    return [
        f"Experts: a batch was expected to touch {expected:.2f} of a layer and touched {counted:.2f} "
        f"({expected / counted - 1:+.1%}; {experts['experts_median_error']:.1%} in the middle of single iterations)."
    ]


def _told_by(result: Result) -> str:
    gauged, runs = len(result.gauged), sum(map(len, result.live.values()))
    if not gauged:
        return "the probes right before and after each live run found"
    if gauged < runs:  # a short run has too few samples of its gauge
        return f"a gauge of fixed work beside {gauged} of {runs} live runs told, and the probes around the others found"
    return "a gauge of fixed work beside each live run told"


def ranked_as_told(result: Result) -> int:
    """Decided pairs in the live order where each policy is predicted at the speed that its own live runs had."""
    return sum(found.agreed for found in rank(result.comparisons, predicted="rescaled"))


def gauge_in_short(gauged: Mapping[str, tuple[float, float]], runs: int | None = None) -> list[str]:
    """How far the machine moved between runs, and how well the gauge told how slow the runs' own iterations were.

    runs: live runs in all; the gauges of short ones took too few samples to count.
    """
    if not gauged:
        return []
    told, own = np.array(list(gauged.values())).T
    whole = "the live runs" if runs in (None, len(gauged)) else f"{len(gauged)} of {runs} live runs"
    apart = np.abs(told / own - 1)
    return [
        f"Gauge: the machine took {told.min():.2f} to {told.max():.2f} of the profile's time during {whole} "
        f"({np.exp(np.log(told).mean()):.2f} on average); how slow a run's own iterations were it told within "
        f"{np.median(apart):.1%} in the middle, {apart.max():.1%} at most."
    ]


def trust(comparisons: Sequence[Comparison]) -> list[str]:
    """How often the intervals held, and the error of all live runs together; no sentence where there is too little."""
    aimed = [row for row in comparisons if row.aim is not None]
    found = []
    kept, values = sum(row.inside for row in aimed), sum(len(row.live_values) for row in aimed)
    if values:
        found.append(
            f"Intervals: {kept} of {values} live values of these statistics ({kept / values:.0%}) lie in the predicted "
            "90 % interval."
        )
    for predicted, opening in (
        ("simulated", "Over all {} live runs together, means (± standard error)"),
        ("expected", "The same for the mean of the ensemble, which knows that the machine wanders"),
        ("rescaled", "The same at the speed told beside the runs"),
    ):
        pooled = {
            title: error
            for family, title in FAMILIES
            if (error := pooled_error(comparisons, f"{family}_mean", predicted)) is not None
        }
        if pooled:
            told = ", ".join(f"{title} {error:+.1%} (± {unsure:.1%})" for title, (error, unsure, _) in pooled.items())
            found.append(f"{opening.format(max(runs for _, _, runs in pooled.values()))}: {told}.")
    return found


def statistics_table(rows: Sequence[Comparison]) -> Table:
    header = (
        "statistic",
        "predicted",
        "interval",
        "live",
        "live range",
        "error",
        "spread",
        "at told speed",
        "left at live speed",
        "aim",
        "verdict",
    )
    lines = []
    for row in rows:
        key = row.statistic
        low, high = format_value(key, row.low), format_value(key, row.high)
        live_low, live_high = format_value(key, row.live_low), format_value(key, row.live_high)
        lines.append(
            (
                key,
                format_value(key, row.simulated),
                f"{low} to {high}",
                format_value(key, row.live),
                f"{live_low} to {live_high}",
                _percent(row.error),
                f"{row.spread:.1%}",
                _percent(row.rescaled_error),
                _percent(row.at_live_speed),
                "" if row.aim is None else f"{row.aim:.0%}",
                row.verdict,
            )
        )
    return Table(header, lines, MARKS)


def agreement_table(result: Result) -> Table:
    lines = []
    for name, found in result.agreements.items():
        fed = result.fed.get(name, "")
        told = fed if isinstance(fed, str) else f"{100 * fed.matched / max(1, fed.iterations):.1f} %"
        divergence = found.divergence or (fed.divergence if not isinstance(fed, str) else None)
        text = "none" if divergence is None else "; ".join(f"{key} {value}" for key, value in divergence.items())[:300]
        lines.append(
            (
                name,
                f"{found.iterations:,}",
                f"{found.matched:,}",
                f"{100 * found.share:.1f} %",
                f"{found.requests_matched} of {found.requests}",
                told,
                text,
            )
        )
    header = (
        "live run",
        "batches",
        "equal",
        "share",
        "requests equal",
        "whole simulator fed the durations",
        "first divergence",
    )
    return Table(header, lines, MARKS)


def ranking_table(result: Result) -> Table:
    lines = []
    for found in result.rankings:
        wrong = ", ".join(f"{one} / {other}" for one, other in found.wrong) or "none"
        lines.append(
            (
                f"{found.statistic}, {load_name(found.load)}",
                f"{found.decided} of {found.pairs}",
                str(found.agreed),
                " < ".join(found.live_order),
                " < ".join(found.simulated_order),
                wrong,
            )
        )
    return Table(("statistic, load", "decided pairs", "agreed", "live order", "predicted order", "wrong"), lines)


def residual_table(result: Result) -> Table:
    groups = result.iterations.groups()
    with_experts = any("experts_counted" in group for group in groups)
    lines = [
        (
            group["kind"],
            f"{group['iterations']:,}",
            f"{group['share']:.1%}",
            f"{group['median_error']:.1%}",
            f"{group['p95_error']:.1%}",
            f"{group['bias_of_median']:+.1%}",
            f"{group['bias_of_sum']:+.1%}",
            f"{group['inside']:.0%}",
            *([_experts_of(group)] if with_experts else []),
        )
        for group in groups
    ]
    return Table(
        (
            "batch",
            "iterations",
            "share of time",
            "median error",
            "P95 error",
            "median bias",
            "bias of sum",
            "inside region",
            *(["experts touched: expected, counted"] if with_experts else []),
        ),
        lines,
    )


def _experts_of(group: Mapping[str, Any]) -> str:
    if "experts_counted" not in group:
        return ""
    return f"{group['experts_expected']:.1f}, {group['experts_counted']:.1f}"


def profile_table(result: Result) -> Table:
    fit = result.model.fit
    rows = [
        ("device", fit.device),
        ("backend", f"{fit.backend}, {fit.dtype}"),
        ("distinct batches fitted", f"{fit.errors.get('shapes', 0):.0f}"),
        ("error of the fit: median, P95", f"{_share(fit.errors, 'fit_median')}, {_share(fit.errors, 'fit_p95')}"),
        (
            "held-out structures: median, P95",
            f"{_share(fit.errors, 'held_out_median')}, {_share(fit.errors, 'held_out_p95')}",
        ),
        (
            "noise floor, repeats of one batch: median, P95",
            f"{_share(fit.noise, 'repeat_median')}, {_share(fit.noise, 'repeat_p95')}",
        ),
        ("measurements flagged as disturbed", _share(fit.noise, "outlier_share")),
        ("mean time lost to disturbances", f"{fit.disturbance:.1%}"),
        *(
            [("a touched expert of one layer costs", f"{fit.experts.price_ns / 1e3:.2f} µs")]
            if _has_experts(fit)
            else []
        ),
        ("wandering of the speed while profiling (standard deviation)", f"{fit.drift:.1%}"),
    ]
    return Table(("profile", "value"), rows)


def _has_experts(fit: Any) -> bool:
    return getattr(fit, "experts", None) is not None


def drift_table(result: Result) -> Table:
    lines = [
        (
            probe.when,
            f"{probe.at_s / 60:.1f}",
            f"{probe.speed:.3f}",
            f"{probe.mean_speed:.3f}",
            f"{probe.processor_share:.0%}",
        )
        for probe in result.probes
    ]
    return Table(("probe", "minute", "left alone", "with disturbances", "processor share"), lines)


def as_dict(result: Result) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "settings": result.settings.as_dict(),
        "capacity_requests_per_s": result.capacity,
        "requests": result.requests,
        "in_short": in_short(result),
        "comparisons": [row.as_dict() for row in result.comparisons],
        "rankings": [row.as_dict() for row in result.rankings],
        "agreements": {name: found.as_dict() for name, found in result.agreements.items()},
        "fed": {name: found if isinstance(found, str) else found.as_dict() for name, found in result.fed.items()},
        "iterations": result.iterations.groups(),
        "probes": [probe.as_dict() for probe in result.probes],
        "bubbles": [row.as_dict() for row in result.bubbles],
        "lost": result.lost,
        "ends": result.ends,
        "profile": {key: value for key, value in result.model.provenance().items() if key != "measured"},
    }


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{value:+.1%}"


def _share(values: Any, key: str) -> str:
    value = values.get(key)
    return "-" if value is None or value != value else f"{value:.1%}"
