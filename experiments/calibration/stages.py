"""One command on the day a device is there: are its kernels right, how fast is it, what do iterations cost, does the
prediction hold? Each stage's result is on disk as soon as it exists, and a second start goes on where the first ended.

The live part is a validation like any other (experiments.validation.stages) on a generated trace, so that nothing
but the program is needed on the machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.calibration.device_aims import aims_blocks, aims_stage, host_time_stage
from experiments.errors import ExperimentError
from experiments.running.report_document import Block, Bullets, Heading, Table, write_document
from experiments.running.stage_files import read_json, write_json
from experiments.validation.comparing.live_side import EngineChoice
from experiments.validation.comparing.settings import Settings
from experiments.validation.pages.report import as_dict, blocks, in_short
from experiments.validation.stages import Validation
from policies.edges.output_file import whole_file

if TYPE_CHECKING:
    from experiments.validation.comparing.result import Result

MAX_BYTES = 16 << 20
PROFILE_SHARE = 0.4
"""Of the whole budget. The rest is for self-tests, capacity, live runs and probes."""


@dataclass(frozen=True)
class Calibration:
    """What is to be calibrated. budget_s: for everything, loading the model left aside. requests: of the live runs."""

    engine: EngineChoice
    policies: tuple[str, ...] = ("chunked", "prefill_priority")
    budget_s: float = 240.0
    requests: int = 60
    repeats: int = 2
    prompt: str = "lognormal:512,1.0,16,2000"
    output: str = "lognormal:96,0.8,4,400"


def calibrate(what: Calibration, out: Path, say: Callable[[str], None], *, anyway: bool = False) -> Result:
    """Every stage that is not done yet; raises ExperimentError if a kernel that is in use gives wrong answers."""
    out.mkdir(parents=True, exist_ok=True)
    validation = Validation(settings_of(what, out), out / "validation", anyway=anyway, say=say)
    checks = self_tests(validation, out, say)
    validation.ceilings()
    ceilings = _measured_ceilings(out)
    loaded = validation.live_side.loaded
    judged = aims_stage(loaded, ceilings, out, say, block_size=what.engine.block_size)
    host = host_time_stage(loaded, what.engine.block_size, out, say)
    result = validation.run()
    shutil.copyfile(validation.out / "model.json", out / "model.json")
    shutil.copyfile(validation.out / "device.toml", out / "device.toml")
    write_report(result, checks, out, judged, host)
    slim(out, say)
    return result


def settings_of(what: Calibration, out: Path) -> Settings:
    """The validation behind a calibration; its trace is generated once, and another one is refused."""
    from workloads import generate, read_trace, write_trace

    trace = out / "trace.csv"
    made = generate(
        requests=what.requests, arrivals="poisson:1", prompt=what.prompt, output=what.output, seed=what.engine.seed
    )
    if not trace.exists():
        write_trace(made, trace)
    elif not read_trace(trace).same_requests(made):
        raise ExperimentError(
            f"{out}: holds a calibration with another --prompt, --output, --requests or --seed; choose another --out "
            "or remove it"
        )
    on_cpu = what.engine.device == "cpu"
    return Settings(
        trace=str(trace),
        policies=what.policies,
        engine=what.engine,
        rows=(0, what.requests),
        repeats=what.repeats,
        budget_s=PROFILE_SHARE * what.budget_s,
        ensemble=19,
        bounds=(512, what.engine.max_num_seqs, 2048) if on_cpu else (2048, max(256, what.engine.max_num_seqs), 8192),
    )


def self_tests(validation: Validation, out: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Kernels against the reference in float64. One that is in use and fails stops everything."""
    file = out / "self_test.json"
    if file.exists():
        return list(read_json(file))
    from executor.checks.self_test import self_test

    loaded = validation.live_side.loaded
    say(f"self-test: kernels of {loaded.device}, {loaded.dtype}")
    size = validation.settings.engine.block_size
    checks = [check.as_dict() for check in self_test(loaded.device, loaded.dtype, loaded.spec, block_size=size)]
    used = {str(loaded.describe()[key]) for key in ("attention", "kernels")}
    for check in checks:
        # A kernel that raises or answers NaN has no error to compare: it has not passed either.
        wrong = bool(check["case"]) and not check["passed"]
        if wrong and check["kernel"] in used:
            raise ExperimentError(
                f"self-test: {check['kernel']} on {check['case']}: error {check['error']:.2e}, allowed "
                f"{check['tolerance']:.2e}; nothing was measured (choose another with --attention or --kernels)"
            )
    write_json(file, [_plain(check) for check in checks])
    return checks


