"""A verdict as Markdown, as a figure, and as the arena.toml that plays the same contest again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.arena.contest import Contest
from experiments.arena.verdict import pareto

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def page(contest: Contest, found: Mapping[str, Any], command: str, figure: str) -> str:
    """The whole page; every number in it is from `found`."""
    rules = contest.rules
    lines = [
        "# Arena",
        "",
        f"**{found['sentence']}**",
        "",
        f"![Share of requests within the objective against load]({figure})",
        "",
        "```",
        command,
        "```",
        "",
        "Every policy was tuned on the first piece of each workload and played the others, which nobody "
        "had seen. The score is the share of requests that finish and meet every bound by themselves. Load 1 is "
        "the knee: the highest rate at which `slo_aware`, told the objective, keeps nine of ten requests of the first "
        "piece in time.",
        "",
        "## Ranking",
        "",
        *_table(
            ("policy", "score", *(f"load {load:g}" for load in rules.loads), "behind the leader, 95 % interval"),
            [
                (
                    f"`{name}`",
                    f"{score:.2%}",
                    *(f"{found['by_load'][f'{load:g}']['scores'][name]:.2%}" for load in rules.loads),
                    _behind(found["overall"], name),
                )
                for name, score in found["overall"]["scores"].items()
            ],
        ),
        "",
        f"Intervals are of {found['overall']['blocks']} slices, compared pair by pair, and corrected for "
        f"{len(found['overall']['rivals'])} comparisons."
        + ("" if found["draws_differ"] else " The costs know no error of their own, so it is the workload's alone."),
        "",
    ]
    for flip in found["flips"]:
        lines += [
            f"The order flips at load {flip['load']:g}: `{flip['leader']}` leads there, and the overall leader is "
            "behind it beyond chance.",
            "",
        ]
    if found["tuning_cut_short"]:
        lines += [
            "The budget ended before every policy had tried all its settings; a longer one may change the order.",
            "",
        ]
    lines += ["## By workload", ""]
    lines += _table(
        ("workload", "objective", "knee", "leader", "not told apart from it", "next"),
        [_workload_row(name, each, found) for name, each in found["by_workload"].items()],
    )
    lines += ["", "## Settings", ""]
    lines += _table(
        ("policy", "knobs", "tried", "first piece: default, tuned", "other pieces"),
        [
            (
                f"`{label}`",
                ", ".join(f"{name}={value}" for name, value in each["knobs"].items()) or "defaults",
                str(each["tried"]),
                "-" if each["tried"] == 0 else f"{each['score_default']:.2%}, {each['score_tuned']:.2%}",
                f"{found['overall']['scores'][label]:.2%}",
            )
            for label, each in found["settings"].items()
        ],
    )
    top = f"{max(rules.loads):g}"
    lines += ["", f"## First tokens against gaps, at load {top}", ""]
    lines += [
        "Medians over slices. The front: policies that no other beats in both P99s.",
        "",
        *_table(
            ("workload", "front (TTFT P99, TBT P99)"),
            [(name, _front(each[top])) for name, each in found["statistics"].items()],
        ),
        "",
    ]
    return "\n".join(lines)


def _workload_row(name: str, each: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    leader, *others = each["scores"]
    tied = [other for other in each["tied"] if other != leader]
    beaten = [other for other in others if other not in tied]
    return (
        name,
        found["slo"][name].replace(",", ", "),
        f"{found['knee_requests_per_s'][name]:.3g}/s",
        f"`{leader}` {each['scores'][leader]:.1%}",
        ", ".join(f"`{other}` {each['scores'][other]:.1%}" for other in tied) or "-",
        f"`{beaten[0]}` {each['scores'][beaten[0]]:.1%}" if beaten else "-",
    )


def _behind(overall: Mapping[str, Any], name: str) -> str:
    for rival in overall["rivals"]:
        if rival["name"] == name:
            return f"{100 * rival['ahead']:.2f} ({100 * rival['low']:.2f} to {100 * rival['high']:.2f})"
    return "leads"


def _front(statistics: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(
        f"`{name}` ({1e3 * statistics[name]['ttft_s_p99']:,.0f} ms, {1e3 * statistics[name]['tbt_s_p99']:,.1f} ms)"
        for name in pareto(statistics)
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def figure(contest: Contest, found: Mapping[str, Any]) -> Figure:
    """Score against load, one panel a workload; the three best policies overall and the rest in grey."""
    from metrics.drawing.figure_style import DOUBLE_COLUMN_IN, house_style, new_figure, styles_for

    names = list(found["by_workload"])
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    loads = list(contest.rules.loads)
    best = list(found["overall"]["scores"])[:3]
    styles = styles_for({label: found["settings"][label]["policy"] for label in best})
    with house_style():
        drawing, axes = new_figure(
            DOUBLE_COLUMN_IN * columns / 3, 1.6 * rows + 0.5, rows, columns, sharex=True, sharey=True
        )
        for at, panel in enumerate(axes.flat):
            if at >= len(names):
                panel.set_visible(False)
                continue
            each = found["statistics"][names[at]]
            for label in found["settings"]:
                scores = [100 * each[f"{load:g}"][label]["score"] for load in loads]
                if label in best:
                    style = styles[label]
                    panel.plot(loads, scores, **style.line(), marker=style.marker, ms=3.5, label=label, zorder=3)
                else:
                    panel.plot(loads, scores, color="#bbbbbb", lw=0.7, zorder=1)
            panel.set_title(names[at])
            panel.set_ylim(-3, 103)
            if at % columns == 0:
                panel.set_ylabel("in time (%)")
            if at + columns >= len(names):
                panel.set_xlabel("load (share of the knee)")
        handles, labels = axes.flat[0].get_legend_handles_labels()
        shown = [handles[labels.index(name)] for name in best]
        others = len(found["settings"]) - len(best)
        if others:
            shown += axes.flat[0].plot([], [], color="#bbbbbb", lw=0.7)
        named = [*best, f"{others} others"] if others else best
        drawing.legend(shown, named, loc="outside lower center", ncols=len(named))
    return drawing


def as_toml(contest: Contest, found: Mapping[str, Any], objective: str, traces: Sequence[str], requests: int) -> str:
    """The contest as a file that `experiments arena FILE` plays again: these settings, judged, nothing tuned."""
    rules = contest.rules
    lines = [
        "# Plays again: python -m experiments arena arena.toml",
        f"traces = {json.dumps(list(traces))}",
        f"objective = {json.dumps(objective)}",
        f"requests = {requests}",
        f"loads = {json.dumps(list(rules.loads))}",
        f"slices = {rules.slices}",
        f"draws = {rules.draws}",
        f"seed = {rules.seed}",
        "",
        "[config]",
        *(f"{name} = {_value(value)}" for name, value in rules.config.items()),
    ]
    for label, each in found["settings"].items():
        lines += ["", "[[policies]]", f"label = {json.dumps(label)}", f"policy = {json.dumps(each['policy'])}"]
        inner = ", ".join(f"{name} = {_value(value)}" for name, value in each["knobs"].items())
        lines.append(f"knobs = {{ {inner} }}" if inner else "knobs = {}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    return repr(value) if isinstance(value, float) else json.dumps(value)


def write(contest: Contest, found: Mapping[str, Any], out: Path, command: str, toml: str) -> None:
    """arena.md, arena.html, arena.json, arena.toml, arena.png and arena.pdf in `out`."""
    from experiments.errors import ExperimentError
    from metrics.drawing.figure_style import house_style, save
    from metrics.html_report import RowTable, write_report
    from policies.edges.output_file import write_text

    with house_style():
        save(figure(contest, found), out, "arena")
    write_text(out / "arena.md", page(contest, found, command, "arena.png"), ExperimentError)
    write_text(out / "arena.json", json.dumps(found, indent=1) + "\n", ExperimentError)
    write_text(out / "arena.toml", toml, ExperimentError)
    try:
        from metrics.html_report import require_plotly

        require_plotly()
    except Exception:  # the extra `report` is not installed
        return
    rows = [
        {"workload": name, "load": float(load), "policy": label, **each}
        for name, loads in found["statistics"].items()
        for load, labels in loads.items()
        for label, each in labels.items()
    ]
    table = RowTable("Scores", rows, ["workload", "load", "policy"], "Means over slices; latencies are medians.")
    write_report(out / "arena.html", question=found["sentence"], tables=[table], notes=[command])
