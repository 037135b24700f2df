"""The config of a run folder as its readers may rely on it: what it says has the type that we write.

A run folder can come from anywhere. Keys that are absent mean what they mean in older folders; unknown ones are let be.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metrics.run_folder.columns import MetricsError
from policies.edges.input_digests import changed_inputs, digests_of
from policies.edges.input_file import read_json
from policies.edges.settings import check_value

AS_WRITTEN = "as_written"
"""Key of config.json: digests of the settings that stand beside the table that is read back, to notice an edit."""
SETTINGS = ("replay", "live")
"""The tables of config.json that are read back; everything else there is what became of them."""

_NONE = type(None)
_COUNTS = (
    "tp",
    "pp",
    "token_budget",
    "max_num_seqs",
    "max_model_len",
    "block_size",
    "num_blocks",
    "watermark_blocks",
    "slots",
    "chunk_size",
    "devices_per_replica",
    "seed",
)
_TABLES = (
    "inputs",
    "knobs",
    "replay",
    "live",
    "memory",
    "peaks",
    "model_flops",
    "model_bytes",
    "cluster",
    "trace",
    "versions",
)
_NAMES = ("world", "policy", "gpu", "cost_model", "cost_kind")
_LIFE = {"replica": (int,), "pool": (int,), "ordered_s": (float,), "down_s": (float, _NONE)}


def digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Of what a run's config (as JSON has it) says of its settings outside the table that is read back."""
    names = {"chunk_size", *(name for table in SETTINGS for name in config.get(table) or ())}
    return {name: _digest(config[name]) for name in sorted(names) if name in config}


def settings_of_run(config: Mapping[str, Any], table: str, file: Path, error: type[Exception]) -> dict[str, Any]:
    """The table of a run's config that makes the run again; raises `error` for a setting that was edited beside it.

    A run writes its settings twice: as they were asked for, in the table, and as they became, beside it. Only the first
    are read back, so an edit of the second would be lost without a word, unless both now say the same.
    """
    settings = config[table]
    if not isinstance(settings, Mapping):
        raise error(f"{file}: `{table}`: expected a table of settings")
    written = config.get(AS_WRITTEN)
    if isinstance(written, Mapping):
        for name, now in digests(config).items():
            if now != written.get(name) and (name not in settings or config[name] != settings[name]):
                raise error(
                    f"{file}: {name} was changed outside the table `{table}`, which alone is read back; "
                    f"change it in `{table}`"
                )
    return dict(settings)


def refuse_changed_inputs(file: Path, settings: Mapping[str, Any], now: str, error: type[Exception]) -> None:
    """Raise `error` where a run is to be made again from files, or by a version, that are not those it was made from.

    file: its config.json. settings: of the new run; a file that the old one did not name is no change. now: version.
    """
    config = read_json(file, error)
    then = dict(config.get("inputs") or {})
    trace = config.get("trace")
    provenance = trace.get("provenance") if isinstance(trace, Mapping) else None
    path = settings.get("trace")
    if isinstance(provenance, Mapping) and isinstance(path, str) and not path.endswith(".gz"):
        # Runs that were made in Python name their trace here alone.
        same = Path(str(provenance.get("path"))).absolute() == Path(path).absolute()
        if same and provenance.get("sha256"):
            then.setdefault(path, provenance["sha256"])
    found = changed_inputs(then, digests_of(settings))
    version = (config.get("versions") or {}).get("charioteer")
    if version not in (None, now):
        found.append(f"charioteer ({version} then, {now} now)")
    if found:
        raise error(
            f"{file}: was made from other inputs: {', '.join(found)}; bring them back, or take --anyway to run with "
            "what is there now"
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


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
