"""The honesty report of a fitted model: where its numbers come from, its errors on what it had not seen, its region."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.edges.output_file import whole_file
from profiler.errors import ProfileError
from profiler.judging.holdout import AIMS
from profiler.operators.fitting.error_factors import half_widths
from profiler.operators.laws.gemm_law import BETWEEN

if TYPE_CHECKING:
    from profiler.iterations.iteration_model import IterationFit
    from profiler.operators.fitting.device_fit import DeviceFit


def report(fit: DeviceFit) -> dict[str, Any]:
    """Plain data: provenance, measured region, errors by operator, noise floor, interval half-widths, worst cases."""
    return {
        "gpu": fit.gpu,
        "dtype": fit.dtype,
        "provenance": dict(fit.provenance),
        "profiled": [list(pair) for pair in fit.profiled],
        "terms": dict(fit.terms),
        "region": _region(fit),
        "held_out": {name: dict(error) for name, error in fit.errors.items()},
        "noise": dict(fit.noise),
        "half_widths_90": half_widths(fit.errors, (), frozenset(fit.spreads)),
        "worst": list(fit.worst),
    }


def iteration_report(fit: IterationFit) -> dict[str, Any]:
    """The same of a fit of whole iterations, which knows no operators."""
    return {
        "device": fit.device,
        "model": fit.model,
        "dtype": fit.dtype,
        "backend": fit.backend,
        "provenance": dict(fit.provenance),
        "region": vars(fit.bounds),
        "held_out": dict(fit.errors),
        "noise": dict(fit.noise),
        "disturbance": fit.disturbance,
        "drift": fit.drift,
    }


def iteration_text(facts: Mapping[str, Any]) -> str:
    """The report of a fit of whole iterations for people."""
    lines = [
        f"{facts['model']} on {facts['device']} ({facts['dtype']}, {facts['backend']}): fitted to whole iterations",
        "  "
        + ", ".join(f"{key} {value}" for key, value in facts["provenance"].items() if isinstance(value, str | int)),
        "  measured up to: " + ", ".join(f"{value} {name}" for name, value in facts["region"].items()),
        f"  machine: {facts['disturbance']:.1%} of the time lost to others, speed drifts by {facts['drift']:.1%}",
    ]
    errors = {name.replace("_", " "): value for name, value in facts["held_out"].items()}
    lines.append(f"  errors over {errors.pop('shapes', 0):g} shapes: " + _shares(errors))
    if facts["noise"]:
        lines.append("  noise: " + _shares(facts["noise"]))
    return "\n".join(lines)


def _shares(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1%}" for name, value in values.items())


def _region(fit: DeviceFit) -> dict[str, Any]:
    gemms = [curve for curve in fit.curves if curve.k and curve.operator != BETWEEN]
    region: dict[str, Any] = {}
    if gemms:
        region["gemm"] = {
            "shapes": len({(curve.n, curve.k) for curve in gemms}),
            "rows": [min(curve.rows[0] for curve in gemms), max(curve.rows[-1] for curve in gemms)],
            "n": [min(curve.n for curve in gemms), max(curve.n for curve in gemms)],
            "k": [min(curve.k for curve in gemms), max(curve.k for curve in gemms)],
        }
    for item in fit.attention:
        region[f"attention {item.heads}/{item.kv_heads} x {item.head_dim}"] = dict(item.region)
    for family in fit.families:
        if family.group in (1, 4, 8):
            region[f"attention, {family.group} heads a KV head x {family.head_dim}"] = dict(family.region)
    reductions = sorted(item.participants for item in fit.collectives)
    if reductions:
        region["all_reduce devices"] = reductions
    return region


def text(facts: Mapping[str, Any]) -> str:
    """The report for people."""
    origin = facts["provenance"]
    lines = [f"{facts['gpu']} ({facts['dtype']}): {origin.get('source', '?')}, {origin.get('licence', '?')}"]
    lines.append(f"  {origin.get('device', '')}; {origin.get('measured', '')}; {origin.get('rows', '?')} measurements")
    if facts["profiled"]:
        lines.append("  profiled itself: " + ", ".join(f"{name} tp{tp}" for name, tp in facts["profiled"]))
    if origin.get("calibrated_on"):
        lines.append(f"  CALIBRATED on {origin['calibrated_on']}: {facts['terms']}")
    lines.append("measured region")
    lines += [f"  {name}: {_plain(value)}" for name, value in facts["region"].items()]
    lines.append("errors on structures left out, refitted without them")
    heads = "".join(f"{head:>8}" for head in ("median", "P90", "P95", "bias", "rows"))
    lines.append(f"  {'':32}{heads}  90 % interval: held, half-width; noise floor")
    for name, error in facts["held_out"].items():
        beyond = " *" if error["median"] > AIMS["median"] or error["p95"] > AIMS["p95"] else ""
        cells = "".join(f"{error[key]:8.1%}" for key in ("median", "p90", "p95", "bias"))
        covers = f"{error['coverage']:6.1%} {error.get('width', error['p90']):5.1%}{beyond:2}"
        lines.append(f"  {name:32}{cells}{error['count']:8.0f}  {covers}{_floor(facts['noise'], name)}")
    lines.append(f"  * beyond the aims: median {AIMS['median']:.0%}, P95 {AIMS['p95']:.0%}")
    repeats = {name: value for name, value in facts["noise"].items() if not name.endswith((" median", " p95"))}
    if repeats:
        lines.append("spread of repeats: " + ", ".join(f"{name} {value:.1%}" for name, value in repeats.items()))
    if facts["worst"]:
        lines.append("worst cases")
        lines += [f"  {line}" for line in facts["worst"]]
    return "\n".join(lines)


def _floor(noise: Mapping[str, float], structure: str) -> str:
    """Median and P95 that measurements which ought to agree differ by (`profiler.operators.fitting.noise_floor`),
    where that is known.
    """
    kind = structure.split(" ")[0]
    known = [noise.get(f"{kind} {statistic}") for statistic in ("median", "p95")]
    return "" if None in known else f"  {known[0]:.1%} / {known[1]:.1%}"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(one)}" for key, one in value.items())
    if isinstance(value, list):
        return " to ".join(f"{one:g}" for one in value) if len(value) == 2 else ", ".join(map(str, value))
    return str(value)


def draw(fit: DeviceFit, folder: str | Path) -> list[Path]:
    """Two figures: held-out error by operator and structure; time of GEMMs and attention over rows and contexts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder = Path(folder)
    written = []
    for name, make in (("held_out_errors", _errors), ("operators", _operators)):
        figure = Figure(figsize=(7.0, 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        make(figure, fit)
        for suffix in ("pdf", "png"):
            path = folder / f"{fit.gpu}_{name}.{suffix}"
            with whole_file(path, ProfileError) as scratch:
                figure.savefig(scratch, dpi=200)
            written.append(path)
    return written


def _errors(figure: Any, fit: DeviceFit) -> None:
    axes = figure.subplots()
    names = list(fit.errors)
    place = np.arange(len(names))
    axes.barh(place - 0.2, [fit.errors[name]["median"] * 100 for name in names], 0.38, color="#0072B2", label="median")
    axes.barh(place + 0.2, [fit.errors[name]["p95"] * 100 for name in names], 0.38, color="#E69F00", label="P95")
    for aim, dashes in ((AIMS["median"], ":"), (AIMS["p95"], "--")):
        axes.axvline(aim * 100, color="#333333", linestyle=dashes, linewidth=0.8)
    axes.set_yticks(place, names)
    axes.invert_yaxis()
    axes.set_xlabel("error on structures left out (%); lines: the aims for median and P95")
    axes.legend(frameon=False)


_LOOKS: tuple[dict[str, Any], ...] = tuple(
    {"color": colour, "linestyle": dashes}
    for colour, dashes in (
        ("#0072B2", "-"),
        ("#D55E00", "--"),
        ("#009E73", "-."),
        ("#CC79A7", ":"),
        ("#E69F00", (0, (5, 1, 1, 1, 1, 1))),
        ("#000000", (0, (6, 2))),
    )
)
"""Told apart by colour-blind readers, and in grey by dashes."""


def _operators(figure: Any, fit: DeviceFit) -> None:
    left, right = figure.subplots(1, 2)
    gemms = [curve for curve in fit.curves if min(curve.n, curve.k) >= 1024 and curve.operator != BETWEEN]
    for curve, look in zip(gemms[:: max(1, len(gemms) // 6)][:6], _LOOKS):
        rows = np.unique(np.geomspace(1, curve.rows[-1], 400).astype(int))
        left.plot(rows, fit.gemm_us(curve, rows), linewidth=0.9, label=f"{curve.n} x {curve.k}", **look)
        left.plot(curve.rows, curve.us, ".", markersize=1.5, color="#555555")
    left.set(xscale="log", yscale="log", xlabel="rows", ylabel="GEMM (µs); dots: the table's")
    layouts = [*fit.attention] or [family.for_layout(32, 8) for family in fit.families if family.group == 4]
    context = np.unique(np.geomspace(16, 16384, 200).astype(int))
    for decodes, look in zip((1, 8, 32, 128), _LOOKS):
        if layouts:
            right.plot(
                context,
                layouts[0].decode_us(decodes, context, typical=True),
                linewidth=0.9,
                label=f"{decodes} decode{'s' if decodes > 1 else ''}",
                **look,
            )
    right.set(xscale="log", yscale="log", xlabel="context", ylabel="decode attention of a layer (µs)")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=6)
