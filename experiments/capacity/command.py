"""`python -m experiments capacity`: what a setting can serve within an objective, or how large a cluster must be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.errors import ExperimentError
from experiments.sweeps.command import EngineOption, RayAddressOption, TermOption, WorkersOption, terms_of
from policies.edges.command_line import refuse_unknown_flags, tell_notes
from policies.edges.output_file import check_place
from policies.registry import knobs_of, policy_class

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.capacity.prices import Price
    from experiments.capacity.study import CapacityStudy
    from experiments.running.task_runners import Engine

REQUESTS, DRAWS, TOLERANCE = 1000, 5, 0.01


def register(app: typer.Typer) -> None:
    app.command("capacity", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(capacity)


def capacity(
    ctx: typer.Context,
    trace: Annotated[Path | None, typer.Argument(help="Trace file; without one, --prompt and --output.")] = None,
    slo: Annotated[str, typer.Option(help="Objective, bounds in seconds.")] = "ttft_p99=2,tbt_p99=0.2",
    attainment: Annotated[
        float | None, typer.Option(help="Share of requests that have to meet the bounds by themselves, as 0.95.")
    ] = None,
    queue_delay: Annotated[
        float | None, typer.Option(help="Most median scheduling delay in s; 2 by default if no bound limits queueing.")
    ] = None,
    policies: Annotated[str | None, typer.Option(help="Policies, separated by commas.")] = None,
    chunk_sizes: Annotated[str | None, typer.Option(help="Chunk sizes, separated by commas.")] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs, separated by commas.")] = None,
    model: Annotated[str, typer.Option(help="Model.")] = "llama-3.1-8b",
    tp: Annotated[int, typer.Option(help="Tensor-parallel devices per stage.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks of a replica.")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="Whole experts on each of the tp x dp devices.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting of a replay or knob, as max_num_seqs=64; repeatable.")
    ] = None,
    term: TermOption = None,
    arrivals: Annotated[
        str | None, typer.Option(help="own (the trace's gaps), poisson, gamma:CV or uniform; the search sets the rate.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt lengths, if there is no trace: fixed:1024, ...")] = None,
    output: Annotated[str | None, typer.Option(help="Output lengths, if there is no trace: fixed:128, ...")] = None,
    requests: Annotated[int | None, typer.Option(help=f"Requests of a draw; {REQUESTS} by default.")] = None,
    draws: Annotated[
        int | None, typer.Option(help=f"Draws of the workload, the same for every setting; {DRAWS} by default.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help=f"Relative width to which a capacity is bracketed; {TOLERANCE} by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws, or of --arrivals beside --smallest.", min=0)] = 0,
    smallest: Annotated[
        bool, typer.Option("--smallest", help="Fewest replicas that serve the trace as it is, in place of a rate.")
    ] = False,
    price: Annotated[
        str | None, typer.Option(help="Of a GPU-hour: `2.5 EUR`, or amount=2.5,... as in docs/how-to/experiments.md.")
    ] = None,
    price_book: Annotated[
        Path | None, typer.Option(help="TOML with tables named price: docs/how-to/experiments.md.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write one HTML file to explore the result in.")] = None,
    engine: EngineOption = "local",
    workers: WorkersOption = None,
    ray_address: RayAddressOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Highest rate within an objective, with its 95 % interval; or, with --smallest, the cluster that a trace needs."""
    from experiments.capacity.prices import read_prices
    from experiments.capacity.search import Objective
    from experiments.running.early_notes import notes_of_search
    from experiments.running.task_runners import make_engine
    from policies.edges.declared_settings import settings_of
    from simulator.config import ReplayConfig

    refuse_unknown_flags(ctx, settings_of(ReplayConfig), ExperimentError)
    if report is not None:
        from metrics.html_report import require_plotly

        check_place(report, ExperimentError)
        require_plotly()
    prices = read_prices(price, price_book)
    objective = Objective.of(slo, attainment, queue_delay)
    axes = {
        name: values
        for name, values in (("policy", _list(policies)), ("chunk_size", _list(chunk_sizes, int)), ("gpu", _list(gpus)))
        if values
    }
    base: dict[str, Any] = {"model": model, "gpu": "h100", "tp": tp, "pp": pp, **_settings(settings or [])}
    base |= {name: value for name, value, default in (("dp", dp, 1), ("ep", ep, False)) if value != default}
    if term:
        base["terms"] = terms_of(term)
    for name in base:
        if name.startswith("trace.") or name == "limit" or (name == "rate_scale" and not smallest):
            raise ExperimentError(
                f"--set {name}: a capacity search sets its own draws and rates; see --requests, --arrivals"
            )
    workload, tried = _workload(trace, prompt, output), axes.get("policy", ())
    chosen = make_engine(engine, workers=workers, ray_address=ray_address)
    if smallest:
        for name, value in (("--requests", requests), ("--draws", draws), ("--tolerance", tolerance)):
            if value is not None:
                raise ExperimentError(f"{name}: found beside --smallest, which serves the trace as it is, once")
        if arrivals is not None:
            workload |= {"arrivals": arrivals, "seed": seed}
        notes = tell_notes(notes_of_search(workload, {**base, "slo": slo, "replicas": 2}, policies=tried))
        _smallest(workload, axes, base, objective, chosen, prices, as_json, report, notes)
        return
    draws, requests = DRAWS if draws is None else draws, REQUESTS if requests is None else requests
    from experiments.capacity.draws import draw_plan
    from experiments.capacity.study import find_capacities
    from experiments.running.progress import Progress

    plan = draw_plan(workload, arrivals=arrivals, requests=requests, draws=draws, seed=seed)
    notes = tell_notes(notes_of_search(workload, {**base, "slo": slo}, plan=plan, policies=tried))
    with Progress("capacity", "searches", quiet=as_json) as progress:
        study = find_capacities(
            axes,
            base,
            plan,
            objective,
            count=draws,
            tolerance=TOLERANCE if tolerance is None else tolerance,
            engine=chosen,
            report=progress,
        )
    if report is not None:
        _write_report(report, study, _priced(study, prices, base))
    if as_json:
        from metrics.run_folder.folder import json_ready

        found = {**study.as_dict(), "prices": _priced(study, prices, base), "notes": notes}
        print(json.dumps(json_ready(found), indent=2))
        return
    _print_study(study, _priced(study, prices, base), dict(study.draws), _held(axes, base))