def _measured_ceilings(out: Path) -> Any:
    from executor.machine.ceilings import Ceilings

    found = _ceilings(out)
    return Ceilings(**{entry.name: found[entry.name] for entry in fields(Ceilings)})


def _ceilings(out: Path) -> dict[str, Any]:
    return dict(read_json(out / "validation" / "ceilings.json"))


def write_report(
    result: Result, checks: list[dict[str, Any]], out: Path, judged: list[dict[str, Any]], host: list[dict[str, Any]]
) -> list[Path]:
    """report.md, report.html and report.json: self-tests, ceilings, judging batches, then the validation."""
    ceilings = _ceilings(out)
    story: list[Block] = [
        Heading(f"Calibration: {result.settings.engine.model} on {ceilings['device']}", 1),
        Bullets(in_short(result)),
        Heading("The device"),
        Table(
            ("measured", "value"),
            [
                ("copy bandwidth, both ways counted", f"{ceilings['copy_bytes_per_s'] / 1e9:,.1f} GB/s"),
                (f"matrix rate, {ceilings['dtype']}", f"{ceilings['matrix_flops'] / 1e12:,.3f} TFLOP/s"),
            ],
        ),
        Heading("Kernels against the reference"),
        Table(
            ("kernel", "case", "error", "allowed", "result"),
            [
                (
                    check["kernel"],
                    check["case"],
                    _number(check["error"]),
                    f"{check['tolerance']:.0e}",
                    "right" if check["passed"] else check["reason"] or "wrong",
                )
                for check in checks
            ],
            {"right": "good", "wrong": "bad"},
        ),
    ]
    story += aims_blocks(judged, host)
    found = blocks(result)
    story += [replace(found[0], level=2) if isinstance(found[0], Heading) else found[0], *found[1:]]
    written = write_document(out, "report", story)
    content = {**as_dict(result), "self_test": [_plain(check) for check in checks], "ceilings": ceilings}
    content |= {"aims": judged, "host_time": host}
    write_json(out / "report.json", content)
    return written


def slim(out: Path, say: Callable[[str], None]) -> None:
    """Keep the folder under 16 MiB: figures for print go first, which a second start draws again, then tables are
    packed tighter. Nothing that a second start reads is removed, so a folder may stay too large; it is said then."""
    if folder_bytes(out) > MAX_BYTES:
        removed = [path.unlink() for path in out.glob("**/figures/*.pdf")]
        if removed:
            say(f"removed {len(removed)} figures for print to stay under {MAX_BYTES >> 20} MiB")
    for table in sorted(out.glob("**/*.parquet"), key=lambda path: path.stat().st_size, reverse=True):
        if folder_bytes(out) <= MAX_BYTES:
            return
        _pack(table)
    if (size := folder_bytes(out)) > MAX_BYTES:
        say(f"{out}: {size / 2**20:.1f} MiB, more than {MAX_BYTES >> 20}; fewer --requests make it smaller")


def _pack(table: Path) -> None:
    """The same table in fewer bytes: times hardly repeat, but their bytes do, place by place."""
    import pyarrow.parquet as pq

    content = pq.read_table(table)  # with its metadata, where a profile says where it comes from
    times = [field.name for field in content.schema if str(field.type) == "double"]
    others = [name for name in content.schema.names if name not in times]
    with whole_file(table, ExperimentError) as part:
        pq.write_table(
            content, part, compression="zstd", compression_level=19, use_byte_stream_split=times, use_dictionary=others
        )


def folder_bytes(folder: Path) -> int:
    """Size of everything in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _number(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) and value == value else "-"


def _plain(check: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value != value else value for key, value in check.items()}
