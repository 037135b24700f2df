"""What a GPU can do at best: peak rates, memory, links. Facts from datasheets, none measured here.

`data/hardware.toml` holds the table; a user's TOML file adds a GPU or overrides single facts of a known one (`base`).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from policies.edges.input_file import read_toml
from policies.edges.settings import check_value, listed
from profiler.errors import ProfileError
from profiler.specs.dtypes import canonical_dtype

MOST = 1e21
"""Of whatever is counted of a GPU: bytes, bytes or FLOPs per second."""


@dataclass(frozen=True)
class Hardware:
    """One GPU and its links.

    peak_flops: dense FLOPs per second by dtype. memory_bytes: capacity as the device reports it.
    memory_bandwidth: bytes per second. sms: processors that blocks of a kernel are dealt to in waves.
    link, link_bandwidth: connection between the GPUs of one node, bytes per second in one direction.
    network_bandwidth: the same between nodes, per GPU; None where no usual node has one.
    cache_bytes: of the second-level cache that all processors share; None where it is not known.
    host_bandwidth: the same to the host's memory, per GPU; None where it is not known.
    processor: "gpu", or "cpu" for the processor of a host, on which engines do not plan ahead of the running batch.
    p2p: whether GPUs of a node reach each other's memory directly; a property of the node (driver, IOMMU, ACS), which
    the table assumes by card. Without it all bytes between GPUs go through the host's memory.
    sustained_share: of peak FLOPs that dense products keep up for seconds; None where no run told.
    kernels_of: the card of the table whose kernels these are, where a file changed only links, memory size or texts;
    own_link: whether it changed the link, so that measured collectives of that card are of another node.
    remembered: fields known without a source at hand. source: where the others were read.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    sms: int
    link: str
    link_bandwidth: float
    title: str = ""
    network_bandwidth: float | None = None
    host_bandwidth: float | None = None
    power_w: float | None = None
    cache_bytes: int | None = None
    processor: str = "gpu"
    p2p: bool = True
    sustained_share: float | None = None
    kernels_of: str = ""
    own_link: bool = False
    remembered: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.peak_flops, Mapping) or not self.peak_flops:
            found = self.peak_flops
            raise ProfileError(f"gpu {self.name}: peak_flops: found {found!r}, expected a table of dtype = FLOPs per s")
        rates = {f"peak_flops.{dtype}": value for dtype, value in self.peak_flops.items()}
        rates |= {key: getattr(self, key) for key in ("memory_bytes", "memory_bandwidth", "sms", "link_bandwidth")}
        for key in ("network_bandwidth", "host_bandwidth", "cache_bytes"):
            if getattr(self, key) is not None:
                rates[key] = getattr(self, key)
        for key, value in rates.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ProfileError(f"gpu {self.name}: {key}: found {value!r}, expected a number above 0")
            if value > MOST:
                raise ProfileError(f"gpu {self.name}: {key}: found {value!r}, expected at most {MOST:.0e}")
        if self.processor not in ("gpu", "cpu"):
            raise ProfileError(f"gpu {self.name}: processor: found {self.processor!r}, expected gpu or cpu")
        if self.sustained_share is not None and not 0 < self.sustained_share <= 1:
            raise ProfileError(f"gpu {self.name}: sustained_share: found {self.sustained_share!r}, expected 0 to 1")
        for key in ("memory_bytes", "sms"):
            if getattr(self, key) != int(getattr(self, key)):
                raise ProfileError(f"gpu {self.name}: {key}: found {getattr(self, key)!r}, expected a whole number")

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.memory_bandwidth, self.sms, self.link_bandwidth, self.p2p))

    def peak(self, dtype: str) -> float:
        """Dense FLOPs per second in `dtype`; raises where the GPU has no such rate."""
        name = canonical_dtype(dtype)
        if name not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise ProfileError(f"gpu {self.name}: no peak rate for {name}, expected one of {known}")
        return float(self.peak_flops[name])

    def summary(self) -> dict[str, Any]:
        """Plain data for config.json."""
        row = asdict(self)
        row["peak_flops"] = dict(self.peak_flops)
        row["remembered"] = list(self.remembered)
        return row