def _write_report(path: Path, study: CapacityStudy, priced: list[dict[str, str]]) -> None:
    from metrics.html_report import RowTable, write_report

    rows = [{key: value for key, value in row.items() if key != "rates"} for row in study.rows()]
    probes = [
        {"setting": setting.label, "draw": number, "rate": probe["rate"], **probe["tightness"]}
        for setting in study.settings
        for number, draw in enumerate(setting.draws)
        for probe in draw["probes"]
    ]
    notes = [
        f"Objective: {study.objective.spoken()}.",
        f"Draws: {json.dumps(dict(study.draws))}; {study.reference.measured} requests of each are measured in steady "
        "state.",
        f"Intervals are 95 % (Student's t over draws), brackets of {study.tolerance:.1%} added.",
    ]
    for setting in study.settings:
        notes.append(f"{setting.label}: {setting.error or f'costs {setting.cost_model} ({setting.cost_basis})'}.")
    notes += [
        f"{row['setting']}: {row['per_million_output_tokens']} per million output tokens; {row['price']}."
        for row in priced
    ]
    axes = ["setting", *(name for name in study.settings[0].values)]
    about = (
        "GPU-seconds are those of all devices, over requests served and tokens delivered; ratios are to "
        f"{study.reference.label}."
    )
    tables = [
        RowTable("Capacities", rows, axes, about, up="requests_per_s"),
        RowTable("Rates that were tried", probes, ["rate", "setting", "draw"], "Statistic over bound; at most 1: met."),
    ]
    question = f"At which rate does {study.objective.slo} still hold?"
    write_report(path, question=question, verdict=_winner(study), tables=tables, notes=notes)


