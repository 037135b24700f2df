"""The config of a run folder as its readers may rely on it: what it says has the type that we write.

A run folder can come from anywhere. Keys that are absent mean what they mean in older folders; unknown ones are let be.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metrics.columns import MetricsError
from policies.settings import check_value

_NONE = type(None)
_COUNTS = (
    "tp", "pp", "token_budget", "max_num_seqs", "max_model_len", "block_size", "num_blocks", "watermark_blocks",
    "slots", "chunk_size", "devices_per_replica", "seed",
)  # fmt: skip
_TABLES = ("knobs", "replay", "live", "memory", "peaks", "model_flops", "model_bytes", "cluster", "trace", "versions")
_NAMES = ("world", "policy", "gpu", "cost_model", "cost_kind")
_LIFE = {"replica": (int,), "pool": (int,), "ordered_s": (float,), "down_s": (float, _NONE)}


def check_config(config: Mapping[str, Any], file: Path) -> None:
    """Raises MetricsError for the first key whose value is of another type than ours."""
    for name in _COUNTS:
        check_value(f"{file}: {name}", config.get(name), (int, _NONE), MetricsError)
    for name in _NAMES:
        if not isinstance(config.get(name), Mapping):  # named in full, in older folders
            check_value(f"{file}: {name}", config.get(name), (str, _NONE), MetricsError)
    for name in _TABLES:
        check_value(f"{file}: {name}", config.get(name), (dict, _NONE), MetricsError)
    for key, value in (config.get("peaks") or {}).items():
        check_value(f"{file}: peaks.{key}", value, (float,), MetricsError)
    check_value(f"{file}: pools", config.get("pools"), (tuple, _NONE), MetricsError)
    pools = config.get("pools") or []
    for row in pools:
        check_value(f"{file}: pools", row, (dict,), MetricsError)
        for name in _COUNTS:
            check_value(f"{file}: pools: {name}", row.get(name), (int, _NONE), MetricsError)
    lives = (config.get("cluster") or {}).get("lives")
    check_value(f"{file}: cluster.lives", lives, (tuple, _NONE), MetricsError)
    for life in lives or []:
        check_value(f"{file}: cluster.lives", life, (dict,), MetricsError)
        for key, wanted in _LIFE.items():
            check_value(f"{file}: cluster.lives: {key}", life.get(key), wanted, MetricsError)
        if pools and not 0 <= life["pool"] < len(pools):
            raise MetricsError(f"{file}: cluster.lives: found pool {life['pool']}, expected 0 to {len(pools) - 1}")
