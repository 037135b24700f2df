"""Where the public measurements lie that some tests need; they are no part of the project."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared(path: str) -> Path:
    """A file or folder of the shared data; the calling test is skipped where it is absent."""
    found = DATA / path
    if not found.exists():
        pytest.skip(f"shared data {path} is absent")
    return found
