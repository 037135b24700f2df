"""`python -m experiments arena`: which policy serves most within an objective, and whether that is more than chance."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.errors import ExperimentError
from experiments.sweeps.command import EngineOption, RayAddressOption, WorkersOption

LOADS = "0.9,1.2,1.6"
TOML_KEYS = {"traces", "objective", "requests", "loads", "slices", "draws", "seed", "config", "policies"}


def register(app: typer.Typer) -> None:
    app.command("arena")(arena)


def arena(
    traces: Annotated[list[str], typer.Argument(help="Trace files, presets (chat, code, ...), or one arena.toml.")],
    objective: Annotated[
        str, typer.Option(help="goodput@BOUNDS that each request has to meet, in seconds; goodput: a preset's own.")
    ] = "goodput",
    budget: Annotated[str, typer.Option(help="Most time of tuning, as 30m, 90s or 2h; 0 judges the defaults.")] = "10m",
    policies: Annotated[
        str, typer.Option(help="Policies, between commas, as vllm_v1:token_budget=2048 or FILE.py:Class; or all.")
    ] = "all",
    loads: Annotated[
        str, typer.Option(help="Shares of the rate at which slo_aware keeps nine of ten in time.")
    ] = LOADS,
    model: Annotated[str, typer.Option(help="Model.")] = "llama-3.1-8b",
    gpu: Annotated[str, typer.Option(help="GPU.")] = "h100",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting of a replay, as tp=2; repeatable.")
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Requests of each workload, in slices + 1 pieces: one to tune on.")
    ] = 2400,
    trials: Annotated[int, typer.Option(help="Most settings tried per policy.")] = 18,
    slices: Annotated[int, typer.Option(help="Pieces that judge: what chance is told from.")] = 4,
    draws: Annotated[
        int, typer.Option(help="Draws of the costs' own error per slice, the costs themselves first.")
    ] = 2,
    seed: Annotated[int, typer.Option(help="Of proposals, presets and draws.", min=0)] = 0,
    on_bad_row: Annotated[str, typer.Option(help="fail at a bad row of a trace, or skip it and say so.")] = "fail",
    out: Annotated[Path, typer.Option(help="Folder; started again, the contest goes on there.")] = Path("runs/arena"),
    engine: EngineOption = "local",
    workers: WorkersOption = None,
    ray_address: RayAddressOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Tune every policy on a piece of each trace, judge it on the others, and say who wins, if anybody does."""
    from experiments.arena.contest import Contest, Entrant, Played, Rules, hold
    from experiments.arena.match import parse_objective, workload_of
    from experiments.arena.page import as_toml, write
    from experiments.arena.verdict import verdict
    from experiments.running.task_runners import make_engine

    earlier: dict[str, dict[str, Any]] | None = None
    if len(traces) == 1 and traces[0].endswith(".toml"):
        again = _read_again(Path(traces[0]))
        traces, objective, requests = again["traces"], again["objective"], again["requests"]
        chosen, slices, draws, seed = tuple(again["loads"]), again["slices"], again["draws"], again["seed"]
        config = again["config"]
        entrants = [Entrant(row["label"], row["policy"], {}) for row in again["policies"]]
        earlier = {row["label"]: row["knobs"] for row in again["policies"]}
    else:
        chosen = _loads(loads)
        config = {"model": model, "gpu": gpu, **_settings(settings or [])}
        entrants = _entrants(policies)
    for name, value, least in (
        ("--slices", slices, 2),
        ("--draws", draws, 1),
        ("--trials", trials, 1),
    ):
        if value < least:
            raise ExperimentError(f"{name}: found {value}, expected at least {least}")
    budget_s = _seconds(budget)
    if not budget_s and earlier is None:
        earlier = {entrant.label: dict(entrant.fixed) for entrant in entrants}
    slo = parse_objective(objective)
    workloads = [workload_of(text, slo, requests, seed, {"on_bad_row": on_bad_row}) for text in traces]
    if len({workload.name for workload in workloads}) < len(workloads):
        raise ExperimentError(f"found two workloads of one name among {', '.join(traces)}, expected different ones")
    rules = Rules(config, chosen, trials, budget_s, slices, draws, seed)

    def tell(text: str) -> None:
        if not as_json:
            print(text, file=sys.stderr, flush=True)

    work = make_engine(engine, workers=workers, ray_address=ray_address)
    try:
        contest = hold(Contest(rules, workloads, entrants), Played(out, work), tell, earlier)
    except KeyboardInterrupt:
        print(f"interrupted; what was played is kept in {out}, the same command goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        work.close()
    found = verdict(contest)
    command = "python -m experiments arena " + shlex.join([arg for arg in _arguments() if arg != "--json"])
    write(contest, found, out, command, as_toml(contest, found, objective, traces, requests))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    _print(found, out)


def _arguments() -> list[str]:
    """What followed the command's name, as it was typed."""
    return sys.argv[sys.argv.index("arena") + 1 :] if "arena" in sys.argv else []


def _print(found: Mapping[str, Any], out: Path) -> None:
    from rich import box
    from rich.table import Table

    from metrics.drawing.text_tables import terminal

    console = terminal()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy")
    for heading in ("in time", *(f"load {load}" for load in found["by_load"]), "behind", "95 %"):
        table.add_column(heading, justify="right")
    rivals = {rival["name"]: rival for rival in found["overall"]["rivals"]}
    for name, score in found["overall"]["scores"].items():
        rival = rivals.get(name)
        behind = (
            ("", "")
            if rival is None
            else (
                f"{100 * rival['ahead']:.2f}",
                f"{100 * rival['low']:.2f} to {100 * rival['high']:.2f}",
            )
        )
        by_load = [f"{each['scores'][name]:.1%}" for each in found["by_load"].values()]
        table.add_row(name, f"{score:.1%}", *by_load, *behind)
    console.print(table, markup=False)
    console.print(found["sentence"], highlight=False, soft_wrap=True, markup=False)
    for flip in found["flips"]:
        console.print(
            f"At load {flip['load']:g} {flip['leader']} leads instead.", highlight=False, soft_wrap=True, markup=False
        )
    console.print(f"Read {out / 'arena.md'}; play it again: {out / 'arena.toml'}", highlight=False, soft_wrap=True)


def _loads(text: str) -> tuple[float, ...]:
    found = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = -1.0
        if not 0 < value <= 100:
            raise ExperimentError(f"--loads: found {part.strip()!r}, expected loads above 0, as {LOADS}")
        found.append(value)
    return tuple(dict.fromkeys(found))


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text.strip())
    if match is None:
        raise ExperimentError(f"--budget: found {text!r}, expected a time such as 30m, 90s or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[match[2]]


def _settings(pairs: Sequence[str]) -> dict[str, Any]:
    from policies.edges.settings import shown
    from simulator import ReplayConfig

    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name in ("policy", "knobs", "slo") or name not in ReplayConfig.__dataclass_fields__:
            raise ExperimentError(f"--set: found {shown(pair)}, expected a setting of a replay, as tp=2")
        try:
            found[name] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            found[name] = value
    ReplayConfig.from_dict(found)
    return found


def _entrants(text: str) -> list[Any]:
    """Policies of a command line: NAME[:knob=value...] or FILE.py:Class[:knob=value...]."""
    from experiments.arena.contest import Entrant
    from experiments.arena.knob_space import ENGINE
    from policies import make_policy
    from policies.edges.distinct_names import distinct_names
    from policies.registry import knob_value, knobs_of, policy_class, policy_names

    texts = policy_names() if text == "all" else [part.strip() for part in text.split(",") if part.strip()]
    if not texts:
        raise ExperimentError(f"--policies: found {text!r}, expected names separated by commas, or all")
    names, knobs = [], []
    for entry in texts:
        parts = entry.split(":")
        count = 2 if parts[0].endswith(".py") else 1
        name = ":".join(parts[:count])
        known = knobs_of(policy_class(name))
        own: dict[str, Any] = {}
        for part in parts[count:]:
            knob, equals, value = part.partition("=")
            if equals and knob in ENGINE and value.isdigit():
                own[knob] = int(value)
            elif equals and knob in known:
                own[knob] = knob_value(name, known[knob], value)
            else:
                raise ExperimentError(
                    f"--policies: found {part!r} of {name}, expected knob=value with one of "
                    f"{', '.join([*known, *ENGINE])}"
                )
        make_policy(name, {key: value for key, value in own.items() if key not in ENGINE})
        names.append(name)
        knobs.append(own)
    fixed = [
        ":".join([name, *(f"{key}={value}" for key, value in own.items())]) if own else ""
        for name, own in zip(names, knobs, strict=True)
    ]
    labels = distinct_names(names)
    labels = [said or label for said, label in zip(fixed, labels, strict=True)]
    if len(set(labels)) < len(labels):
        raise ExperimentError(f"--policies: found {text!r}, expected different ones")
    return [Entrant(*entry) for entry in zip(labels, names, knobs, strict=True)]


def _read_again(path: Path) -> dict[str, Any]:
    """An arena.toml; ExperimentError for one that lacks a part."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ExperimentError(f"{path}: {error}") from None
    if set(found) != TOML_KEYS:
        wrong = ", ".join(sorted(set(found) ^ TOML_KEYS))
        raise ExperimentError(f"{path}: missing or unknown: {wrong}; expected what a contest wrote as arena.toml")
    for row in found["policies"]:
        if set(row) != {"label", "policy", "knobs"}:
            raise ExperimentError(f"{path}: found a policy with {', '.join(row)}, expected label, policy and knobs")
    return found
