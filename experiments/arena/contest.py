"""A contest: knobs are tuned on the first piece of each trace, then everybody plays the others.

Tuning is successive halving (Jamieson and Talwalkar 2016): settings that Optuna's TPE sampler proposes play a quarter
of the tuning part, the better half of them half of it, and so on; one setting per policy for all workloads and loads.
Judging is paired: slice k of every workload, with the k-th draw of the costs' own error, is the same for all.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.arena.knob_space import ENGINE, Choice, knob_space, told_by
from experiments.arena.match import KNEE_POLICY, Part, Workload, parts_of
from experiments.errors import ExperimentError
from experiments.running.task_runners import Engine
from experiments.running.tasks import with_inputs

RUNGS = (0.25, 0.5, 1.0)
"""Shares of the tuning part that a setting plays, as long as it is among the better half."""
BATCH = 6
"""Settings of a policy that start together."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Entrant:
    """label: policy with the knobs that its user fixed. fixed: those knobs."""

    label: str
    policy: str
    fixed: Mapping[str, Any]


@dataclass(frozen=True)
class Rules:
    """What everybody plays under. config: settings of a replay beside policy and knobs. loads: shares of the knee.

    trials: most settings tried per policy. budget_s: most seconds of tuning in all. slices: pieces that judge. draws:
    draws of the costs' own error in each slice. seed: of proposals, presets and draws.
    """

    config: Mapping[str, Any]
    loads: tuple[float, ...]
    trials: int
    budget_s: float
    slices: int
    draws: int
    seed: int


@dataclass
class Tuned:
    """The best setting of an entrant, and how it and the default did on the tuning part."""

    entrant: Entrant
    knobs: dict[str, Any]
    score: float
    default_score: float
    tried: int


@dataclass
class Contest:
    """results: (entrant, workload, load) -> the rows of run_match, slice by slice, draw by draw."""

    rules: Rules
    workloads: Sequence[Workload]
    entrants: Sequence[Entrant]
    knee: dict[str, float] = field(default_factory=dict)
    tuned: dict[str, Tuned] = field(default_factory=dict)
    results: dict[tuple[str, str, float], list[dict[str, Any]]] = field(default_factory=dict)
    spent_s: float = 0.0
    cut: bool = False


