"""Work against the machine's peak: model FLOPs and bytes of every iteration (MFU, MBU) from plain numbers.

metrics knows no model and no GPU. Whoever does hands over peak rates and either the work of each iteration or a
handful of coefficients of what a batch is made of; coefficients can be kept in config.json, so that the numbers can be
rebuilt from the run folder alone. Only useful work counts: dummy tokens and recomputed graph padding do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrics.measures.replica_presence import Presence, device_seconds, devices_per_stage
from metrics.measures.windows import share_inside
from metrics.run_folder.columns import MetricsError
from metrics.run_folder.tables import RunTables

Floats = NDArray[np.float64]
Work = Mapping[str, float] | Floats | Callable[[RunTables], Floats]

WORK_FEATURES = {
    "iteration": "1 (weights are read once per iteration; 0 for a rank's dummy step)",
    "token": "prefill and decode tokens (linear layers; keys and values written)",
    "sampled": "rows through the output head",
    "pair": "query-key pairs that causal attention visits: tokens x prefix + tokens (tokens + 1) / 2 of a chunk, "
    "context + 1 of a decode",
    "context": "keys and values read: prefix + tokens of a chunk, context + 1 of a decode",
}
"""What a coefficient of work may be multiplied with."""


def utilisation(
    run: RunTables,
    stays: list[Presence],
    start_s: float,
    end_s: float,
    peaks: Mapping[str, float] | None,
    model_flops: Work | None,
    model_bytes: Work | None,
) -> dict[str, float]:
    """mfu, mfu_busy, mbu and mbu_busy of a window, where peaks and work are known."""
    found: dict[str, float] = {}
    if not peaks:
        return found
    inside = share_inside(run, start_s)
    # A stage's devices are busy for its share of the device time.
    replica, device_s = (run.column("iterations", name) for name in ("replica", "device_s"))
    busy_s = float((device_s * inside * devices_per_stage(stays, replica)).sum())
    there_s = device_seconds(stays, start_s, end_s)
    for name, work, peak in (("mfu", model_flops, "peak_flops"), ("mbu", model_bytes, "peak_bytes_per_s")):
        if work is None or peak not in peaks:
            continue
        done = float((work_per_iteration(run, work) * inside).sum())
        found[name] = share_of_peak(done, peaks[peak], there_s)
        found[f"{name}_busy"] = share_of_peak(done, peaks[peak], busy_s)
    return found


def work_per_iteration(run: RunTables, work: Work) -> Floats:
    """FLOPs or bytes of each iteration, from per-iteration numbers, a function of the run, or coefficients."""
    if callable(work):
        work = work(run)
    if not isinstance(work, Mapping):
        given = np.asarray(work, dtype=np.float64)
        if given.shape != (run.rows("iterations"),):
            raise MetricsError(
                f"work per iteration: found shape {given.shape}, expected ({run.rows('iterations')},), one an iteration"
            )
        return given
    unknown = [name for name in work if name not in WORK_FEATURES]
    if unknown:
        raise MetricsError(f"work: found coefficient {unknown[0]!r}, expected some of {', '.join(WORK_FEATURES)}")
    features = work_features(run)
    total = np.zeros(run.rows("iterations"))
    for name, coefficient in work.items():
        total += float(coefficient) * features[name]
    return total


def work_features(run: RunTables) -> dict[str, Floats]:
    """WORK_FEATURES of each iteration."""
    chunks = run.chunks()
    tokens, prefix = chunks["tokens"].astype(np.float64), chunks["prefix"].astype(np.float64)
    rows = run.rows("iterations")

    def per_iteration(values: Floats) -> Floats:
        return np.bincount(chunks["row"], weights=values, minlength=rows).astype(np.float64, copy=False)

    decodes = run.column("iterations", "decodes")
    decode_context = run.column("iterations", "decode_context_total") + decodes
    useful = run.column("iterations", "chunk_tokens") + decodes.astype(np.float64)
    return {
        "iteration": (useful > 0).astype(np.float64),
        "token": useful,
        "sampled": run.column("iterations", "sampled").astype(np.float64),
        "pair": per_iteration(tokens * prefix + tokens * (tokens + 1) / 2) + decode_context,
        "context": per_iteration(prefix + tokens) + decode_context,
    }


def share_of_peak(work: float, peak_per_s: Any, device_s: float) -> float:
    """Work done over what devices of that peak could have done in so many device-seconds; NaN where there were none."""
    if not isinstance(peak_per_s, (int, float)) or not peak_per_s > 0:
        raise MetricsError(f"peak: found {peak_per_s!r}, expected a number above 0")
    return work / (peak_per_s * device_s) if device_s > 0 else float("nan")
