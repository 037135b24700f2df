"""An engine calibrated from outside: from its step log, or from what its clients waited for, without a profile.

Such data tell a few things alone. Steps tell how many times the kernels' time a step with chunks and one of decodes
takes, and the host's time a step and a sequence. Clients tell the same less sharply, and the front end. What the data
at hand cannot tell apart is left as the base engine has it, and the result says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.errors import ExperimentError
from metrics import RunTables
from metrics.measures.latencies import COLUMNS, own_latencies
from profiler import load_cost_model
from profiler.cost_model import CostModel
from profiler.measurements.served_steps import ServedSteps, read_served_steps, step_log_kind
from profiler.operators.engine_terms import EngineTerms
from profiler.operators.named_engines import load_engine
from profiler.operators.scaled_phases import scaled
from simulator import ReplayConfig
from simulator.cluster.pools import make_cluster_plan
from simulator.simulation import play
from workloads import Trace
from workloads.reading.client_results import ClientRun, client_tool, read_client_run

Floats = NDArray[np.float64]
Say = Callable[[str], None]

STEP_TERMS = ("prefill_scale", "decode_scale", "host_before_us", "host_before_sequence_us")
CLIENT_TERMS = ("front_us", "decode_scale", "prefill_scale", "host_before_sequence_us")
LEAST_STEPS = 20
LOADS_FOR_HOST = 4
"""Client loads from which on decode steps of different sizes tell host time a sequence from a scale."""
BLOCK = 50
"""Steps of one log that are left out together."""
TOO_ALIKE = 0.98
"""Two terms whose effects on the data correlate by more cannot be told apart."""
SIGMAS_90 = 1.6449
TOLERATED = 0.01
"""Beyond this much of a request's share, a residual counts by its size, no longer by its square."""
NUDGE = 0.05
"""Of the logarithm of a term, to see what it changes."""
LATENCIES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Term:
    """One fitted term: its value, and the ends of its 90 % interval."""

    value: float
    low: float
    high: float


@dataclass
class Found:
    """What a calibration says. errors: of data in the fit, held_out: of those left out, median absolute by statistic.

    warnings: terms that could not be told apart, and whatever else a reader has to know.
    """

    sources: list[str]
    terms: dict[str, Term] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    held_out: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def values(self) -> dict[str, float]:
        """Fields of EngineTerms. Half of the front end before the engine, half behind: TTFT tells their sum."""
        found = {name: term.value for name, term in self.terms.items() if name != "front_us"}
        if "front_us" in self.terms:
            half = round(self.terms["front_us"].value / 2, 1)
            found |= {"front_before_us": half, "front_after_us": half}
        return found


def calibrate_engine(paths: Sequence[Path], base: ReplayConfig, say: Say = lambda _: None) -> Found:
    """Fit what logs and clients' results tell. base: model, GPU, width, base engine and the server's own settings.

    Raises ExperimentError, ProfileError or TraceError for a file that is neither, and for too few steps.
    """
    if not paths:
        raise ExperimentError("calibrate-engine: found no file, expected step logs or results of load clients")
    clients, steps = [], []
    for path in paths:
        if client_tool(path) is not None:
            clients.append(read_client_run(path, ExperimentError))
        elif step_log_kind(path) is not None:
            steps.append(read_served_steps(path))
        else:
            raise ExperimentError(
                f"{path}: found neither a step log (vLLM's iteration details, Dynamo's forward-pass trace) nor a "
                "result of vllm bench serve --save-detailed, sglang's bench_serving, guidellm or aiperf"
            )
    engine = load_engine(base.engine)
    start = EngineTerms.from_mapping({**engine.terms, **base.terms}, "--term")
    found = Found([log.source for log in steps] + [run.name for run in clients])
    if steps:
        _fit_steps(steps, base, start, found)
    if clients:
        _fit_clients(clients, base, start, found, say)
    return found


# --- steps -----------------------------------------------------------------------------------------------------------


