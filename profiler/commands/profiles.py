"""`python -m profiler import | fit | compare | refine`: measurements to profiles, fitted models, terms from logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from policies.edges.output_file import check_place
from profiler.errors import ProfileError

if TYPE_CHECKING:
    from profiler.measurements.profile import Profile
    from profiler.specs.hardware import Hardware


def register(app: typer.Typer) -> None:
    app.command(name="import")(import_command)
    app.command(name="fit")(fit_command)
    app.command(name="fit-experts")(fit_experts_command)
    app.command(name="refine")(refine_command)
    app.command(name="report")(report_command)
    app.command(name="compare")(compare_command)


def import_command(
    kind: Annotated[str, typer.Argument(help="llmservingsim, llmservingsim-v0, aiconfigurator, vidur, ...")],
    path: Annotated[Path, typer.Argument(help="folder or file of that project")],
    out: Annotated[Path, typer.Option("--out", help="profile to write, .parquet or .csv")],
    tensor_parallel: Annotated[int | None, typer.Option("--tp", help="only this degree")] = None,
    weights: Annotated[str | None, typer.Option(help="of products (aiconfigurator): bfloat16, fp8, fp8_block")] = None,
    window: Annotated[int | None, typer.Option(help="attention with this window alone (aiconfigurator)")] = None,
) -> None:
    """Turn another project's measurements into a profile."""
    from profiler.measurements.importers import import_profile
    from profiler.measurements.profile import write_profile

    _check_target(out, ".parquet", ".csv")
    options: dict[str, Any] = {} if tensor_parallel is None else {"tensor_parallel": tensor_parallel}
    for name, value in (("weights", weights), ("window", window)):
        if value is not None:
            if kind != "aiconfigurator":
                raise ProfileError(f"--{name}: {kind} has one kind alone; leave it out")
            options[name] = value
    profile = import_profile(kind, path, **options)
    write_profile(profile, out)
    counts = profile.table["operator"].value_counts()
    print(f"{out}: {len(profile.table)} measurements on {profile.table['device'].iloc[0]}")
    print("  " + ", ".join(f"{name} {count}" for name, count in counts.items()))


def fit_command(
    profile: Annotated[Path, typer.Argument(help="profile (.parquet or .csv) of one device")],
    out: Annotated[Path, typer.Option("--out", help="model file to write (.json; arrays beside it)")],
    gpu: Annotated[str | None, typer.Option(help="name in the hardware table; found from the device name")] = None,
    check: Annotated[bool, typer.Option(help="refit with structures left out, and store the errors")] = True,
) -> None:
    """Fit a profile into a model file that `--cost-model` takes."""
    from dataclasses import replace

    from profiler.measurements.profile import read_profile
    from profiler.operators.fitting.device_fit import fit_device
    from profiler.operators.fitting.model_file import write_model

    _check_target(out, ".json")
    table = read_profile(profile)
    if (table.table["operator"] == "iteration").any():
        _fit_whole_iterations(table, out)
        return
    hardware = _hardware_of(table, profile, gpu)
    fit = fit_device(table, hardware)
    if check:
        from profiler.judging.holdout import held_out, summary, worst_cases
        from profiler.operators.fitting.error_sizes import measured_spreads

        tables = held_out(table, hardware)
        spreads = measured_spreads(tables, table, fit.noise)
        fit = replace(fit, errors=summary(tables), worst=worst_cases(tables), spreads=spreads)
    write_model(fit, out)
    layouts = len(fit.attention) + len(fit.families)
    print(f"{out}: {hardware.name}, {len(fit.curves)} operators, {layouts} attention layouts or families")
    if warm := fit.provenance.get("cache_warm_gemms_not_fitted"):
        print(f"  {warm:,} GEMMs are cache-warm (below their weights' bytes at full bandwidth) and were not fitted")
    for name, error in fit.errors.items():
        print(f"  {name:32} left out: median {error['median']:6.2%}  P95 {error['p95']:6.2%}  of {error['count']:.0f}")


def fit_experts_command(
    folder: Annotated[Path, typer.Argument(help="a card's folder of kernel tables (aiconfigurator)")],
    gpu: Annotated[str, typer.Option(help="name in the hardware table")],
    out: Annotated[Path, typer.Option("--out", help="file to write (.json; arrays beside it)")],
    check: Annotated[
        bool, typer.Option(help="predict layers with whole structures left out, and store the errors")
    ] = True,
) -> None:
    """Fit a card's tables of experts, latent attention and collectives."""
    from profiler.measurements.importers.aiconfigurator_kernels import fit_card
    from profiler.operators.card_kernels import write_card
    from profiler.specs.hardware import load_hardware

    _check_target(out, ".json")
    card = fit_card(folder, load_hardware(gpu), check=check)
    write_card(card, out)
    print(f"{out}: {card.gpu}, experts in {', '.join(card.experts) or 'nothing'}")
    for fit in card.experts.values():
        for left, error in fit.errors.items():
            line = f"median {error['median']:6.2%}  P95 {error['p95']:6.2%}  of {error['count']:.0f}"
            print(f"  {fit.number_format:12} {left:14} left out: {line}")


def _check_target(out: Path, *suffixes: str) -> None:
    """ProfileError where `out` cannot be written, or not under this name: before the work and not after it."""
    if out.suffix not in suffixes:
        raise ProfileError(f"{out}: found suffix {out.suffix!r}, expected {' or '.join(suffixes)}")
    check_place(out, ProfileError)


