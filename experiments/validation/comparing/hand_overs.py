"""Hand-overs of KV between live engines, held beside the link that the simulator would be given for them.

The link (a latency and a bandwidth, `--kv-latency` and `--kv-bandwidth` of a replay) is fitted to copies made before
the run, never to the run itself. What a live engine adds is said apart: it takes KV in between two batches, where the
simulator's transfer ends whenever the wire is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import ExperimentError

if TYPE_CHECKING:
    from executor.live_pools import PoolsRun


@dataclass(frozen=True)
class Link:
    """A transfer of n bytes takes latency_s + n / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size: int) -> float:
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True)
class HandOvers:
    """Seconds are medians over the moves of a run. error: predicted over measured time of a copy, less 1, the median.

    room_s: from the first token until the decoding side had room. engines_s: waiting for a batch to end, which a link
    does not know.
    """

    moves: int
    moved_bytes: int
    link: Link
    measured_s: float
    predicted_s: float
    error: float
    room_s: float
    engines_s: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit_link(copies: Sequence[tuple[int, float]]) -> Link:
    """Latency and bandwidth of copies of several sizes: the median of each size, a straight line through them.

    Raises ExperimentError for copies of one size only.
    """
    sizes = sorted({size for size, _ in copies})
    if len(sizes) < 2:
        raise ExperimentError(f"hand-over: found copies of {len(sizes)} sizes, expected two or more to fit a link to")
    medians = [float(np.median([seconds for size, seconds in copies if size == each])) for each in sizes]
    # Relative errors count: small copies are as many as large ones.
    slope, latency = np.polyfit(sizes, medians, 1, w=1.0 / np.array(medians))
    if slope <= 0 or latency < 0:
        slope, latency = float(np.median(np.array(medians) / np.array(sizes))), 0.0
    return Link(float(latency), float(1.0 / slope))


def compare_hand_overs(run: PoolsRun) -> HandOvers:
    """What a run's hand-overs took, and what its link says they would."""
    if not run.moved:
        raise ExperimentError("hand-over: no request was handed over; expected answers of more than one token")
    link = fit_link(run.copies)
    measured = np.array([move.copied_ns / 1e9 for move in run.moved])
    predicted = np.array([link.seconds(move.size) for move in run.moved])
    return HandOvers(
        len(run.moved),
        sum(move.size for move in run.moved),
        link,
        float(np.median(measured)),
        float(np.median(predicted)),
        float(np.median(predicted / measured) - 1.0),
        float(np.median([move.waited_s for move in run.moved])),
        float(np.median([move.took_s for move in run.moved] - measured)),
    )
