"""How far the judging batches are from what the device can do, and how much of an iteration its host leaves it idle.

Both are stages of a calibration: batch by batch on disk, with bounds worked out from FLOPs, bytes and the ceilings that
were measured on the same device. On a small machine the same code runs on batches scaled down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from experiments.errors import ExperimentError
from experiments.running.report_document import Block, Bullets, Heading, Picture, Table, Text
from experiments.running.stage_files import read_json, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from executor.model.loading import Loaded

SMALL_SCALE = 16
"""Batches of a CPU are smaller by this."""

REPEATS = 5
CHUNKS, DECODES, PREFIX = (128, 256, 512, 1024, 2048), (8, 64), 1024


def aims_stage(
    loaded: Loaded, ceilings: Any, out: Path, say: Callable[[str], None], *, block_size: int = 16
) -> list[dict[str, Any]]:
    """Rows of `executor.measuring.judged_batches.measure_aims`, in out/aims.json; one line said a row."""
    file = out / "aims.json"
    if file.exists():
        return list(read_json(file))
    from executor.measuring.judged_batches import aims, measure_aims

    scale = SMALL_SCALE if loaded.device.type == "cpu" else 1
    wanted = [aim for aim in aims(scale) if aim.longest <= loaded.max_tokens]
    if loaded.spec.name != "llama-3.1-8b" or scale > 1:
        # The times of that model's kernels say nothing of another one, nor of a smaller batch.
        wanted = [replace(aim, seconds=0.0) for aim in wanted]
    rows: list[dict[str, Any]] = []
    write_json(out / "aims.part.json", rows)
    if not wanted:
        say(f"aims: none of these batches fits into {loaded.max_tokens} tokens, the longest request")
    for row in measure_aims(loaded, ceilings, wanted=wanted, block_size=block_size):
        rows.append(row)
        write_json(out / "aims.part.json", rows)
        say("aims: " + aim_line(row))
    (out / "aims.part.json").replace(file)
    return rows


def aim_line(row: dict[str, Any]) -> str:
    """One batch and variant as a person reads it."""
    text = (
        f"{row['batch']}, {row['variant']}: {row['seconds'] * 1e3:.3f} ms, bound {row['bound_s'] * 1e3:.3f} ms "
        f"({row['bound_by']}), {row['share']:.0%} of it"
    )
    if row["wanted_share"]:
        text += f", wanted {row['wanted_share']:.0%}"
    if row["wanted_s"]:
        text += f", wanted under {row['wanted_s'] * 1e3:g} ms"
    return text


def host_time_stage(loaded: Loaded, block_size: int, out: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Host and device time of whole iterations, short chunks above all, with CUDA graphs and without."""
    file = out / "host_time.json"
    if file.exists():
        return list(read_json(file))
    from executor.measuring.batch_rig import BatchRig
    from policies import BatchShape
    from profiler.measurements.plan import Point, longest_context

    scale = SMALL_SCALE if loaded.device.type == "cpu" else 1
    prefix = PREFIX // scale
    points = {
        f"chunk of {tokens // scale}": Point(BatchShape(((tokens // scale, prefix),)), "visited") for tokens in CHUNKS
    }
    for count in DECODES:
        few = max(1, count // scale)
        points[f"{few} decode{'s' * (few > 1)}"] = Point(BatchShape((), few, few * prefix, prefix, 0, few), "visited")
    points = {name: point for name, point in points.items() if longest_context(point.shape) < loaded.max_tokens - 8}
    if not points:
        write_json(file, [])
        say(f"host time: none of these batches fits into {loaded.max_tokens} tokens, the longest request")
        return []
    rig = BatchRig.for_points(loaded, list(points.values()), block_size=block_size)
    rig.warm(list(points.values()))
    rows = []
    captured = rig.runner.graphs
    for graphs in (True, False) if captured is not None else (False,):
        for name, point in points.items():
            if graphs and captured.buckets.of_shape(point.shape) is None:
                continue  # it runs without one in either case
            if graphs:
                timings = [rig.measure(point) for _ in range(REPEATS + 1)][1:]
            else:
                with rig.without_graphs():
                    timings = [rig.measure(point) for _ in range(REPEATS + 1)][1:]
            rows.append(
                {
                    "batch": name,
                    "rows": point.shape.rows,
                    "graphs": graphs,
                    "host_s": median(timing.before_ns + timing.after_ns for timing in timings) / 1e9,
                    "device_s": median(timing.device_ns for timing in timings) / 1e9,
                    "wall_s": median(timing.wall_ns for timing in timings) / 1e9,
                    "executed_rows": timings[0].executed_rows or point.shape.rows,
                }
            )
    write_json(file, rows)
    say(f"host time: {len(rows)} measurements, " + ("with graphs and without" if captured else "no graphs here"))
    return rows


def host_time_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a calibration folder; ExperimentError for one that has none."""
    file = folder / "host_time.json"
    if not file.exists():
        raise ExperimentError(f"{folder}: found no host_time.json, expected the folder of `experiments calibrate`")
    rows = read_json(file)
    wanted = {"batch", "rows", "graphs", "host_s", "device_s", "wall_s"}
    if not isinstance(rows, list) or not rows or any(not isinstance(row, dict) or wanted - set(row) for row in rows):
        raise ExperimentError(f"{file}: expected a list of batches with {', '.join(sorted(wanted))}")
    return rows


def host_time_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """The device's part of an iteration and the host's, without graphs and with them: chunks a token, decodes whole."""
    from metrics.drawing.figure_style import DOUBLE_COLUMN_IN, house_style, legend_above, new_figure

    chunks = [row for row in rows if row["batch"].startswith("chunk")]
    others = [row for row in rows if not row["batch"].startswith("chunk")]
    kinds = [kind for kind in (False, True) if any(row["graphs"] == kind for row in rows)]
    with house_style():
        figure, axes = new_figure(DOUBLE_COLUMN_IN, 2.4, 1, 2, width_ratios=(3, 1))
        for panel, part, label, unit in (
            (axes[0, 0], chunks, "time of a chunk per token (\u00b5s)", 1e6),
            (axes[0, 1], others, "time of an iteration (ms)", 1e3),
        ):
            _host_time_bars(panel, part, kinds, unit, per_row=part is chunks)
            panel.set_ylabel(label)
        legend_above(figure, axes[0, 0 if chunks else 1], 2 * len(kinds))
    return figure


def _host_time_bars(
    panel: Any, rows: Sequence[dict[str, Any]], kinds: Sequence[bool], unit: float, *, per_row: bool
) -> None:
    names = list(dict.fromkeys(row["batch"] for row in rows))
    width = 0.8 / len(kinds)
    for place, kind in enumerate(kinds):
        label, colour = ("with graphs", "#0072B2") if kind else ("without graphs", "#7F7F7F")
        mine = [row for row in rows if row["graphs"] == kind]
        at = [names.index(row["batch"]) - 0.4 + (place + 0.5) * width for row in mine]
        share = [unit / (row["rows"] if per_row else 1) for row in mine]
        device = [row["device_s"] * each for row, each in zip(mine, share)]
        host = [max(0.0, row["wall_s"] - row["device_s"]) * each for row, each in zip(mine, share)]
        panel.bar(at, device, width * 0.9, color=colour, label=f"device, {label}")
        panel.bar(
            at, host, width * 0.9, bottom=device, color="white", edgecolor=colour, hatch="////", label=f"host, {label}"
        )
    if per_row:
        panel.set_xlabel("chunk (tokens)")
    panel.set_xticks(range(len(names)), [name.removeprefix("chunk of ") for name in names])


def aims_blocks(aims: Sequence[dict[str, Any]], host: Sequence[dict[str, Any]]) -> list[Block]:
    """The part of a calibration's report that says how far the device is from its bounds."""
    story: list[Block] = [
        Heading("Judging batches"),
        Text(
            "Bounds: the larger of useful bytes over the copy bandwidth and useful FLOPs over the matrix rate above. "
            "Times are the device's, gaps that the host leaves included. A small model may stay in a CPU's caches and "
            "so beat the bound of memory."
        ),
        Table(
            ("batch", "variant", "time", "bound", "set by", "reached", "wanted"),
            [
                (
                    row["batch"],
                    row["variant"],
                    f"{row['seconds'] * 1e3:.3f} ms",
                    f"{row['bound_s'] * 1e3:.3f} ms",
                    row["bound_by"],
                    f"{row['share']:.0%}",
                    wanted_text(row),
                )
                for row in aims
            ],
        ),
        Heading("Host and device"),
        Table(
            ("batch", "graphs", "rows run", "device", "host", "host's share"),
            [
                (
                    row["batch"],
                    "yes" if row["graphs"] else "no",
                    str(row.get("executed_rows", row["rows"])),
                    f"{row['device_s'] * 1e3:.3f} ms",
                    f"{row['host_s'] * 1e3:.3f} ms",
                    f"{max(0.0, 1 - row['device_s'] / row['wall_s']):.0%}",
                )
                for row in host
            ],
        ),
    ]
    if host:
        caption = "Whole iterations, by chunk size: what short ones pay for their launches, and what graphs save."
        story.append(Picture("host_time", host_time_figure(host), caption))
    if not any(row["graphs"] for row in host):
        why = "--graphs off, no such device, or kernels that cannot be captured"
        story.append(Bullets([f"CUDA graphs were not used: {why}."]))
    return story


def wanted_text(row: dict[str, Any]) -> str:
    """What was wanted of a batch, and whether it was reached."""
    if row["reached"] is None:
        return "-"
    wanted = f"{row['wanted_share']:.0%}" if row["wanted_share"] else f"{row['wanted_s'] * 1e3:g} ms"
    return f"{wanted}: {'reached' if row['reached'] else 'missed'}"
