"""Engines by name and version: scheduler defaults, host and front-end terms, the source of each, their uncertainty.

`data/engines.toml` holds the table. A file of the same form, with one engine at its top level, is an engine too: a
calibration writes one, and whatever uses it says that it is CALIBRATED and on what.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from policies.edges.input_file import read_toml
from policies.edges.settings import check_value
from profiler.errors import ProfileError
from profiler.operators.engine_terms import EngineTerms
from profiler.specs.hardware import Hardware

NONE = "none"
"""No engine: kernels and the host time of vLLM's scheduler, whatever policy is asked for, and no front end."""

LARGE_BYTES = 70 * 2**30
WIDTHS = ("host", "sustained", "front_end")
_KEYS = {
    "base": str,
    "engine": str,
    "version": str,
    "assumed": bool,
    "policy": str,
    "knobs": dict,
    "limits": dict,
    "block_size": int,
    "terms": dict,
    "half_widths": dict,
    "sources": dict,
    "calibrated_on": str,
    "held_out": dict,
}
_MERGED = ("terms", "half_widths", "sources", "limits")


@dataclass(frozen=True)
class NamedEngine:
    """An engine as it is served.

    name: as vllm:0.19. policy, knobs: of the scheduler that stands for it (None: whatever the user asks for). limits:
    default token budget and sequences by size of card. terms: fields of `EngineTerms`. half_widths: relative, of 90 %
    intervals of "host", "sustained" and "front_end". sources: by part, in words. assumed: no measured run of it was at
    hand. calibrated_on: the runs that its terms were fitted on by a user; empty for the table's own.
    """

    name: str
    policy: str | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    block_size: int | None = None
    terms: Mapping[str, Any] = field(default_factory=dict)
    half_widths: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    assumed: bool = False
    calibrated_on: str = ""

    def __hash__(self) -> int:
        return hash((self.name, self.calibrated_on, tuple(sorted(self.terms))))

    def limit(self, name: str, hardware: Hardware) -> int | None:
        """Default `token_budget` or `max_num_seqs` on this card; None where the engine says nothing."""
        large = hardware.memory_bytes >= LARGE_BYTES and not hardware.name.startswith("a100")
        return self.limits.get("large" if large else "other", {}).get(name)

    @property
    def label(self) -> str:
        """The name with what a reader has to know about it."""
        if self.calibrated_on:
            return f"{self.name}, CALIBRATED on {self.calibrated_on}"
        return f"{self.name}, assumed" if self.assumed else self.name

    def facts(self) -> dict[str, Any]:
        """As plain data for config.json."""
        return {
            "name": self.name,
            "assumed": self.assumed,
            "calibrated_on": self.calibrated_on or None,
            "terms": dict(self.terms),
            "half_widths_90": dict(self.half_widths),
            "sources": dict(self.sources),
        }


def load_engine(name: str | Path) -> NamedEngine:
    """An engine of the table (`vllm`, `vllm:0.12`, `none`) or of a TOML file; raises ProfileError.

    A version that the table does not list is the newest one before it, and an engine without a version its newest.
    """
    text = str(name).strip()
    if text == NONE:
        return NamedEngine(NONE)
    if text.endswith(".toml"):
        return _of_file(Path(text))
    kind, _, version = text.partition(":")
    versions = _table().get(kind)
    if versions is None:
        raise ProfileError(f"engine {text!r}: expected one of {', '.join(engine_names())}, or a .toml file")
    if not version:
        return versions[max(versions)]
    wanted = _version(version)
    if wanted is None:
        raise ProfileError(f"engine {text!r}: found version {version!r}, expected one such as {kind}:0.19")
    before = [known for known in versions if known <= wanted]
    if not before:
        raise ProfileError(f"engine {text!r}: the oldest known is {versions[min(versions)].name}")
    return versions[max(before)]


def engine_names() -> list[str]:
    """Names that `load_engine` knows, `none` first."""
    return [NONE, *(engine.name for versions in _table().values() for engine in versions.values())]


def _version(text: str) -> tuple[int, ...] | None:
    return tuple(int(part) for part in text.split(".")) if re.fullmatch(r"\d{1,4}(\.\d{1,4}){0,3}", text) else None


