"""Latency against load as the client saw it: measured live, served by the simulator, and predicted without a clock.

    python benchmarks/load_figure.py docs/figures/serving_load --live runs/live --emulated runs/emulated

`--live` and `--emulated` are folders that `benchmarks/load_clients.py --out` has filled. The prediction replays each
live session's trace with the emulated session's costs behind a front end: half of what the client waited beyond the
engine at the lowest load lies before the engine, half behind it. Prints how far both are from the live run, as the
client saw them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from experiments.validation.client_agreement import compare_with_client
from metrics import read_run
from metrics.drawing.figure_style import DOUBLE_COLUMN_IN, RC
from metrics.measures.latencies import finished_latencies
from policies.edges.output_file import whole_file
from simulator import replay
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from workloads import read_trace
from workloads.reading.client_results import ClientRun, read_client_run

MEASURES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
Latencies = Mapping[str, np.ndarray]


def loads(folder: Path) -> list[tuple[float, Path]]:
    """(rate, folder) of each load, ascending."""
    found = [(float(name[1]), path) for path in folder.iterdir() if (name := re.fullmatch(r"\w+-([\d.]+)", path.name))]
    return sorted(found)


def client_of(folder: Path) -> ClientRun:
    return read_client_run(next(path for path in folder.glob("result.json*")))


def seen(client: ClientRun) -> Latencies:
    return {"ttft": client.ttft_s, "tpot": client.tpot_s[~np.isnan(client.tpot_s)], "e2e": client.e2e_s}


def predicted(live: Path, emulated: Path, front_s: float, last: int) -> Latencies:
    """The live session's trace, replayed with the emulated session's costs; its last requests, as many as measured."""
    half = front_s / 2 * 1e6
    config = ReplayConfig.from_dict(read_run(emulated / "run").config["replay"])
    config = replace(config, leaps=True, terms={"front_before_us": half, "front_after_us": half})
    tables = replay(read_trace(live / "run" / "trace.parquet"), config).tables
    order = np.argsort(tables.column("requests", "arrival_s"))
    wanted = np.zeros(len(order), bool)
    wanted[order[-last:]] = True
    return finished_latencies(tables, wanted)


def draw(path: Path, curves: Mapping[str, Mapping[float, Latencies]]) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    styles = {
        "live": ("#222222", "o", "-"),
        "served by the simulator": ("#0072b2", "s", "--"),
        "predicted": ("#d55e00", "^", ":"),
    }
    with rc_context(RC):
        figure = Figure(figsize=(DOUBLE_COLUMN_IN, 2.3))
        panels = figure.subplots(1, len(MEASURES))
        for panel, (measure, title) in zip(panels, MEASURES.items()):
            for label, points in curves.items():
                colour, marker, line = styles[label]
                rates = list(points)
                middle = [float(np.median(points[rate][measure])) * 1e3 for rate in rates]
                high = [float(np.quantile(points[rate][measure], 0.95)) * 1e3 for rate in rates]
                panel.plot(rates, middle, color=colour, marker=marker, linestyle=line, markersize=4, label=label)
                panel.plot(rates, high, color=colour, linestyle=line, linewidth=0.6, alpha=0.6)
            panel.set(title=f"{title}: median, and P95 (thin)", xlabel="requests/s", ylabel="ms", ylim=(0, None))
        panels[0].legend()
        for suffix in (".pdf", ".png"):
            with whole_file(path.with_suffix(suffix), SimulationError) as place:
                figure.savefig(place, format=suffix[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", type=Path)
    parser.add_argument("--live", type=Path, required=True)
    parser.add_argument("--emulated", type=Path, required=True)
    args = parser.parse_args()
    live, emulated = dict(loads(args.live)), dict(loads(args.emulated))
    lowest = min(live)
    found = compare_with_client(live[lowest] / "run", client_of(live[lowest]))
    front_s = float(np.median(found.ttft_s))
    print(f"front end: {front_s * 1e3:.2f} ms, the median at {lowest:g} requests/s")
    measured = {rate: seen(client_of(folder)) for rate, folder in live.items()}
    curves = {
        "live": measured,
        "served by the simulator": {rate: seen(client_of(folder)) for rate, folder in emulated.items()},
        "predicted": {
            rate: predicted(folder, emulated[rate], front_s, len(measured[rate]["e2e"]))
            for rate, folder in live.items()
        },
    }
    for label in list(curves)[1:]:
        for rate, points in curves[label].items():
            errors = []
            for measure, title in MEASURES.items():
                for what, of in (("mean", np.mean), ("p50", np.median)):
                    off = float(of(points[measure])) / float(of(measured[rate][measure])) - 1
                    errors.append(f"{title} {what} {off:+.1%}")
            print(f"{label}, {rate:g} requests/s: " + ", ".join(errors))
    draw(args.figure, curves)


if __name__ == "__main__":
    main()
