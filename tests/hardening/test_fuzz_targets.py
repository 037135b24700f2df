"""What `fuzz.py` hands to its targets by the million, once here: their seeds, and seeds that go on and on."""

from __future__ import annotations

import pytest

from tests.hardening.command_line import needs_posix
from tests.hardening.fuzz import TARGETS, refused

pytestmark = needs_posix
JUNK = (b"\xff" * 3_000, b"9" * 5_000, b"nan" * 1_000, b"[" * 2_000, "²".encode() * 1_000)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_reads_its_seeds_or_refuses_in_one_short_line(name: str) -> None:
    if name == "gguf":
        pytest.importorskip("torch")
    call, seeds = TARGETS[name]()
    for seed in seeds:
        middle = len(seed) // 2
        for junk in (b"", *JUNK):
            for content in (seed + junk, junk + seed, seed[:middle] + junk + seed[middle:]):
                refused(lambda content=content: call(content))  # type: ignore[misc]