def compare_command(
    profile: Annotated[Path, typer.Argument(help="profile (.parquet or .csv) of one device")],
    gpu: Annotated[str | None, typer.Option(help="name in the hardware table; found from the device name")] = None,
    only: Annotated[str, typer.Option(help="structures whose name contains this, e.g. mixed")] = "",
    scattered: Annotated[bool, typer.Option("--scattered", help="leave single GEMMs out instead, at random")] = False,
    beside: Annotated[Path | None, typer.Option(help="with --scattered: a card with equal processors")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Hold laws, tables, boosting, Gaussian processes and a forest beside each other on structures left out."""
    import json
    from dataclasses import asdict

    from profiler.judging.compare_learners import compare, text
    from profiler.measurements.profile import read_profile

    if (only and scattered) or (beside is not None and not scattered):
        raise ProfileError("--beside needs --scattered, which --only does not go with")
    table = read_profile(profile)
    if scattered:
        from profiler.judging import left_out_gemms as scattered_gemms

        other = None if beside is None else read_profile(beside)
        singles = scattered_gemms.scattered(table, _hardware_of(table, profile, gpu), other)
        print(json.dumps([asdict(row) for row in singles], indent=2) if as_json else scattered_gemms.text(singles))
        return
    found = compare(table, _hardware_of(table, profile, gpu), only)
    if not found:
        raise ProfileError(f"{profile}: no structure to leave out is called {only!r}")
    print(json.dumps([asdict(row) for row in found], indent=2) if as_json else text(found))


def _hardware_of(table: Profile, path: Path, gpu: str | None) -> Hardware:
    from profiler.specs.hardware import load_hardware

    device = str(table.table["device"].iloc[0])
    try:
        return load_hardware(gpu or gpu_name(device))
    except ProfileError as error:
        raise ProfileError(f"{path}: device {device!r}: {error}; name it with --gpu") from None


def _fit_whole_iterations(profile: Profile, out: Path) -> None:
    from profiler.iterations.fit_iterations import fit_iterations
    from profiler.iterations.iteration_file import write_fit

    fit = fit_iterations(profile)
    write_fit(fit, out)
    errors = fit.errors
    print(
        f"{out}: {fit.model} on {fit.device}, {errors['shapes']:.0f} shapes; held-out structures: median error "
        f"{errors['held_out_median']:.1%}, P95 {errors['held_out_p95']:.1%}"
    )


def refine_command(
    model_file: Annotated[str, typer.Argument(help="model file (.json), or a GPU with a shipped fit, e.g. rtx4090")],
    run: Annotated[Path, typer.Option("--run", help="live run folder, or vLLM step log (.jsonl)")],
    out: Annotated[Path, typer.Option("--out", help="model file to write")],
    model: Annotated[str, typer.Option(help="model that made the log")] = "llama-3.1-8b",
    tp: Annotated[int, typer.Option(help="tensor-parallel degree of the engine")] = 1,
) -> None:
    """Estimate the terms that no kernel profile knows from a live run; the result is marked as calibrated on it."""
    from profiler.operators.compose import compose
    from profiler.operators.fitted_model import find_fitted
    from profiler.operators.fitting.calibrated_on_a_run import describe, read_step_log, refined
    from profiler.operators.fitting.model_file import read_model, write_model
    from profiler.specs.hardware import load_hardware
    from profiler.specs.model_config import load_model_spec

    _check_target(out, ".json")
    fit = read_model(find_fitted(model_file) or model_file)
    log = read_step_log(run)
    cost = compose(fit, load_model_spec(model), load_hardware(fit.gpu), tp=tp)
    calibrated, found = refined(fit, cost, log)
    write_model(calibrated, out)
    print(f"{out}: calibrated on {log.source}")
    print(f"  {describe(found)}")


def report_command(
    model_file: Annotated[str, typer.Argument(help="model file (.json), or a GPU with a shipped fit, e.g. h100")],
    figures: Annotated[Path | None, typer.Option(help="folder for the figures")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """What a fitted model rests on, how far it can be trusted, and where it is worst."""
    import json

    from profiler.iterations.iteration_file import is_iteration_fit, read_fit
    from profiler.judging.report import draw, iteration_report, iteration_text, report, text
    from profiler.operators.fitted_model import find_fitted
    from profiler.operators.fitting.model_file import read_model

    found = find_fitted(model_file) or model_file
    if is_iteration_fit(found):
        if figures is not None:
            raise ProfileError(f"{found}: found a fit of whole iterations, which has no figures; leave --figures out")
        whole = iteration_report(read_fit(found))
        print(json.dumps(whole, indent=2) if as_json else iteration_text(whole))
        return
    fit = read_model(found)
    facts = report(fit)
    print(json.dumps(facts, indent=2) if as_json else text(facts))
    if figures is not None:
        written = draw(fit, figures)
        if not as_json:
            print("\n".join(f"wrote {path}" for path in written))


def gpu_name(device: str) -> str:
    """The hardware table's name for a device as its driver spells it ("NVIDIA H100 80GB HBM3" -> "h100")."""
    text = device.lower().replace("nvidia", "").replace("geforce", "").replace("-", " ")
    words = [word for word in text.split() if word not in ("server", "edition", "blackwell", "hbm3", "sxm", "sxm4")]
    if "a100" in words:
        return "a100-40gb" if any(word.startswith("40gb") for word in words) else "a100"
    return "".join(word for word in words if not word.endswith("gb"))
