"""One clock for all ranks: rank 0's. What another rank's clock shows at the same moment is estimated by ping-pong.

Rank 0 notes when it asks and when it is answered; the answer holds the other clock's time, which was read at some
moment in between. The fastest exchange leaves the least room: its middle is the estimate, half of it the largest error
(Cristian 1989). Exchanges before and after a run tell how far the clocks drift apart; in between the offset is
interpolated. Ranks of one machine read the very same clock, which is known and needs no estimate; it is made anyway, as
a check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
EXCHANGES = 24


class Exchange(NamedTuple):
    """ns: rank 0 sends, the other rank's clock in between, rank 0 has the answer."""

    sent: int
    there: int
    received: int


class Offset(NamedTuple):
    """The other clock minus rank 0's at `at_ns` of rank 0's, and how wrong that may be at most."""

    at_ns: int
    offset_ns: int
    error_ns: int


def offset_of(exchanges: Sequence[Exchange]) -> Offset:
    """The estimate of the fastest exchange."""
    best = min(exchanges, key=lambda each: each.received - each.sent)
    middle = (best.sent + best.received) // 2
    return Offset(middle, best.there - middle, (best.received - best.sent + 1) // 2)


@dataclass(frozen=True)
class RankClock:
    """How to read one rank's clock as rank 0's. same: it is the same clock (then nothing is corrected)."""

    rank: int
    before: Offset
    after: Offset
    same: bool = False

    def to_rank_0(self, times_ns: Ints) -> Ints:
        """Moments of this rank's clock as moments of rank 0's."""
        if self.same:
            return times_ns
        span = self.after.at_ns - self.before.at_ns
        drift = (self.after.offset_ns - self.before.offset_ns) / span if span > 0 else 0.0
        since = (times_ns - self.before.offset_ns - self.before.at_ns).astype(np.float64)
        correction = self.before.offset_ns + np.rint(drift * since).astype(np.int64)
        return np.asarray(times_ns - correction)

    @property
    def error_ns(self) -> int:
        """The most by which a corrected moment may be wrong, as far as drift is even."""
        return 0 if self.same else max(self.before.error_ns, self.after.error_ns)

    def as_dict(self) -> dict[str, Any]:
        """What the run folder says of it."""
        return {
            "rank": self.rank,
            "same_clock": self.same,
            "estimated_offset_s": self.before.offset_ns / 1e9,
            "estimated_offset_after_s": self.after.offset_ns / 1e9,
            "estimate_error_s": max(self.before.error_ns, self.after.error_ns) / 1e9,
            "error_s": self.error_ns / 1e9,
        }


def machine() -> str:
    """A name that is the same for processes that read the same clock; empty where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        offsets = Path("/proc/self/timens_offsets")
        # Processes of one machine may live in time namespaces whose clocks differ.
        return boot + (offsets.read_text(encoding="ascii") if offsets.exists() else "")
    except OSError:
        return ""