def _winner(study: CapacityStudy) -> str:
    """Who serves most, in one sentence; settings whose intervals meet that of the best are not told apart from it."""
    able = sorted((one for one in study.settings if not one.error), key=lambda one: -one.rate)
    if not able:
        return "No setting could be searched."
    best = able[0]
    told = f"{best.label} serves {best.rate:.3g} requests/s (± {best.half_width:.2g}) within the objective"
    close = [one.label for one in able[1:] if one.rate + one.half_width >= best.rate - best.half_width]
    if close:
        return (
            f"{told}; the draws do not tell it apart from {', '.join(close[:3])}{' and others' if close[3:] else ''}."
        )
    if able[1:]:
        next_one = able[1]
        return f"{told}, {best.rate / max(next_one.rate, 1e-9):.2f} times as many as the next, {next_one.label}."
    return f"{told}."


def _held(axes: dict[str, list[Any]], base: dict[str, Any]) -> str:
    """What all settings share and no label says: policy, model and GPUs of a replica."""
    values = {"policy": "chunked", **base, **{name: values[0] for name, values in axes.items()}}
    told = ("policy", "chunk_size", "model", "gpu", "tp", "pp", "dp", "ep")
    names = [name for name in told if len(axes.get(name, ())) < 2]
    policies = [str(name) for name in axes.get("policy", [values["policy"]])]
    chunked = [name for name in policies if "chunk_size" in knobs_of(policy_class(name))]
    if not chunked:
        values["chunk_size"] = None
    elif len(chunked) < len(policies) and values.get("chunk_size") is not None:
        values["chunk_size"] = f"{values['chunk_size']} for {' and '.join(chunked)} alone"
    names += [name for name in base if name not in (*told, "terms") and name not in axes]
    return ", ".join(f"{name.replace('_', ' ')} {values[name]}" for name in names if values.get(name) is not None)


def _print_study(study: CapacityStudy, priced: list[dict[str, str]], plan: dict[str, Any], held: str) -> None:
    from experiments.capacity.draws import OWN
    from experiments.capacity.search import SPAN_OVER_BOUND
    from metrics.drawing.text_tables import terminal

    console = terminal()

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    say(f"highest rate with {study.objective.spoken()}\nof {held}")
    console.print(_table(study))
    measured = study.reference.measured
    say(
        f"{len(study.reference.rates)} draws of {plan['requests']} requests, arrivals {plan['arrivals']}, {measured} "
        "of each measured in steady state; intervals: 95 % (Student's t over draws, brackets of "
        f"{study.tolerance:.1%} added)"
    )
    if "file" in plan["workload"] and plan["arrivals"] != OWN:
        say(
            f"note: the trace gives the lengths alone; its arrivals are replaced by {plan['arrivals']}"
            " (--arrivals own keeps its gaps, with draws that are pieces of it)"
        )
    spans = [plan["requests"] / setting.rate for setting in study.settings if setting.rates and setting.rate]
    if spans and min(spans) < 0.5 * study.objective.span_s():
        say(
            f"note: at capacity a run lasts only {min(spans):.0f} s; with such bounds on waiting, overload of up to "
            f"{study.objective.span_s() / SPAN_OVER_BOUND / min(spans):.0%} may go unseen: take more --requests"
        )
    for setting in study.settings:
        if setting.error:
            say(f"{setting.label}: {setting.error}")
        elif not setting.rate:
            say(f"{setting.label}: the objective is missed at every rate that was tried; {setting.limited_by} decides")
        elif setting.rejected_share:
            say(
                f"{setting.label}: {setting.rejected_share:.1%} of the requests are too long for it: they arrive, but "
                "count neither as served nor in tokens, GPU-seconds or money"
            )
    costs = [f"{one.cost_model} ({one.cost_basis})" for one in study.settings if one.cost_model]
    for name in dict.fromkeys(costs):
        say(f"costs: {name}")
    for row in priced:
        say(f"{row['setting']}: {row['per_million_output_tokens']} per million output tokens; {row['price']}")