class Played:
    """What was played already, one line each in out/matches.jsonl: a contest that is started again goes on there."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.path, self.engine = folder / "matches.jsonl", engine
        folder.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                    self.known[row["task"]] = row["result"]
                except (ValueError, KeyError):
                    continue  # the last line of a contest that was stopped in the middle of it
        self.errors: dict[str, str] = {}

    def error_of(self, tasks: Sequence[Mapping[str, Any]]) -> str:
        """Why the first of some tasks failed."""
        names = (_name(with_inputs(task)) for task in tasks)
        return next(self.errors[name] for name in names if name in self.errors)

    def of(self, tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
        """The result of each task; None where it failed, with its reason in `error_of`."""
        whole = [with_inputs(task) for task in tasks]
        names = [_name(task) for task in whole]
        missing = {at: task for at, task in enumerate(whole) if names[at] not in self.known}
        first = {names[at]: at for at in reversed(missing)}
        failed: set[str] = set()
        with self.path.open("a", encoding="utf-8") as file:
            for at, result in self.engine.run({at: missing[at] for at in sorted(first.values())}) if first else ():
                if result["status"] != "ok":
                    failed.add(names[at])
                    self.errors[names[at]] = result["error"]
                    continue
                self.known[names[at]] = result["result"]
                file.write(json.dumps({"task": names[at], "result": result["result"]}) + "\n")
                file.flush()
        return [None if name in failed else self.known[name] for name in names]


def _name(task: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:24]


def hold(
    contest: Contest, played: Played, tell: Tell, settings: Mapping[str, Mapping[str, Any]] | None = None
) -> Contest:
    """Tune and judge. settings: knobs by entrant of an earlier contest, which are judged as they are."""
    rules = contest.rules
    parts = {workload.name: parts_of(workload, rules.slices) for workload in contest.workloads}
    tell(f"looking for the knee of {len(contest.workloads)} workloads under {KNEE_POLICY}")
    tasks = [
        {
            "kind": "arena_knee",
            "workload": dict(workload.settings),
            "part": [parts[workload.name][0].start, parts[workload.name][0].end],
            "config": {**rules.config, "slo": workload.slo},
        }
        for workload in contest.workloads
    ]
    for workload, task, found in zip(contest.workloads, tasks, played.of(tasks), strict=True):
        if found is None:
            raise ExperimentError(f"{workload.name}: {played.error_of([task])}")
        contest.knee[workload.name] = found["rate"]
    began = time.monotonic()
    for number, entrant in enumerate(contest.entrants):
        if settings is not None:
            knobs = dict(settings.get(entrant.label, entrant.fixed))
            contest.tuned[entrant.label] = Tuned(entrant, knobs, float("nan"), float("nan"), 0)
            continue
        # What one does not use of its share is there for those after it.
        left = rules.budget_s - (time.monotonic() - began)
        until = time.monotonic() + left / (len(contest.entrants) - number)
        contest.tuned[entrant.label] = _tune(contest, entrant, parts, played, until, tell)
    contest.spent_s = time.monotonic() - began
    tell(f"judging {len(contest.entrants)} policies on {rules.slices} slices of each workload")
    judged = [
        (label, workload, load) for label in contest.tuned for workload in contest.workloads for load in rules.loads
    ]
    tasks = []
    for label, workload, load in judged:
        tuned = contest.tuned[label]
        for at, part in enumerate(parts[workload.name][1]):
            for draw in range(rules.draws):
                # Draw 0 is the costs themselves.
                seed = None if draw == 0 else rules.seed * 1_000_003 + at * 1_009 + draw
                tasks.append(_match(contest, tuned.entrant, tuned.knobs, workload, part, load, 1.0, seed))
    rows = played.of(tasks)
    each = rules.slices * rules.draws
    for at, (label, workload, load) in enumerate(judged):
        some = rows[at * each : (at + 1) * each]
        if None in some:
            raise ExperimentError(f"{label} on {workload.name}: {played.error_of(tasks[at * each : (at + 1) * each])}")
        contest.results[label, workload.name, load] = [row for row in some if row is not None]
    return contest


def _match(
    contest: Contest,
    entrant: Entrant,
    knobs: Mapping[str, Any],
    workload: Workload,
    part: Part,
    load: float,
    share: float,
    draw: int | None,
) -> dict[str, Any]:
    config = {**contest.rules.config, "policy": entrant.policy, "slo": workload.slo}
    own = {**told_by(entrant.policy, workload.slo), **knobs}
    config |= {name: own.pop(name) for name in ENGINE if name in own}
    return {
        "kind": "arena",
        "workload": dict(workload.settings),
        "part": [part.start, part.end],
        "share": share,
        "rate": load * contest.knee[workload.name],
        "config": {**config, "knobs": own},
        "draw": draw,
    }


def _tune(
    contest: Contest,
    entrant: Entrant,
    parts: Mapping[str, tuple[Part, tuple[Part, ...]]],
    played: Played,
    until: float,
    tell: Tell,
) -> Tuned:
    """Successive halving over settings that Optuna proposes, the default among them."""
    optuna = _optuna()
    rules = contest.rules
    space = knob_space(entrant.policy, entrant.fixed)

    def scores(settings: Sequence[Mapping[str, Any]], share: float) -> list[float | None]:
        tasks = [
            _match(contest, entrant, {**entrant.fixed, **knobs}, workload, parts[workload.name][0], load, share, None)
            for knobs in settings
            for workload in contest.workloads
            for load in rules.loads
        ]
        rows = played.of(tasks)
        each = len(contest.workloads) * len(rules.loads)
        found: list[float | None] = []
        for at in range(len(settings)):
            some = [row["score"] for row in rows[at * each : (at + 1) * each] if row is not None]
            found.append(fmean(some) if len(some) == each else None)
        return found

    (default,) = scores([{}], 1.0)
    if default is None:
        raise ExperimentError(f"{entrant.label}: {next(reversed(played.errors.values()))}")
    best, best_score, tried = dict(entrant.fixed), default, 1
    if not space:
        return Tuned(entrant, best, best_score, default, tried)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=rules.seed, n_startup_trials=BATCH)
    )
    distributions = {name: _distribution(optuna, choice) for name, choice in space.items()}
    while tried < rules.trials:
        if time.monotonic() >= until:
            contest.cut = True
            break
        trials = [study.ask(distributions) for _ in range(min(BATCH, rules.trials - tried))]
        tried += len(trials)
        alive = list(trials)
        for step, share in enumerate(RUNGS):
            found = scores([_chosen(space, trial.params) for trial in alive], share)
            ranked = sorted(
                ((score, -trial.number, trial) for score, trial in zip(found, alive, strict=True) if score is not None),
                key=lambda entry: entry[:2],
                reverse=True,
            )
            lost = [trial for score, trial in zip(found, alive, strict=True) if score is None]
            for trial in lost:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            for score, _, trial in ranked:
                trial.report(score, step)
            keep = len(ranked) if share == RUNGS[-1] else -(-len(ranked) // 2)
            for score, _, trial in ranked[keep:]:
                study.tell(trial, score)
            alive = [trial for _, _, trial in ranked[:keep]]
            if share == RUNGS[-1]:
                for score, _, trial in ranked:
                    study.tell(trial, score)
                    if score > best_score:
                        best, best_score = {**entrant.fixed, **_chosen(space, trial.params)}, score
            if not alive:
                break
    tell(f"{entrant.label}: {tried} settings, {default:.1%} by default, {best_score:.1%} tuned")
    return Tuned(entrant, best, best_score, default, tried)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ExperimentError("arena: Optuna is not installed: pip install optuna") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(optuna: Any, choice: Choice) -> Any:
    if choice.values:
        return optuna.distributions.CategoricalDistribution(tuple(range(len(choice.values))))
    if choice.whole:
        return optuna.distributions.IntDistribution(int(choice.low), int(choice.high), log=choice.log)
    return optuna.distributions.FloatDistribution(choice.low, choice.high, log=choice.log)


def _chosen(space: Mapping[str, Choice], params: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {}
    for name, value in params.items():
        choice = space[name]
        # Three digits of a knob are more than any trace can tell apart, and can be typed.
        chosen[name] = choice.values[value] if choice.values else value if choice.whole else float(f"{value:.3g}")
    return chosen


def entrants_of(texts: Iterable[tuple[str, str, Mapping[str, Any]]]) -> list[Entrant]:
    """(label, policy, knobs) as a list of policies was read."""
    return [Entrant(label, policy, dict(knobs)) for label, policy, knobs in texts]
