"""What a sweep is: a trace, settings that stay, and axes that vary, read from one TOML file.

An axis is named like the thing it varies: a field of a replay (`policy`, `tp`, `rate_scale`), a knob of the policy
(`chunk_size`), or with a prefix a setting of the trace (`trace.prompt`), a fact of the GPU
(`hardware.memory_bandwidth`), of the model (`model.layers`), or a term of the engine (`term.host_tp_step_us`). A knob
goes only to those policies that have it, so one sweep can hold policies with different knobs; points that become equal
that way are run once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.errors import ExperimentError
from policies.edges.input_file import read_toml
from policies.edges.settings_file import files_beside, knobs_of_file

METHODS = ("grid", "random", "optuna")
PREFIXES = ("trace", "model", "hardware", "term")
Values = dict[str, Any]

_TOP = ("method", "points", "seed", "objective", "direction", "batch", "trace", "base", "space")
_RANGE = ("low", "high", "step", "count", "log")
_MOST_POINTS = 1_000_000


@dataclass(frozen=True)
class Axis:
    """One thing that varies: `values` to choose from, or a range from `low` to `high`, both included.

    step: distance of neighbouring values. count: how many values a grid takes. log: evenly spread in the logarithm.
    whole: the values are whole numbers (both ends were given as such, and what varies takes no others).
    """

    name: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    count: int | None = None
    log: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def grid(self) -> tuple[Any, ...]:
        """The values that a grid visits."""
        if self.values:
            return self.values
        if self.step is not None:
            steps = math.floor((self.high - self.low) / self.step + 1e-9)
            return tuple(self._rounded(self.low + index * self.step) for index in range(steps + 1))
        if self.count is None:
            raise ExperimentError(f"space.{self.name}: a grid needs a list, or a range with step or count")
        spread = np.geomspace if self.log else np.linspace
        return tuple(dict.fromkeys(self._rounded(x) for x in spread(self.low, self.high, self.count).tolist()))

    def draw(self, rng: np.random.Generator) -> Any:
        """One value at random."""
        if self.values:
            return self.values[int(rng.integers(len(self.values)))]
        if self.step is not None:
            steps = math.floor((self.high - self.low) / self.step + 1e-9)
            return self._rounded(self.low + int(rng.integers(steps + 1)) * self.step)
        # The ends of a whole range are as likely as what lies between: half a step more on either side is theirs.
        spare = 0.5 if self.whole else 0.0
        low, high = self.low - spare, self.high + spare
        if self.log:
            value = math.exp(rng.uniform(math.log(low), math.log(high)))
        else:
            value = rng.uniform(low, high)
        return min(max(self._rounded(value), self.low), self.high)

    def _rounded(self, value: float) -> int | float:
        return round(value) if self.whole else float(f"{value:.12g}")


@dataclass(frozen=True)
class SweepSpec:
    """A sweep, apart from where its results go. points: how many a random or Optuna search takes.

    objective, direction: what Optuna improves (a key of the summary; maximize or minimize). batch: points that Optuna
    proposes at a time; it hears of results only between batches, so that they do not depend on who finished first.
    """

    method: str
    axes: tuple[Axis, ...]
    trace: Values
    base: Values = field(default_factory=dict)
    points: int = 0
    seed: int = 0
    objective: str = ""
    direction: str = ""
    batch: int = 8

    def fingerprint(self) -> str:
        """Equal for sweeps that have equal points, as far as both of them go."""
        facts = {name: value for name, value in asdict(self).items() if name != "points" or self.method == "grid"}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def read_sweep(path: str | Path) -> SweepSpec:
    """Read a sweep file; its relative file names mean files beside it. ExperimentError names the key that is wrong."""
    file = Path(path)
    content = read_toml(file, ExperimentError)
    try:
        return parse_sweep(files_beside(content, file.parent), file.parent)
    except ExperimentError as error:
        raise ExperimentError(f"{file}: {error}") from None


def parse_sweep(content: Mapping[str, Any], folder: Path = Path()) -> SweepSpec:
    """A sweep from the tables of a sweep file. folder: what relative file names are relative to."""
    for key in content:
        if key not in _TOP:
            raise ExperimentError(f"found key {key!r}, expected one of {', '.join(_TOP)}")
    method = content.get("method", "grid")
    if method not in METHODS:
        raise ExperimentError(f"method: found {method!r}, expected one of {', '.join(METHODS)}")
    space = _table(content, "space")
    if not space:
        raise ExperimentError("space: found no axis, expected at least one, such as chunk_size = [256, 512]")
    axes = tuple(_axis(name, value) for name, value in _flat(space))
    base = _table(content, "base")
    knobs_of_file(dict(base), ExperimentError)  # contradictions within it
    spec = SweepSpec(
        method,
        tuple(_with_fractions(axis, _policies(axes, base)) for axis in axes),
        _absolute(_table(content, "trace"), folder),
        base,
        _whole(content, "points", 0),
        _whole(content, "seed", 0),
        str(content.get("objective", "")),
        str(content.get("direction", "")),
        _whole(content, "batch", 8, least=1),
    )
    if method != "grid" and spec.points < 1:
        raise ExperimentError(f"points: found {spec.points}, expected how many a {method} search takes, such as 50")
    if method == "optuna" or spec.objective or spec.direction:
        _check_objective(spec)
    _check_names(spec)
    return spec


def enumerate_points(spec: SweepSpec) -> list[Values]:
    """The points of a grid or random sweep in order: what each sets, knobs that its policy lacks left out."""
    if spec.method == "grid":
        names = [axis.name for axis in spec.axes]
        lists = [axis.grid() for axis in spec.axes]
        if math.prod(map(len, lists)) > _MOST_POINTS:
            raise ExperimentError(f"space: found more than {_MOST_POINTS:,} points, expected fewer")
        raw: Iterator[Values] = (dict(zip(names, combination)) for combination in itertools.product(*lists))
    elif spec.method == "random":
        raw = (random_point(spec, number) for number in range(spec.points))
    else:
        raise ExperimentError("optuna: its points are known only as it goes")
    points: dict[str, Values] = {}
    for values in raw:
        kept = applicable(spec, values)
        points.setdefault(json.dumps(kept, sort_keys=True), kept)
    return list(points.values())


def random_point(spec: SweepSpec, number: int) -> Values:
    """Point `number` of a random sweep; it does not change when more are asked for."""
    rng = np.random.default_rng([spec.seed, number])
    return {axis.name: axis.draw(rng) for axis in spec.axes}


def applicable(spec: SweepSpec, values: Values) -> Values:
    """The same values without the knobs that this point's policy does not have."""
    knobs = _knobs_of(str(values.get("policy", spec.base.get("policy", "chunked"))))
    return {name: value for name, value in values.items() if not is_knob(name) or name in knobs}


