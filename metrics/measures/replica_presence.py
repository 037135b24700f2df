"""Which replicas a run had, when each was there, and what each was made of: the denominators of every share of time.

A replica that never ran anything was there all the same, one that was started later was not, and pools differ: shares
of busy time and of peak rates are taken over what was really there. The run's config says so (`cluster.lives` and
`pools`); without it (a live run, tables made by hand) whoever ran something was there all the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrics.run_folder.tables import RunTables

Floats = NDArray[np.float64]


class Presence(NamedTuple):
    """One stay of a replica, from its order to its end, in seconds. stages: of all its data-parallel ranks; devices: of
    all its stages together."""

    replica: int
    start_s: float
    end_s: float
    stages: int
    devices: float

    def within_s(self, start_s: float, end_s: float) -> float:
        """Seconds of it that lie in a window."""
        return max(0.0, min(self.end_s, end_s) - max(self.start_s, start_s))


def fleet(run: RunTables, devices: float | None = None) -> list[Presence]:
    """Every stay of every replica. devices: of the whole run, where somebody says so; else as the config has it."""
    stages = _stages(run)
    told = _told(run.config, stages) if devices is None else []
    if told:
        return told
    peaks = run.config.get("peaks")
    if devices is None and isinstance(peaks, Mapping) and "devices" in peaks:
        devices = float(peaks["devices"])
    width = _width(run.config)
    return [
        Presence(replica, -math.inf, math.inf, depth, depth * width if devices is None else devices / len(stages))
        for replica, depth in stages.items()
    ]


def stage_seconds(stays: list[Presence], start_s: float, end_s: float) -> float:
    """Time that stages were there in a window, added up exactly: plain sums of floats differ from Python to Python."""
    return math.fsum(stay.within_s(start_s, end_s) * stay.stages for stay in stays)


def device_seconds(stays: list[Presence], start_s: float, end_s: float) -> float:
    """The same of devices."""
    return math.fsum(stay.within_s(start_s, end_s) * stay.devices for stay in stays)


def devices_per_stage(stays: list[Presence], replicas: NDArray[Any]) -> Floats:
    """Of the replica in each row: what one second of one of its stages is in device-seconds."""
    known = {stay.replica: stay.devices / stay.stages for stay in stays}
    numbers, where = np.unique(replicas, return_inverse=True)
    return np.array([known.get(int(number), 1.0) for number in numbers], dtype=np.float64)[where]


def _told(config: Mapping[str, Any], stages: Mapping[int, int]) -> list[Presence]:
    """The stays that the config of a simulated run tells of; none where it does not."""
    cluster, pools = config.get("cluster"), config.get("pools")
    lives = cluster.get("lives") if isinstance(cluster, Mapping) else None
    if not isinstance(lives, list) or not isinstance(pools, list):
        return []
    stays = []
    for life in lives:
        pool = pools[life["pool"]]
        ranks = int(pool.get("dp") or 1)
        depth = max(stages.get(life["replica"], 0), int(pool.get("pp") or 1) * ranks)
        devices = pool.get("devices_per_replica") or int(pool.get("tp") or 1) * int(pool.get("pp") or 1) * ranks
        end_s = math.inf if life["down_s"] is None else float(life["down_s"])
        stays.append(Presence(int(life["replica"]), float(life["ordered_s"]), end_s, depth, float(devices)))
    return stays


def _width(config: Mapping[str, Any]) -> int:
    """Devices of a stage: its tensor-parallel degree."""
    replay = config.get("replay")
    return int(config.get("tp") or (replay.get("tp") if isinstance(replay, Mapping) else None) or 1)


def _stages(run: RunTables) -> dict[int, int]:
    """Stages of every replica that ran anything, those of all its ranks."""
    replica, stage = run.column("stages", "replica"), run.column("stages", "stage")
    numbers, where = np.unique(replica, return_inverse=True)
    depth, ranks = np.zeros(len(numbers), dtype=np.int64), np.zeros(len(numbers), dtype=np.int64)
    np.maximum.at(depth, where, stage.astype(np.int64) + 1)
    np.maximum.at(ranks, where, run.column("stages", "rank").astype(np.int64) + 1)
    depth *= ranks
    return dict(zip(numbers.tolist(), depth.tolist()))