_DERIVED = {"name", "kernels_of", "own_link"}
_FIELDS = {field.name for field in fields(Hardware)} - _DERIVED
_LINKS = {"link", "link_bandwidth", "p2p"}
_TEXTS = {"title", "source", "remembered"}
_NO_KERNEL = {"host_bandwidth", "network_bandwidth", "memory_bytes", "power_w"} | _LINKS | _TEXTS
"""Facts that change no kernel's time on one device."""
_REQUIRED = ("peak_flops", "memory_bytes", "memory_bandwidth", "sms", "link_bandwidth")


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A GPU of the table, or of a TOML file: `gpu.toml` (its only or top-level table) or `gpus.toml:name`.

    A file's table may say `base = "h100"` and then only what differs. Raises ProfileError, with near matches.
    """
    text = str(name_or_path)
    path, _, chosen = text.partition(".toml")
    if text.endswith(".toml") or chosen.startswith(":"):
        return _from_file(Path(path + ".toml"), chosen.removeprefix(":"))
    name = text.strip().lower().replace("_", "-").replace(" ", "")
    table = _table()
    for candidate in (name, name.removeprefix("nvidia-"), name.replace("-", ""), name.removesuffix("-80gb")):
        if candidate in table:
            return table[candidate]
    near = difflib.get_close_matches(name, table, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(table)}"
    raise ProfileError(f"gpu {text!r} is neither a known name nor a .toml file; {hint}")


def hardware_names() -> list[str]:
    """Names that load_hardware knows, in the order of the table."""
    return list(_table())


@cache
def _table() -> dict[str, Hardware]:
    text = resources.files("profiler").joinpath("data/hardware.toml").read_text(encoding="utf-8")
    return {name: _build(name, facts, "hardware.toml") for name, facts in tomllib.loads(text).items()}


def _from_file(path: Path, chosen: str) -> Hardware:
    content = read_toml(path, ProfileError)
    tables = {key: value for key, value in content.items() if isinstance(value, dict) and key != "peak_flops"}
    if chosen:
        if chosen not in tables:
            raise ProfileError(f"{path}: no table [{chosen}], found {', '.join(tables) or 'none'}")
        return _build(chosen, tables[chosen], str(path))
    if not tables:
        return _build(path.stem, content, str(path))
    if len(tables) == 1:
        return _build(*next(iter(tables.items())), str(path))
    raise ProfileError(f"{path}: holds {', '.join(tables)}; say which, as in {path.name}:{next(iter(tables))}")


def _build(name: str, facts: Mapping[str, Any], where: str) -> Hardware:
    facts = dict(facts)
    base = facts.pop("base", None)
    unknown = sorted(set(facts) - _FIELDS)
    if unknown:
        raise ProfileError(f"{where}: gpu {name}: unknown key {unknown[0]!r}, expected one of {sorted(_FIELDS)}")
    if base is not None:
        if not isinstance(base, str) or base not in _table():
            raise ProfileError(f"{where}: gpu {name}: base: found {base!r}, expected one of {', '.join(_table())}")
        known = asdict(_table()[base])
        facts_changed = {key for key, value in facts.items() if known[key] != value}
        if facts_changed <= _NO_KERNEL:
            known |= {"kernels_of": base, "own_link": bool(facts_changed & _LINKS)}
        known["remembered"] = tuple(key for key in known["remembered"] if key.split(".")[0] not in facts)
        facts = {**known, "title": "", **facts}
        facts["source"] = f"{where}, otherwise as {base}: {known['source']}"
    missing = [key for key in _REQUIRED if key not in facts]
    if missing:
        raise ProfileError(f"{where}: gpu {name}: missing {', '.join(missing)}")
    peaks = facts["peak_flops"]
    if isinstance(peaks, Mapping):
        facts["peak_flops"] = {canonical_dtype(dtype): value for dtype, value in peaks.items()}
    facts["remembered"] = listed(f"{where}: gpu {name}: remembered", facts.get("remembered", ()), str, ProfileError)
    for key, wanted in (
        *(("title", (str,)), ("link", (str,)), ("source", (str,)), ("power_w", (float, type(None)))),
        *(("p2p", (bool,)), ("sustained_share", (float, type(None)))),
    ):
        if key in facts:
            check_value(f"{where}: gpu {name}: {key}", facts[key], wanted, ProfileError)
    facts.setdefault("link", "unnamed")
    facts["name"] = name
    return Hardware(**facts)
