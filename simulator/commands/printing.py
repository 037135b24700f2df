"""What the simulator's commands print, and the figures and reports that they write."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.edges.output_file import check_place
from simulator.errors import SimulationError

if TYPE_CHECKING:
    from simulator.config import ReplayConfig
    from simulator.simulation import Run
    from simulator.studies.advise import Advice
    from simulator.studies.check_user_code import Check
    from workloads import Trace


def list_pages(kind: str, prefix: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    """Policies or routers: name, paper, rule, knobs."""
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.padding import Padding
    from rich.text import Text

    console = wide_console()
    for row in rows:
        console.print(Text.assemble((str(row[kind]), "bold"), "  ", (str(row["paper"]), "dim")))
        console.print(Padding(row["rule"], (0, 0, 0, 2), expand=False), highlight=False)
        for knob, facts in row["knobs"].items():
            flag = prefix + knob.replace("_", "-")
            # An empty text is a default too.
            default = facts["default"] if facts["default"] != "" else '""'
            line = Text.assemble(f"{flag} ", (str(default), "cyan"), f"  {facts['help']}")
            console.print(Padding(line, (0, 0, 0, 4), expand=False), highlight=False)


def print_intervals(trace: Trace, settings: ReplayConfig, runs: int, as_json: bool, notes: Sequence[str] = ()) -> None:
    """What `replay --runs` found: a value and its interval of every statistic that differs between draws."""
    from metrics.measures.summary_keys import BASIS
    from simulator.studies.prediction_intervals import predict

    summary, intervals = predict(trace, settings, runs)
    if as_json:
        from metrics.run_folder.folder import json_ready

        costs = {key: summary[key] for key in ("cost_model", *BASIS)}
        found_of = {key: found._asdict() for key, found in intervals.items()}
        print(json.dumps(json_ready({**costs, **found_of, "notes": list(notes)}), indent=2))
        return
    from rich.table import Table

    from metrics.drawing.text_tables import format_value
    from metrics.measures.statistics import level_held

    held = f"{100 * level_held(runs):.0f} % interval"
    table = Table(title=f"{settings.policy}: prediction and {held} over {runs} draws of the costs")
    for column in ("statistic", "predicted", "from", "to", "median of draws"):
        table.add_column(column, justify="left" if column == "statistic" else "right")
    shown = {key: found for key, found in intervals.items() if found.low != found.high}
    for key, found in shown.items():
        predicted, *others = (format_value(key, number) for number in found)
        table.add_row(key, f"{predicted} *" if found.outside else predicted, *others)
    if outside := sum(found.outside for found in shown.values()):
        table.caption = (
            f"* {outside} of {len(shown)} lie outside their interval: the prediction is by the fitted costs, which are "
            "none of the draws; errors that push one way only (queues), or few draws, leave it beside them"
        )
        table.caption_justify = "left"
    console = wide_console()
    console.print(table)
    say_costs(console, [summary])


def say_costs(console: Any, summaries: Sequence[Mapping[str, Any]]) -> None:
    """Which costs these runs used, and how far they can be trusted: every run says so."""
    names = " + ".join(dict.fromkeys(str(summary["cost_model"]) for summary in summaries))
    console.print(f"costs: {names} ({trust(summaries)})", highlight=False, soft_wrap=True, markup=False)


def print_advice(advice: Advice, out: Path | None) -> None:
    """The settings that were tried, the one to use and why, and the flags that make vLLM do the same."""
    from rich.text import Text

    from metrics.drawing.text_tables import comparison_table
    from profiler.operators.named_engines import NONE, engine_flags, load_engine

    console = wide_console()
    tried = {candidate.label: candidate.summary for candidate in advice.tried}
    console.print(comparison_table(tried, max_width=console.width))
    console.print(Text.assemble("use ", (advice.best.label, "bold"), f" (objective {advice.slo})"))
    for reason in advice.reasons:
        console.print(f"- {reason}", highlight=False, soft_wrap=True)
    summaries = list(tried.values())
    say_costs(console, summaries)
    engine = load_engine(advice.config.engine)
    keys = {"max_num_batched_tokens": "token_budget", "gpu_memory_utilization": "memory"}
    keys |= {"long_prefill_token_threshold": "long_prefill"}
    config = advice.config
    parallel = {name: getattr(config, name) for name in ("tp", "pp", "dp") if getattr(config, name) > 1}
    parallel |= {"ep": True} if config.ep else {}
    settings = {keys.get(name, name): value for name, value in advice.vllm_flags.items()}
    flags = engine_flags(engine.name, parallel | settings)
    served = "vLLM" if engine.name == NONE else engine.name
    console.print(
        f"with {served}, as {advice.vllm.label} above, where at most {advice.vllm.summary['running_max']:,} requests "
        f"ran at once: {flags}",
        highlight=False,
        soft_wrap=True,
    )
    if out is not None:
        console.print(f"the run and the frontier are in {out}", highlight=False, soft_wrap=True)


def can_report(path: Path | None) -> None:
    """Raises where a report could not be written, before the work that it is about."""
    if path is not None:
        from metrics.html_report import require_plotly

        check_place(path, SimulationError)
        require_plotly()


def write_html(path: Path | None, runs: dict[str, Run]) -> None:
    """The report of these runs, if one was asked for."""
    if path is None:
        return
    from metrics.html_report import write_report

    for run in runs.values():
        run.tables.summary = run.summary
    config = next(iter(runs.values())).config
    what = f"{config['model']} on {config['gpu']}, trace {config['trace']['name']}"
    question = f"Which policy serves {what} best?" if len(runs) > 1 else f"How does {config['policy']} serve {what}?"
    write_report(path, {name: run.tables for name, run in runs.items()}, question=question)


def print_runs(
    runs: dict[str, Run], out: Path | None, figures: bool, as_json: bool, failures: Mapping[str, str] | None = None
) -> None:
    """Runs side by side, where their costs come from, who did not finish, and each SLO class; figures into OUT.

    failures: one line for each policy that has no run, said last.
    """
    failures = failures or {}
    drawn: list[Path] = []
    if figures:
        if out is None:
            raise SimulationError("--figures: say where with --out")
        from metrics.drawing.figures import draw_all

        tables = {name: run.tables for name, run in runs.items()}
        drawn = draw_all(tables, out / "figures")
    summaries = {name: run.summary for name, run in runs.items()}
    if as_json:
        from metrics.run_folder.folder import json_ready

        told: dict[str, Any] = {
            name: run.summary | {"cost_evidence": run.config["cost_evidence"], "notes": run.notes}
            for name, run in runs.items()
        }
        told |= {name: {"error": line} for name, line in failures.items()}
        print(json.dumps(json_ready(next(iter(told.values())) if len(told) == 1 else told), indent=2))
        say_failures(failures)
        return
    from metrics.drawing.text_tables import comparison_table, format_value, rank_table
    from metrics.measures.ranks import rank_rows
    from simulator.studies.in_words import advice_in_words

    console = wide_console()
    # Names and reasons are text: what stands in brackets in them is no markup.
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    console.print(comparison_table(summaries, max_width=console.width))
    say_costs(console, list(summaries.values()))
    for name, run in runs.items():
        reasons = _reasons(run)
        if reasons:
            say(f"{name}: {reasons}")
        if run.summary["requests"] and not run.summary["measured"]:
            say(f"{name}: nothing was measured: all {run.summary['requests']:,} requests are warm-up")
        if run.summary["overloaded"]:
            words = f"overloaded: the queue grows without end (load {run.summary['load']:.2f}); latencies grow with it"
            say(f"{name}: {words}")
    for name, run in runs.items():
        if (ranks := rank_rows(run.tables)) and len(runs) == 1:
            console.print(rank_table(ranks))
        elif ranks:
            waits = format_value("rank_waiting_share", run.summary["rank_waiting_share"])
            say(f"{name}: ranks wait for each other {waits} of their time in steps")
    classes = _class_summaries(runs)
    if classes:
        console.print(comparison_table(classes, title="by SLO class", max_width=console.width, rivals=False))
    if out is not None:
        say(f"written to {out}")
    if drawn:
        say(f"figures in {out}/figures: {', '.join(sorted({p.stem for p in drawn}))}")
        first = next((path for path in drawn if path.name == "ttft_cdf.png"), drawn[0])
        say(f"open next: {first} (how long users wait for a first token, policy by policy)")
    if words := advice_in_words(summaries):
        say(f"\n{words} More: python -m simulator advise TRACE.")
    say_failures(failures)


def say_failures(failures: Mapping[str, str]) -> None:
    """Policies that have no run, and why, on stderr."""
    sys.stdout.flush()
    for policy, line in failures.items():
        print(f"error: {policy} failed and is left out: {line}", file=sys.stderr)


def trust(summaries: Sequence[Mapping[str, Any]]) -> str:
    """What the costs of these runs rest on; of runs that differ in it, the least measured."""
    words = {str(summary["cost_basis"]): summary["measured_share"] for summary in summaries}
    if len(words) == 1:
        return next(iter(words))
    least = min(words, key=lambda one: 1.0 if words[one] is None or words[one] != words[one] else words[one])
    return f"the least measured of {len(summaries)} runs: {least}"


def _class_summaries(runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """policy / class -> summary, where the requests have more than one SLO class."""
    from metrics import summarise_classes
    from metrics.measures.slo import parse_objectives

    found: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        slo, warmup = (run.config["replay"][key] for key in ("slo", "warmup"))
        objective = parse_objectives(slo) if slo else None
        classes = summarise_classes(run.tables, slo=objective, warmup=warmup or 0)
        if len(classes) < 2:
            return {}
        found |= {f"{name} {label}": summary for label, summary in classes.items()}
    return found


def _reasons(run: Run) -> str:
    """Requests that did not finish, by reason, most frequent first; reasons that differ in numbers alone are one."""
    from collections import Counter

    status, reason = run.tables.column("requests", "status"), run.tables.column("requests", "reason")
    alike: dict[tuple[str, str], Counter[str]] = {}
    for s, r in zip(status, reason):
        if s != "finished":
            alike.setdefault((str(s), re.sub(r"[\d.,]*\d", "#", str(r))), Counter())[str(r)] += 1
    counts = Counter({key: reasons.total() for key, reasons in alike.items()})
    first = counts.most_common(3)
    told = []
    for key, count in first:
        (example, _), *others = alike[key].most_common()
        told.append(f"{count} {key[0]} ({'such as: ' * bool(others)}{example})")
    if len(counts) > len(first):
        told.append(f"{counts.total() - sum(count for _, count in first)} more")
    return "; ".join(told)


def wide_console() -> Any:
    """As wide as the terminal; 160 characters into a pipe, as the tables assume."""
    import shutil

    from metrics.drawing.text_tables import terminal

    return terminal(shutil.get_terminal_size((160, 40)).columns)


class Progress:
    """A progress bar on a terminal's stderr, nothing elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet or not sys.stderr.isatty()
        self.bar: Any = None

    def __enter__(self) -> Any:
        if self.quiet:
            return lambda name, total: None
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from metrics.drawing.text_tables import terminal

        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=terminal(None, stderr=True),
        )
        self.bar.start()
        return self._start

    def _start(self, name: str, total: int) -> Any:
        task = self.bar.add_task(name, total=total)
        return lambda ended, total: self.bar.update(task, completed=ended)

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            for task in self.bar.tasks:
                self.bar.update(task.id, completed=task.total)
            self.bar.stop()


def say_draw(number: int, policy: str) -> None:
    if sys.stderr.isatty():
        print(f"draw {number + 1}: {policy}", file=sys.stderr)


def say_trying(label: str) -> None:
    if sys.stderr.isatty():
        print(f"trying {label}", file=sys.stderr)


def print_checks(name: str, checks: list[Check], as_json: bool) -> None:
    """What was checked, how often it held, and the verdict."""
    failed = next((check for check in checks if check.failure), None)
    if as_json:
        rows = [{"check": check.name, "runs": check.runs, "failure": check.failure} for check in checks]
        print(json.dumps({"name": name, "holds": failed is None, "checks": rows}, indent=2))
        return
    for check in checks:
        if check.failure:
            print(f"FAIL  {check.name}\n      {check.failure}")
        else:
            print(f"{'ok  ' if check.runs else '-   '}  {check.name}" + (f": {check.runs} runs" if check.runs else ""))
    if failed is None:
        print(f"{name}: nothing found")
    else:
        print(f"{name}: does not hold")
