"""`python -m experiments calibrate`: from an unknown device to a fitted and validated cost model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("calibrate")(calibrate_command)
    app.command("host-time")(host_time_command)
    app.command("gpu-day")(gpu_day_command)


def calibrate_command(
    model: Annotated[
        str, typer.Option(help="Model, as the executor takes it; a spec's name has random weights.")
    ] = "nano",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder; the same one goes on.")] = Path("calib"),
    budget: Annotated[str, typer.Option(help="Time for everything but loading the model, as 240s.")] = "240s",
    policies: Annotated[
        str, typer.Option(help="Policies of the live replay.", show_default="chunked and prefill_priority")
    ] = "chunked,prefill_priority",
    requests: Annotated[int, typer.Option(help="Requests of the live replay.")] = 60,
    repeats: Annotated[int, typer.Option(help="Live runs of each policy.", min=1, max=1_000)] = 2,
    prompt: Annotated[
        str, typer.Option(help="Prompt lengths, see `python -m workloads generate`.", show_default="about 512")
    ] = "lognormal:512,1.0,16,2000",
    output: Annotated[str, typer.Option(help="Answer lengths.", show_default="about 96")] = "lognormal:96,0.8,4,400",
    dtype: Annotated[str, typer.Option(help="Weights; auto is float32 on a CPU.")] = "auto",
    kernels: Annotated[str, typer.Option(help="Kernel set.")] = "auto",
    attention: Annotated[str, typer.Option(help="Attention backend.")] = "auto",
    graphs: Annotated[str, typer.Option(help="CUDA graphs: auto, on or off.")] = "auto",
    streams: Annotated[bool, typer.Option("--streams/--one-stream", help="Two streams (triton on CUDA).")] = False,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Ranges for a profiler's timeline (CUDA).")] = False,
    allocator: Annotated[str, typer.Option(help="On CUDA: default, expandable or async.")] = "default",
    threads: Annotated[int | None, typer.Option(help="Threads of a CPU; one by default, 0 for PyTorch's own.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests admitted at once.")] = 32,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 16,
    seed: Annotated[int, typer.Option(help="Of weights, prompts, trace and plan.", min=0)] = 0,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Go on in --out although the model or Charioteer has changed since.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Self-test, ceilings, profile, fit, live replay under two policies, report, and a fitted model to ship."""
    from executor.commands.profile import seconds_of
    from executor.model.loading import pick_device
    from experiments.calibration.stages import Calibration, calibrate, folder_bytes
    from experiments.validation.command import Say, names_in
    from experiments.validation.comparing.live_side import EngineChoice
    from experiments.validation.pages.report import as_dict, in_short

    place = str(pick_device(device))
    if threads is None:
        threads = 1 if place == "cpu" else 0
    what = Calibration(
        engine=EngineChoice(
            model=model,
            device=place,
            dtype=dtype,
            kernels=kernels,
            attention=attention,
            graphs=graphs,
            streams=streams,
            nvtx=nvtx,
            allocator=allocator,
            threads=threads or None,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            seed=seed,
        ),
        policies=tuple(names_in(policies)),
        budget_s=seconds_of(budget, "--budget"),
        requests=requests,
        repeats=repeats,
        prompt=prompt,
        output=output,
    )
    result = calibrate(what, out, Say(as_json), anyway=anyway)
    if as_json:
        print(json.dumps(as_dict(result), indent=2))
        return
    for line in in_short(result):
        print(f"- {line}")
    print(
        f"{result.took_s:.0f} s, {folder_bytes(out) / 2**20:.1f} MiB; report: {out / 'report.html'}; use it with "
        f"`--gpu {out / 'device.toml'} --cost-model {out / 'model.json'}`"
    )


def host_time_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a calibration.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the figure; FOLDER/figures by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """What the host adds to iterations of short chunks, with CUDA graphs and without: the figure of a calibration."""
    from experiments.calibration.device_aims import host_time_figure, host_time_of
    from metrics.drawing.figure_style import house_style, save

    rows = host_time_of(folder)
    target = out or folder / "figures"
    target.mkdir(parents=True, exist_ok=True)
    with house_style():
        written = save(host_time_figure(rows), target, "host_time")
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        graphs = "with graphs" if row["graphs"] else "without graphs"
        print(
            f"{row['batch']:<16} {graphs:<15} device {row['device_s'] * 1e3:8.3f} ms, "
            f"host {row['host_s'] * 1e3:8.3f} ms, {row['wall_s'] / row['rows'] * 1e6:8.2f} \u00b5s a row"
        )
    print(f"figure: {written[1]}")


def gpu_day_command(
    out: Annotated[Path, typer.Option(help="Folder; with the tars of earlier calls in it, the day goes on.")] = Path(
        "gpu-day"
    ),
    limit: Annotated[str, typer.Option(help="Time of this call, as 480s.")] = "480s",
    model: Annotated[str, typer.Option(help="Model of calibration and replay.")] = "llama-3.1-8b",
    calibrate: Annotated[str, typer.Option(help="Budget of the calibration.")] = "150s",
    requests: Annotated[int, typer.Option(help="Requests of the Azure replay.", min=1)] = 200,
    stages: Annotated[
        str, typer.Option(help="Only these stages, done or not: tests,calibrate", show_default="what is not done")
    ] = "",
    wheels: Annotated[Path, typer.Option(help="Folder of wheels that this Python lacks.")] = Path("wheels"),
    runner: Annotated[
        str, typer.Option(help="How a module is started; tests.fake_gpu stands for a device.", show_default="python -m")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Tests, self-tests, calibration, and a replay with its prediction: in calls of minutes, one tar a stage."""
    import shlex
    import sys

    from executor.commands.profile import seconds_of
    from experiments.calibration.device_day import DayPlan, DeviceDay, table_of
    from experiments.validation.command import Say, names_in

    plan = DayPlan(
        model=model,
        calibrate_s=seconds_of(calibrate, "--calibrate"),
        requests=requests,
        runner=tuple(shlex.split(runner)) or (sys.executable, "-m"),
        wheels=tuple(sorted(wheels.glob("*.whl"))),
    )
    day = DeviceDay(plan, out, Say(as_json))
    states = day.run(seconds_of(limit, "--limit"), names_in(stages) if stages else ())
    if as_json:
        print(json.dumps(states, indent=2))
        return
    for line in table_of(states):
        print(line)