def task_of(spec: SweepSpec, values: Values) -> dict[str, Any]:
    """What a worker needs to run one point: trace, config and changed facts, as plain data."""
    task: dict[str, Any] = {"kind": "point", "trace": dict(spec.trace), "config": {}, "model": {}, "hardware": {}}
    policy = str(values.get("policy", spec.base.get("policy", "chunked")))
    knobs: Values = {}
    for name, value in {**spec.base, **values}.items():
        prefix, dot, rest = name.partition(".")
        if dot and prefix == "term":
            task["config"]["terms"] = {**task["config"].get("terms", {}), rest: value}
        elif dot and prefix in PREFIXES:
            task[prefix][rest] = value
        elif is_knob(name):
            if name in _knobs_of(policy):
                knobs[name] = value
        else:
            task["config"][name] = value
    task["config"]["knobs"] = {**task["config"].get("knobs", {}), **knobs}
    task["trace"].setdefault("seed", task["config"].get("seed", 0))
    return task


def is_knob(name: str) -> bool:
    """Whether a name means a knob of the policy: it is no field of a replay and has no prefix."""
    from simulator.config import ReplayConfig

    return name not in ReplayConfig.__dataclass_fields__ and name.partition(".")[0] not in PREFIXES


def _check_names(spec: SweepSpec) -> None:
    from experiments.running.workload import WORKLOAD_KEYS
    from profiler.operators.engine_terms import EngineTerms

    policies = _policies(spec.axes, spec.base)
    known = set().union(*(_knobs_of(policy) for policy in policies))
    for name in [*(axis.name for axis in spec.axes), *spec.base]:
        prefix, dot, rest = name.partition(".")
        if dot and prefix not in PREFIXES:
            raise ExperimentError(f"found {name!r}, expected a prefix of {', '.join(PREFIXES)}")
        if dot and prefix == "term":
            EngineTerms.from_mapping({rest: getattr(EngineTerms(), rest, None)}, name)
        if prefix == "trace" and rest not in WORKLOAD_KEYS:
            raise ExperimentError(f"found {name!r}, expected trace. and one of {', '.join(sorted(WORKLOAD_KEYS))}")
        if is_knob(name) and name not in known:
            raise ExperimentError(
                f"found {name!r}, which is neither a setting of a replay nor a knob of {', '.join(sorted(policies))} "
                f"({', '.join(sorted(known)) or 'no knobs'})"
            )
    for name in spec.trace:
        if name not in WORKLOAD_KEYS:
            raise ExperimentError(f"trace: found {name!r}, expected some of {', '.join(sorted(WORKLOAD_KEYS))}")