def _fit_steps(logs: Sequence[ServedSteps], base: ReplayConfig, start: EngineTerms, found: Found) -> None:
    count = sum(len(log) for log in logs)
    if count < LEAST_STEPS:
        raise ExperimentError(f"{logs[0].source}: found {count} steps, expected at least {LEAST_STEPS}")
    cost = _cost_of(replace(base, terms={**base.terms, "prefill_scale": 1.0, "decode_scale": 1.0}))
    shapes = [shape for log in logs for shape in log.shapes]
    elapsed_us = np.concatenate([log.elapsed_s for log in logs]) * 1e6
    device_us = cost.predict_ns(shapes) / 1e3
    prefills = np.array([bool(shape.chunks) for shape in shapes])
    sequences = np.array([len(shape.chunks) + shape.decodes for shape in shapes], float)
    design = np.column_stack([device_us * prefills, device_us * ~prefills, np.ones(count), sequences])
    groups = np.concatenate([np.arange(len(log)) // BLOCK for log in logs])
    if len(logs) > 1:
        groups = np.repeat(np.arange(len(logs)), [len(log) for log in logs])
    # An engine that plans ahead hides its host time: what is beyond the device shows in the steps alone.
    known = [name for name, column in zip(STEP_TERMS, design.T, strict=True) if column.any()]
    known = _told_apart(design / elapsed_us[:, None], known, STEP_TERMS, found)
    columns = [STEP_TERMS.index(name) for name in known]
    values = _lines(design[:, columns], elapsed_us)
    draws = []
    rng = np.random.default_rng(0)
    names = np.unique(groups)
    rows_of = (
        [np.flatnonzero(groups == name) for name in names] if len(names) > 3 else [np.array([r]) for r in range(count)]
    )
    for _ in range(100):
        rows = np.concatenate([rows_of[index] for index in rng.integers(0, len(rows_of), len(rows_of))])
        draws.append(_lines(design[np.ix_(rows, columns)], elapsed_us[rows]))
    low, high = np.percentile(np.array(draws), [5, 95], axis=0)
    for name, value, least, most in zip(known, values, low, high, strict=True):
        found.terms[name] = Term(float(value), float(least), float(most))
    for name in ("host_after_us", "host_after_sample_us"):
        found.terms[name] = Term(0.0, 0.0, 0.0)
    if "host_before_us" not in known:
        found.terms["host_before_us"] = Term(0.0, 0.0, 0.0)
    if "host_before_sequence_us" not in known:
        found.terms["host_before_sequence_us"] = Term(0.0, 0.0, 0.0)
    found.errors["step"] = _median_error(design[:, columns] @ values, elapsed_us)
    halves = groups % 2
    if len(names) > 1:
        errors = []
        for half in (0, 1):
            fitted = _lines(design[np.ix_(halves != half, columns)], elapsed_us[halves != half])
            errors.append(np.abs(design[np.ix_(halves == half, columns)] @ fitted / elapsed_us[halves == half] - 1))
        found.held_out["step"] = float(np.median(np.concatenate(errors)))
    if start.host_before_us and load_engine(base.engine).knobs.get("async_scheduling"):
        found.warnings.append(
            "steps of an engine that plans ahead hide host time: what they show is what is not hidden"
        )


def _lines(design: Floats, elapsed_us: Floats) -> Floats:
    """Non-negative least squares of relative errors."""
    from scipy.optimize import nnls

    return np.asarray(nnls(design / elapsed_us[:, None], np.ones(len(elapsed_us)))[0])


def _median_error(predicted: Floats, measured: Floats) -> float:
    return float(np.median(np.abs(predicted / measured - 1)))


def _told_apart(effects: Floats, names: Sequence[str], order: Sequence[str], found: Found) -> list[str]:
    """The terms that the data can tell: of two whose effects are too alike, the later one in `order` is left out."""
    kept: list[str] = []
    for name in names:
        column = effects[:, order.index(name)]
        alike = [other for other in kept if _alike(column, effects[:, order.index(other)]) > TOO_ALIKE]
        if alike:
            found.warnings.append(f"{name} and {alike[0]} cannot be told apart by these data: {alike[0]} takes both")
        else:
            kept.append(name)
    return kept


def _alike(one: Floats, other: Floats) -> float:
    """Cosine between two effects: 1 where one is a multiple of the other."""
    size = float(np.linalg.norm(one) * np.linalg.norm(other))
    return abs(float(one @ other)) / size if size else 0.0


# --- clients ---------------------------------------------------------------------------------------------------------


def _fit_clients(runs: Sequence[ClientRun], base: ReplayConfig, start: EngineTerms, found: Found, say: Say) -> None:
    fixed = {name: term.value for name, term in found.terms.items()}
    wanted = [name for name in CLIENT_TERMS if name not in fixed]
    if len(runs) < LOADS_FOR_HOST and "host_before_sequence_us" in wanted:
        wanted.remove("host_before_sequence_us")
        found.warnings.append(f"fewer than {LOADS_FOR_HOST} loads: host time stays as the base engine has it")
    loads = [_Load(run, replace(base, terms={**base.terms, **fixed}), start) for run in runs]
    for load in loads:
        if load.run.sent_s is None:
            found.warnings.append(f"{load.run.name}: {load.run.tool} keeps no times of sending: arrivals are drawn")
    known, values, spread, errors = _solve(loads, wanted, found, say)
    for name, value, width in zip(known, values, spread, strict=True):
        found.terms[name] = Term(float(value), float(max(0.0, value - width)), float(value + width))
    found.errors |= errors
    if len(loads) < 2:
        found.warnings.append("one load: none could be left out to judge by")
        return
    held: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for half in (0, 1):
        inside = [load for number, load in enumerate(loads) if number % 2 != half]
        outside = [load for number, load in enumerate(loads) if number % 2 == half]
        names, fitted, _, _ = _solve(inside, known, Found([]), say)
        for load in outside:
            for name, error in load.mean_errors(dict(zip(names, fitted, strict=True))).items():
                held[name].append(abs(error))
    found.held_out |= {name: float(np.median(values)) for name, values in held.items()}


def _solve(
    loads: Sequence[_Load], wanted: Sequence[str], found: Found, say: Say
) -> tuple[list[str], Floats, Floats, dict[str, float]]:
    """(terms, values, half-widths of 90 % intervals, median errors) from the logarithms of latencies."""
    from scipy.optimize import minimize

    starts = {"front_us": max(500.0, loads[0].guess_front_us()), "host_before_sequence_us": 10.0}

    def terms_at(names: Sequence[str], z: Floats) -> dict[str, float]:
        # All terms are positive, and a factor means as much for a delay as for a scale.
        return {name: starts.get(name, 1.0) * float(np.exp(at)) for name, at in zip(names, z, strict=True)}

    def residuals(names: Sequence[str], z: Floats) -> Floats:
        terms = terms_at(names, z)
        return np.concatenate([load.log_errors(terms) for load in loads])

    def slopes(names: Sequence[str], z: Floats) -> Floats:
        at = residuals(names, z)
        steps = NUDGE * np.eye(len(names))
        return np.column_stack([(residuals(names, z + step) - at) / NUDGE for step in steps])

    known = _told_apart(slopes(wanted, np.zeros(len(wanted))), wanted, wanted, found)
    say(f"fitting {', '.join(known)} to {len(loads)} load{'s' if len(loads) > 1 else ''}")

    def misfit(z: Floats) -> float:
        return float(np.sum(np.sqrt(1.0 + (residuals(known, z) / TOLERATED) ** 2) - 1.0))

    # Who waits for whom jumps with every term: slopes mislead, a simplex does not mind.
    corners = np.vstack([np.zeros(len(known)), *(0.25 * row for row in np.eye(len(known)))])
    options = {"initial_simplex": corners, "xatol": 2e-3, "fatol": 1e-6, "maxfev": 50 * len(known)}
    solved = minimize(misfit, np.zeros(len(known)), method="Nelder-Mead", options=options)
    jacobian, left = slopes(known, solved.x), residuals(known, solved.x)
    freedom = max(1, len(left) - len(known))
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * float(left @ left) / freedom
    values = np.array(list(terms_at(known, solved.x).values()))
    widths = SIGMAS_90 * np.sqrt(np.maximum(np.diag(covariance), 0.0)) * values
    terms = dict(zip(known, values.tolist(), strict=True))
    errors = [load.mean_errors(terms) for load in loads]
    medians = {name: float(np.median([abs(one[name]) for one in errors])) for name in LATENCIES}
    return known, values, widths, medians


_COSTS: dict[str, CostModel] = {}


def _cost_of(config: ReplayConfig) -> CostModel:
    """The costs of a config without its front end, which they do not know; the last few are kept."""
    terms = {name: value for name, value in config.terms.items() if not name.startswith("front_")}
    engine = {
        "cost_model": config.cost_model, "dtype": config.dtype, "kv_dtype": config.kv_dtype, "tp": config.tp,
        "engine": config.engine, "terms": terms,
    }  # fmt: skip
    key = repr((config.model, config.gpu, engine))
    if key not in _COSTS:
        if len(_COSTS) >= 8:
            _COSTS.pop(next(iter(_COSTS)))
        _COSTS[key] = load_cost_model(config.model, config.gpu, **engine)
    return _COSTS[key]


class _Load:
    """One load of a client, replayed with any terms."""

    def __init__(self, run: ClientRun, config: ReplayConfig, start: EngineTerms) -> None:
        self.run, self.config = run, config
        self.trace = _trace(run)
        self.start = start
        self.measured = {"ttft": run.ttft_s, "tpot": run.tpot_s, "e2e": run.e2e_s}
        self._known: dict[tuple[tuple[str, float], ...], dict[str, Floats]] = {}

    def predicted(self, terms: Mapping[str, float]) -> dict[str, Floats]:
        """Latencies in seconds with these terms."""
        key = tuple(sorted(terms.items()))
        if key not in self._known:
            own: dict[str, Any] = {name: value for name, value in terms.items() if name != "front_us"}
            if "front_us" in terms:
                own |= {"front_before_us": terms["front_us"] / 2, "front_after_us": terms["front_us"] / 2}
            all_terms = {**self.config.terms, **own}
            scales = [float(all_terms.pop(name, 1.0)) for name in ("prefill_scale", "decode_scale")]
            config = replace(self.config, terms=all_terms)
            plan = make_cluster_plan(config, self.trace, scaled(_cost_of(config), scales))
            self._known[key] = _by_request(play(self.trace, plan)[0])
        return self._known[key]

    def guess_front_us(self) -> float:
        """What TTFT lacks without a front end."""
        front = self.start.front_before_us + self.start.front_after_us
        plain = self.predicted({"front_us": front})["ttft"]
        return front + 1e6 * (float(np.median(self.measured["ttft"])) - float(np.nanmedian(plain)))

    def log_errors(self, terms: Mapping[str, float]) -> Floats:
        """Of TTFT and TPOT, request by request, each load as heavy as any other."""
        found = self.predicted(terms)
        parts = []
        for name in ("ttft", "tpot"):
            ratio = np.log(np.maximum(found[name], 1e-9) / np.maximum(self.measured[name], 1e-9))
            ratio = ratio[~np.isnan(ratio)]
            parts.append(ratio / np.sqrt(max(1, len(ratio))))
        return np.concatenate(parts)

    def mean_errors(self, terms: Mapping[str, float]) -> dict[str, float]:
        """Relative errors of the means."""
        found = self.predicted(terms)
        return {name: float(np.nanmean(found[name]) / np.nanmean(self.measured[name]) - 1) for name in LATENCIES}


def _by_request(tables: RunTables) -> dict[str, Floats]:
    """Latencies in the order of the trace; NaN where a request has none."""
    columns = {name: tables.column("requests", name) for name in COLUMNS}
    own = own_latencies(columns, columns["status"] == "finished")
    order = np.argsort(tables.column("requests", "request"))
    return {name: own[name][order] for name in LATENCIES}


def _trace(run: ClientRun) -> Trace:
    """As sent; drawn at the rate asked for where the client kept no times, or all at once within its limit."""
    if run.sent_s is not None:
        return run.trace()
    trace = run.trace(timeless=True)
    count = len(trace)
    if run.rate is not None:
        gaps = np.random.default_rng(0).exponential(1 / run.rate, count)
        return replace(trace, arrival_ns=np.rint(np.cumsum(gaps) * 1e9).astype(np.int64))
    if run.concurrency is None or run.concurrency >= count:
        return trace
    after = np.maximum(np.arange(count) - run.concurrency, -1)
    return replace(trace, after_row=after, think_ns=np.zeros(count, np.int64))


def engine_file(found: Found, base: str, name: str) -> str:
    """The engine as TOML, which `--engine` takes."""
    import json

    on = f"{', '.join(found.sources[:4])}{' and more' if len(found.sources) > 4 else ''}"
    lines = [f"engine = {json.dumps(name)}", f"calibrated_on = {json.dumps(on)}"]
    if base != "none":
        lines.insert(0, f"base = {json.dumps(base)}")
    lines += ["", "[terms]", *(f"{key} = {round(value, 4)!r}" for key, value in found.values().items())]
    widths = {}
    if (front := found.terms.get("front_us")) is not None and front.value > 0:
        widths["front_end"] = round(min(10.0, (front.high - front.low) / 2 / front.value), 3)
    if (step := found.terms.get("host_before_us")) is not None and step.value > 0:
        widths["host"] = round(min(10.0, (step.high - step.low) / 2 / step.value), 3)
    if widths:
        lines += ["", "[half_widths]", *(f"{key} = {value!r}" for key, value in widths.items())]
    if found.held_out:
        lines += ["", "[held_out]", *(f"{key} = {round(value, 4)!r}" for key, value in found.held_out.items())]
    told = "; ".join(f"{key} {term.value:.4g} ({term.low:.4g} to {term.high:.4g})" for key, term in found.terms.items())
    lines += ["", "[sources]", f"calibration = {json.dumps(told)}", ""]
    return "\n".join(lines)