def _table(study: CapacityStudy) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    ratio_to = f"times that of\n{study.reference.label}"
    for heading in ("setting", "requests/s", "95 %", ratio_to, "95 %", "limited by", "output tok/s"):
        table.add_column(heading, justify="left" if heading in ("setting", "limited by") else "right", no_wrap=True)
    table.add_column("GPU-s/request", justify="right", no_wrap=True)
    table.add_column("GPU-s/M tokens out", justify="right", no_wrap=True)
    for setting, row in zip(study.settings, study.rows()):
        if setting.error:
            table.add_row(setting.label, "-", "", "", "", "cannot be run", "", "", "")
            continue
        interval = f"{row['requests_per_s_low']:.3g} to {row['requests_per_s_high']:.3g}"
        ratio = (f"{row['ratio']:.2f}", f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}")
        ratio = ("", "") if setting is study.reference else ratio
        table.add_row(
            setting.label,
            f"{setting.rate:.3g}",
            interval,
            *ratio,
            setting.limited_by,
            f"{setting.output_tokens_per_s:,.0f}",
            f"{setting.gpu_seconds_per_request:.3g}",
            f"{setting.gpu_seconds_per_million_output_tokens:,.0f}",
        )
    return table


def _priced(study: CapacityStudy, prices: list[Price], base: dict[str, Any]) -> list[dict[str, str]]:
    from experiments.capacity.prices import prices_for

    rows = []
    for setting in study.settings:
        gpu = str(setting.values.get("gpu", base["gpu"]))
        for price in prices_for(prices, gpu) if not setting.error else ():
            spent = price.band(setting.gpu_seconds_per_million_output_tokens)
            rows.append(
                {
                    "setting": setting.label,
                    "per_million_output_tokens": spent,
                    "per_thousand_requests": price.band(1000 * setting.gpu_seconds_per_request),
                    "price": price.spoken(),
                }
            )
    return rows


def _smallest(
    workload: dict[str, Any],
    axes: dict[str, list[Any]],
    base: dict[str, Any],
    objective: Any,
    engine: Engine,
    prices: list[Price],
    as_json: bool,
    report: Path | None,
    notes: list[str],
) -> None:
    from dataclasses import asdict

    from experiments.capacity.prices import prices_for
    from experiments.capacity.study import combinations

    if "file" not in workload:
        raise ExperimentError("--smallest: found no trace, expected the trace file that the cluster has to serve")
    found = combinations(axes, base)
    tasks = {
        number: {**task, "kind": "cluster_size", "trace": workload, "objective": asdict(objective)}
        for number, (_, _, task) in enumerate(found)
    }
    try:
        results = dict(engine.run(tasks))
    finally:
        engine.close()
    rows = []
    for number, (label, values, _) in enumerate(found):
        done = results[number]
        row: dict[str, Any] = {"setting": label, **values, "error": done["error"], **done["result"]}
        if row.get("replicas"):
            facts = row["tried"][str(row["replicas"])]
            row |= {"devices": facts["devices"], "gpu_seconds": facts["devices"] * facts["duration_s"]}
            row["prices"] = [
                {"amount": price.band(row["gpu_seconds"]), "price": price.spoken()}
                for price in prices_for(prices, str(values.get("gpu", base["gpu"])))
            ]
        rows.append(row)
    if report is not None:
        _write_smallest_report(report, rows, objective, workload, _held(axes, base))
    if as_json:
        print(json.dumps({"objective": asdict(objective), "settings": rows, "notes": notes}, indent=2))
        return
    print(f"smallest cluster for the trace with {objective.spoken()}\nof {_held(axes, base)}")
    for row in rows:
        print(f"{row['setting']}: {_spoken_size(row)}")
        for price in row.get("prices", ()):
            print(f"  {price['amount']} for the trace; {price['price']}")


