"""What a user may ask of a summary: which requests to leave out, and which objective to hold it against.

Both come as text. A run checks them before it begins (`check_asked`), so that a slip costs no run.
"""

from __future__ import annotations

import re

from metrics.columns import MetricsError
from metrics.slo import parse_objectives


def check_asked(warmup: int | str | None, slo: str | None) -> None:
    """Raises MetricsError for whatever `summarise` would refuse."""
    if warmup and warmup != "auto":
        parse_warmup(warmup)
    if slo:
        parse_objectives(slo)


def parse_warmup(warmup: int | str) -> tuple[float, bool]:
    """(amount, whether it is seconds) of a number of requests such as 100, or of seconds such as "30s"."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*(s?)\s*", str(warmup), re.ASCII)
    if not match or (not match[2] and "." in match[1]):
        raise MetricsError(f"warm-up: found {warmup!r}, expected a number of requests (100) or seconds (30s)")
    return float(match[1]), bool(match[2])
