"""Where public measurements lie: a few rows of each original in its own form, beside the tests; the whole ones, where
a folder with them lies beside the project, for what is tested on these in addition."""

from __future__ import annotations

from pathlib import Path

import pytest

ORIGINALS = Path(__file__).parent / "originals"
"""A few rows of each public original, as docs/facts.py cut them; its README names sources and licences."""
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared(path: str) -> Path:
    """A file or folder of the shared data; the calling test is skipped where it is absent."""
    found = DATA / path
    if not found.exists():
        pytest.skip(f"shared data {path} is absent")
    return found