def _check_objective(spec: SweepSpec) -> None:
    from metrics.measures.summary_keys import SUMMARY_KEYS

    if spec.objective not in SUMMARY_KEYS:
        raise ExperimentError(f"objective: found {spec.objective!r}, expected a key of the summary, such as tbt_s_p99")
    if spec.direction not in ("maximize", "minimize"):
        raise ExperimentError(f"direction: found {spec.direction!r}, expected maximize or minimize")


def _knobs_of(policy: str) -> frozenset[str]:
    from policies import knobs_of, policy_class

    return frozenset(knobs_of(policy_class(policy)))


def _policies(axes: tuple[Axis, ...], base: Values) -> set[str]:
    """Every policy that the points run under."""
    varied = next((axis.values for axis in axes if axis.name == "policy"), None)
    return {str(base.get("policy", "chunked"))} if varied is None else set(map(str, varied))


def _with_fractions(axis: Axis, policies: set[str]) -> Axis:
    """A range from 1 to 2 of what takes fractions has values in between; of anything else, whole ones only."""
    from policies import knobs_of, policy_class
    from simulator.config import ReplayConfig

    if axis.values or not axis.whole:
        return axis
    field = ReplayConfig.__dataclass_fields__.get(axis.name)
    kinds = [str(field.type)] if field is not None else []
    if is_knob(axis.name):
        knobs = [knobs_of(policy_class(policy)).get(axis.name) for policy in policies]
        kinds = [str(knob.type) for knob in knobs if knob is not None]
    if axis.name in ("trace.duration_s", "trace.timeout_s") or any("float" in kind for kind in kinds):
        return replace(axis, low=float(axis.low), high=float(axis.high))
    if axis.step is not None and axis.step != int(axis.step):
        raise ExperimentError(f"space.{axis.name}.step: found {axis.step}, expected a whole number, as the ends are")
    return axis


def _flat(space: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`[space.trace]` and "trace.prompt" mean the same."""
    for name, value in space.items():
        if name in PREFIXES and isinstance(value, Mapping):
            yield from ((f"{name}.{rest}", inner) for rest, inner in value.items())
        else:
            yield name, value


def _axis(name: str, value: Any) -> Axis:
    if isinstance(value, list):
        if not value:
            raise ExperimentError(f"space.{name}: found an empty list, expected values")
        return Axis(name, tuple(value))
    if not isinstance(value, Mapping):
        raise ExperimentError(f"space.{name}: found {value!r}, expected a list or a range {{low = .., high = ..}}")
    for key in value:
        if key not in _RANGE:
            raise ExperimentError(f"space.{name}: found key {key!r}, expected some of {', '.join(_RANGE)}")
    low, high, step, count = (value.get(key) for key in ("low", "high", "step", "count"))
    for key, number in (("low", low), ("high", high), ("step", step), ("count", count)):
        optional = key in ("step", "count") and number is None
        if not optional and (isinstance(number, bool) or not isinstance(number, int | float)):
            raise ExperimentError(f"space.{name}.{key}: found {number!r}, expected a number")
    if not low < high or (value.get("log") and low <= 0):  # type: ignore[operator]
        raise ExperimentError(f"space.{name}: found {low} to {high}, expected low below high (and above 0 with log)")
    if step is not None and (step <= 0 or value.get("log")):
        raise ExperimentError(f"space.{name}.step: found {step}, expected a number above 0 and no log beside it")
    if count is not None and (count < 2 or count != int(count)):
        raise ExperimentError(f"space.{name}.count: found {count}, expected a whole number of at least 2")
    return Axis(name, (), low, high, step, None if count is None else int(count), bool(value.get("log", False)))


def _table(content: Mapping[str, Any], key: str) -> Values:
    value = content.get(key, {})
    if not isinstance(value, Mapping):
        raise ExperimentError(f"{key}: found {value!r}, expected a table [{key}]")
    return dict(value)


def _whole(content: Mapping[str, Any], key: str, default: int, least: int = 0) -> int:
    value = content.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ExperimentError(f"{key}: found {value!r}, expected a whole number of at least {least}")
    return value


def _absolute(trace: Values, folder: Path) -> Values:
    file = trace.get("file")
    if isinstance(file, str) and not Path(file).is_absolute() and (folder / file).exists():
        return {**trace, "file": str((folder / file).resolve())}
    return trace