def _write_smallest_report(
    path: Path, rows: list[dict[str, Any]], objective: Any, workload: dict[str, Any], held: str
) -> None:
    from metrics.html_report import RowTable, write_report

    tried = [
        {
            "setting": row["setting"],
            "replicas": int(count),
            "devices": facts["devices"],
            "gpu_seconds": facts["devices"] * facts["duration_s"],
            "holds": facts["holds"],
            **facts["tightness"],
        }
        for row in rows
        for count, facts in row.get("tried", {}).items()
    ]
    sizes = [
        {
            "setting": row["setting"],
            "replicas": row.get("replicas"),
            "devices": row.get("devices"),
            "gpu_seconds": row.get("gpu_seconds"),
            "error": row["error"],
        }
        for row in rows
    ]
    notes = [
        f"Objective: {objective.spoken()}. All settings: {held}.",
        f"Workload: {json.dumps(workload)}; every request is measured.",
    ]
    notes += [f"{row['setting']}: {_spoken_size(row)}." for row in rows]
    notes += [
        f"{row['setting']}: {price['amount']} for the trace; {price['price']}."
        for row in rows
        for price in row.get("prices", ())
    ]
    tables = [
        RowTable(
            "Smallest clusters",
            sizes,
            ["setting"],
            "GPU-seconds are those of all devices, from first to last.",
            up="devices",
        ),
        RowTable("Sizes that were tried", tried, ["setting", "replicas"], "Statistic over bound; at most 1: met."),
    ]
    question = f"How few replicas serve the trace with {objective.spoken()}?"
    able = [row for row in rows if row.get("devices") and not row["error"]]
    fewest = min(able, key=lambda row: row["devices"], default=None)
    verdict = "No size that was tried holds the objective."
    if fewest is not None:
        verdict = f"{fewest['setting']} needs the fewest devices: {fewest['devices']} in {fewest['replicas']} replicas."
    write_report(path, question=question, verdict=verdict, tables=tables, notes=notes)


def _spoken_size(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"cannot be run: {row['error']}"
    if row["replicas"] is None:
        most = row["tried"][max(row["tried"], key=int)]
        return f"no number of replicas is enough: {most['tightest']} fails even with {max(row['tried'], key=int)}"
    needed = row["replicas"]
    at = row["tried"][str(needed)]
    text = f"{_count(needed, 'replica')}, {_count(int(row['devices']), 'GPU')}, {row['gpu_seconds']:,.0f} GPU-seconds"
    text += f"; tightest {at['tightest']} at {max(at['tightness'].values()):.0%} of its bound"
    if needed > 1:
        below = row["tried"][str(needed - 1)]
        # JSON has no infinity, which is what a bound is missed by that all requests have to keep.
        worst = max([math.inf if value is None else value for value in below["tightness"].values()])
        text += f", with {needed - 1}: {below['tightest']} " + ("misses" if worst == math.inf else f"at {worst:.0%}")
    if at["rejected"]:
        text += f"; {at['rejected']} of {_count(at['measured'], 'request')} are too long for it and not served"
    return text + f" (costs: {at['cost_model']}, {at['cost_basis']})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _workload(trace: Path | None, prompt: str | None, output: str | None) -> dict[str, Any]:
    if trace is not None:
        if prompt or output:
            raise ExperimentError("--prompt, --output: found beside a trace, expected either a trace or both of them")
        return {"file": str(trace)}
    if not prompt or not output:
        raise ExperimentError("found no trace: name a trace file, or give --prompt and --output, as fixed:1024")
    return {"prompt": prompt, "output": output}


def _list(text: str | None, kind: type = str) -> list[Any]:
    try:
        return [kind(part.strip()) for part in text.split(",")] if text else []
    except ValueError:
        raise ExperimentError(f"found {text!r}, expected whole numbers separated by commas") from None


def _settings(pairs: list[str]) -> dict[str, Any]:
    """`max_num_seqs=64` as a setting; values that read as JSON are taken as such, others as text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ExperimentError(f"--set: found {pair!r}, expected name=value")
        try:
            found[name.strip().replace("-", "_")] = json.loads(value)
        except (ValueError, RecursionError):
            found[name.strip().replace("-", "_")] = value
    return found
