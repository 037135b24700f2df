"""One point of a sweep: a replay with its settings, and what it came to as one flat row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from functools import lru_cache
from typing import Any

from experiments.errors import ExperimentError
from experiments.running.task_runners import placed
from experiments.running.workload import load_workload
from policies.edges.input_digests import digests_of

FACTS = ("num_blocks", "max_model_len", "slots", "cost_kind")
"""What a row takes from the run's config beside its summary."""


def run_point(task: Mapping[str, Any]) -> dict[str, Any]:
    """Replay one point. task: trace, config (fields of a replay), model and hardware (facts to change)."""
    from simulator import replay

    run = replay(load_workload(task["trace"]), replay_config(task))
    row = {name: run.config.get(name) for name in FACTS}
    row["devices"] = run.config["peaks"]["devices"]
    return {**run.summary, **row}


def replay_config(task: Mapping[str, Any]) -> Any:
    """The ReplayConfig of a task; changed facts of model or GPU become a file that its names point to."""
    from simulator import ReplayConfig

    values = dict(task["config"])
    for kind, key in (("model", "model"), ("hardware", "gpu")):
        if changes := task.get(kind):
            base = values.get(key, ReplayConfig.__dataclass_fields__[key].default)
            values[key] = _changed(
                kind, str(base), json.dumps(changes, sort_keys=True), tuple(digests_of(str(base)).items())
            )
    return ReplayConfig.from_dict(values)


@lru_cache(maxsize=256)
def _changed(kind: str, base: str, changes: str, inputs: tuple[tuple[str, str], ...]) -> str:
    """A TOML file of the base with some facts changed; under another name, so that no fitted model is taken for it.

    Facts that equal the base's own change nothing: a grid through the datasheet's value keeps the fitted costs there.
    """
    from profiler import load_hardware, load_model_spec

    load: Callable[[str], Any] = load_model_spec if kind == "model" else load_hardware
    spec = load(base)
    known = {field.name for field in fields(spec)} - {"name", "kernels_of", "own_link"}
    facts = asdict(spec)
    for name, value in json.loads(changes).items():
        outer, _, inner = name.partition(".")
        if outer not in known:
            facts_known = ", ".join(sorted(known))
            raise ExperimentError(f"{kind}.{name}: {spec.name} has no such fact, expected one of {facts_known}")
        if inner and not isinstance(facts[outer] or {}, Mapping):
            raise ExperimentError(f"{kind}.{name}: {outer} of {spec.name} is no table, expected {kind}.{outer}")
        facts[outer] = {**(facts[outer] or {}), inner: value} if inner else value
    # What follows from other facts, or from the file that they stand in, is no key of a file.
    derived = {name: facts.pop(name) for name in ("name", "kernels_of", "own_link") if name in facts}
    file = placed(f"{spec.name}-changed.toml", facts_as_toml(facts).encode())
    return base if replace(load(file), **derived) == spec else file


def facts_as_toml(facts: Mapping[str, Any]) -> str:
    """A flat table as TOML; None means that the key is absent."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in facts.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    # JSON spells strings, booleans and numbers as TOML does; repr keeps a float a float (1e+16).
    return repr(value) if isinstance(value, float) else json.dumps(value)