@cache
def _table() -> dict[str, dict[tuple[int, ...], NamedEngine]]:
    text = resources.files("profiler").joinpath("data/engines.toml").read_text(encoding="utf-8")
    tables = _flat(tomllib.loads(text))
    made: dict[str, NamedEngine] = {}
    for name, facts in tables.items():
        made[name] = _build(name, facts, "engines.toml", made)
    found: dict[str, dict[tuple[int, ...], NamedEngine]] = {}
    for name, engine in made.items():
        kind, _, version = name.partition(":")
        found.setdefault(kind, {})[_version(version) or ()] = engine
    return found


def _flat(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """TOML reads [vllm.0.19] as tables in tables: name:major.minor -> its facts."""
    return {
        f"{kind}:{major}.{minor}": facts
        for kind, majors in content.items()
        for major, minors in majors.items()
        for minor, facts in minors.items()
    }


def _of_file(path: Path) -> NamedEngine:
    content = read_toml(path, ProfileError)
    return _build(path.stem, content, str(path), {})


def _build(name: str, facts: Mapping[str, Any], where: str, known: Mapping[str, NamedEngine]) -> NamedEngine:
    for key, value in facts.items():
        if key not in _KEYS:
            raise ProfileError(f"{where}: engine {name}: unknown key {key!r}, expected one of {', '.join(_KEYS)}")
        check_value(f"{where}: engine {name}: {key}", value, (_KEYS[key],), ProfileError)
    values: dict[str, Any] = {}
    if "base" in facts:
        base = known.get(facts["base"]) or load_engine(facts["base"])
        values = {key: getattr(base, key) for key in NamedEngine.__dataclass_fields__ if key not in ("name", "assumed")}
    for key, value in facts.items():
        if key in _MERGED:
            values[key] = {**values.get(key, {}), **value}
        elif key not in ("base", "engine", "version", "held_out"):
            values[key] = value
    if "engine" in facts:
        name = f"{facts['engine']}:{facts['version']}" if facts.get("version") else str(facts["engine"])
    where = f"{where}: engine {name}"
    EngineTerms.from_mapping(values.get("terms", {}), where)
    for key, width in values.get("half_widths", {}).items():
        if key not in WIDTHS or isinstance(width, bool) or not isinstance(width, int | float) or not 0 <= width <= 10:
            raise ProfileError(f"{where}: half_widths.{key}: found {width!r}, expected 0 to 10 of {', '.join(WIDTHS)}")
    for size, limits in values.get("limits", {}).items():
        if size not in ("large", "other") or not isinstance(limits, Mapping):
            raise ProfileError(f"{where}: limits: found {size!r}, expected tables large and other")
        for key, limit in limits.items():
            if key not in ("token_budget", "max_num_seqs") or isinstance(limit, bool) or not isinstance(limit, int):
                raise ProfileError(f"{where}: limits.{size}.{key}: found {limit!r}, expected a count")
    return NamedEngine(name=name, **values)


FLAGS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "token_budget": "--max-num-batched-tokens",
        "max_num_seqs": "--max-num-seqs",
        "memory": "--gpu-memory-utilization",
        "long_prefill": "--long-prefill-token-threshold",
        "tp": "--tensor-parallel-size",
        "pp": "--pipeline-parallel-size",
        "dp": "--data-parallel-size",
        "ep": "--enable-expert-parallel",
    },
    "trtllm": {
        "token_budget": "--max_num_tokens",
        "max_num_seqs": "--max_batch_size",
        "memory": "--kv_cache_free_gpu_memory_fraction",
    },
    "sglang": {
        "token_budget": "--chunked-prefill-size",
        "max_num_seqs": "--max-running-requests",
        "memory": "--mem-fraction-static",
    },
}
"""How each engine's server spells its scheduler's settings."""


def engine_flags(name: str, settings: Mapping[str, int | float]) -> str:
    """Settings as flags of an engine's server; vLLM's where the engine is none of the table's own.

    settings: by the keys of FLAGS; what an engine has no flag for is left out. A switch that is on stands alone.
    """
    spelled = FLAGS.get(name.partition(":")[0], FLAGS["vllm"])
    known = [(spelled[key], value) for key, value in settings.items() if key in spelled]
    return " ".join(flag if value is True else f"{flag} {value}" for flag, value in known)
