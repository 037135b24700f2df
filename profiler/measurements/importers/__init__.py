"""Other projects' measurements as profiles: one module a source, one function `read(path)` in each.

Each module's docstring lists its source's units and traps; nothing outside it needs to know them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.errors import ProfileError

if TYPE_CHECKING:
    from profiler.measurements.profile import Profile

KINDS = ("llmservingsim", "llmservingsim-v0", "aiconfigurator", "vidur", "splitwise", "distserve")


def import_profile(kind: str, path: str | Path, **options: Any) -> Profile:
    """Read a folder or file of `kind` (one of KINDS); raises ProfileError."""
    if kind not in KINDS:
        raise ProfileError(f"importer: found {kind!r}, expected one of {', '.join(KINDS)}")
    module = import_module(f"profiler.measurements.importers.{kind.replace('-', '_')}")
    profile: Profile = module.read(Path(path), **options)
    return profile
