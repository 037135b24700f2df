"""What to measure: batches chosen from a visited region so that a fit may be trusted where a run will go.

The points stand in an order of which every beginning is a plan of its own: corners first, then whatever lies farthest
from all points before it, visited often before visited rarely. So a time budget may cut the list anywhere, and what is
left of the budget goes to where fits of resampled measurements disagree (`unsure_points`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.edges.input_file import read_json
from policies.edges.output_file import write_text
from policies.work.batch import BatchShape
from profiler.errors import ProfileError
from profiler.measurements.region import AXES, Region, check_shape, coordinates, distance

Array = NDArray[np.float64]

FORMAT = "charioteer measurement plan"
VERSION = 2
REASONS = ("corner", "visited", "filling", "noise", "unsure")
_VISITED_PER_FILLING = 3
_TOO_NEAR = 0.1


@dataclass(frozen=True)
class Point:
    """One batch to measure. why: one of REASONS (noise: measured again in every round, for the noise floor)."""

    shape: BatchShape
    why: str

    def __post_init__(self) -> None:
        if self.why not in REASONS:
            raise ProfileError(f"plan: found reason {self.why!r}, expected one of {', '.join(REASONS)}")
        check_shape(self.shape)

    @property
    def contexts(self) -> list[int]:
        """A context for each decode: they add up to the shape's total, the largest is its largest, the rest is spread
        evenly around what remains (half of it to one and a half times)."""
        _, decodes, total, largest, *_ = self.shape
        if decodes < 2:
            return [total] * decodes
        rest = total - largest
        mean = rest / (decodes - 1)
        tilt = min(0.5, (largest - mean) / mean, (mean - 1) / mean)
        # Whole parts of the running sum differ by whole numbers that add up exactly and stay between 1 and the largest.
        sums = np.floor(np.cumsum(mean * np.linspace(1 + tilt, 1 - tilt, decodes - 1)) + 1e-6)
        sums[-1] = rest
        return [largest, *np.diff(sums, prepend=0.0).astype(int).tolist()]


@dataclass(frozen=True)
class MeasurementPlan:
    """Points in order of use and how to spend the time.

    noise: points that every round measures again. budget_s: time for measuring in all. unsure_share: part of the budget
    for points chosen while measuring. per_round: points of one round, measured in random order. repeats: measurements
    of a point in its round.
    """

    points: tuple[Point, ...]
    noise: tuple[Point, ...]
    region: Region
    budget_s: float = 120.0
    unsure_share: float = 0.35
    per_round: int = 24
    repeats: int = 3
    seed: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.budget_s < 1e6:
            raise ProfileError(f"budget: found {self.budget_s} s, expected above 0")
        if not 0 <= self.unsure_share < 1:
            raise ProfileError(f"unsure share: found {self.unsure_share}, expected 0 or more and below 1")
        if self.per_round < 1 or self.repeats < 1:
            raise ProfileError(
                f"plan: found {self.per_round} points a round, {self.repeats} repeats, expected 1 or more"
            )

    def rounds(self) -> list[list[Point]]:
        """The planned points a round at a time, each round in an order of its own, noise points among them."""
        rng = np.random.default_rng(self.seed)
        rounds = []
        for start in range(0, len(self.points), self.per_round):
            batch = [*self.points[start : start + self.per_round], *self.noise]
            rounds.append([batch[at] for at in rng.permutation(len(batch)).tolist()])
        return rounds

    @property
    def most_tokens(self) -> int:
        """KV tokens that the largest point holds."""
        return max(tokens_held(point.shape) for point in (*self.points, *self.noise))

    @property
    def most_requests(self) -> int:
        """Requests in one batch, of any point, or of a mixture of the region's that a fit may ask for later."""
        shapes = [point.shape for point in (*self.points, *self.noise)] + list(self.region.shapes)
        return max(len(shape.chunks) for shape in shapes) + max(shape.decodes for shape in shapes)

    @property
    def most_rows(self) -> int:
        """Rows of the largest batch, counted as `most_requests`."""
        shapes = [point.shape for point in (*self.points, *self.noise)] + list(self.region.shapes)
        return max(shape.rows - shape.decodes for shape in shapes) + max(shape.decodes for shape in shapes)

    @property
    def longest(self) -> int:
        """The longest context of any request of any point, its own tokens included."""
        return max(longest_context(point.shape) for point in (*self.points, *self.noise))

    def write(self, path: str | Path) -> None:
        """plan.json, whole or not at all."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "budget_s": self.budget_s,
            "unsure_share": self.unsure_share,
            "per_round": self.per_round,
            "repeats": self.repeats,
            "seed": self.seed,
            "provenance": dict(self.provenance),
            "points": [_point_row(point) for point in self.points],
            "noise": [_point_row(point) for point in self.noise],
            "region": self.region.as_dict(),
        }
        write_text(path, json.dumps(document) + "\n", ProfileError)


def make_plan(
    region: Region, *, budget_s: float = 120.0, points: int = 240, seed: int = 0, **options: Any
) -> MeasurementPlan:
    """A plan for a region.

    points: most points in the list; the budget decides how many are reached. options: other fields of the plan.
    """
    if seed < 0:
        raise ProfileError(f"plan: seed: found {seed}, expected 0 or more")
    rng = np.random.default_rng(seed)
    chosen = _corners(region)
    seen = coordinates([point.shape for point in chosen])
    visited = coordinates(region.shapes)
    nearest = np.min([distance(visited, corner) for corner in seen], axis=0)
    # Between once and a thousand times visited lies a factor of about five in distance.
    weight = np.power(np.array(region.counts, float), 0.25)
    while len(chosen) < points:
        at = int(np.argmax(nearest * weight))
        if nearest[at] < _TOO_NEAR and len(chosen) >= len(region.shapes):
            break
        shape = region.shapes[at]
        why = "visited"
        if len(chosen) % (_VISITED_PER_FILLING + 1) == _VISITED_PER_FILLING or nearest[at] < _TOO_NEAR:
            shape, why = _between(region, rng), "filling"
        else:
            shape = _odd_or_aligned(shape, len(chosen))
        chosen.append(Point(shape, why))
        nearest = np.minimum(nearest, distance(visited, coordinates([shape])[0]))
    noise = tuple(Point(region.shapes[row], "noise") for row in _typical(region, 4))
    return MeasurementPlan(tuple(chosen), noise, region, budget_s=budget_s, seed=seed, **options)


def unsure_points(
    plan: MeasurementPlan,
    measured: Sequence[BatchShape],
    spread: Callable[[Sequence[BatchShape]], Array],
    count: int,
    round_number: int,
) -> list[Point]:
    """Where to measure next: visited shapes and mixtures of them whose prediction is least sure, far from each other.

    spread(shapes): relative disagreement between fits of resampled measurements, one number a shape.
    """
    rng = np.random.default_rng([plan.seed, round_number])
    shapes = [*plan.region.shapes, *(_between(plan.region, rng) for _ in range(len(plan.region.shapes) // 3))]
    weight = np.concatenate([plan.region.weights, np.full(len(shapes) - len(plan.region.shapes), 0.0)])
    weight = np.sqrt(weight + 1.0 / len(shapes))
    places = coordinates(shapes)
    nearest = np.min([distance(places, place) for place in coordinates(measured)], axis=0)
    unsure = np.asarray(spread(shapes)) * weight
    chosen: list[Point] = []
    while len(chosen) < count:
        score = unsure * np.minimum(nearest, 1.0)
        at = int(np.argmax(score))
        if score[at] <= 0:
            break
        chosen.append(Point(shapes[at], "unsure"))
        nearest = np.minimum(nearest, distance(places, places[at]))
    return chosen


def read_plan(path: str | Path) -> MeasurementPlan:
    """Read what `MeasurementPlan.write` wrote; raises ProfileError with the file and the entry at fault."""
    path = Path(path)
    document = read_json(path, ProfileError)
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        raise ProfileError(f"{path}: found something else, expected {FORMAT!r} version {VERSION}")
    try:
        points, noise = ([_point_of(row, f"{path}: {key}") for row in document[key]] for key in ("points", "noise"))
        numbers = {key: document[key] for key in ("budget_s", "unsure_share", "per_round", "repeats", "seed")}
        region = Region.from_dict(document["region"], f"{path}: region")
        return MeasurementPlan(tuple(points), tuple(noise), region, provenance=document["provenance"], **numbers)
    except (KeyError, TypeError) as error:
        raise ProfileError(f"{path}: {error}: missing or of the wrong kind") from None


# Choosing


def _corners(region: Region) -> list[Point]:
    """The extremes of every axis among decode-only, prefill-only and mixed batches, and corners of pure decoding."""
    kinds: dict[str, list[BatchShape]] = {"decode": [], "prefill": [], "mixed": []}
    for shape in region.shapes:
        kinds["mixed" if shape.chunks and shape.decodes else "prefill" if shape.chunks else "decode"].append(shape)
    found: dict[BatchShape, None] = {}
    for shapes in kinds.values():
        if not shapes:
            continue
        places = coordinates(shapes)
        for axis in range(len(AXES)):
            for row in (int(places[:, axis].argmin()), int(places[:, axis].argmax())):
                found[shapes[row]] = None
    decoding = [shape for shape in region.shapes if shape.decodes]
    if decoding:
        most = max(shape.decodes for shape in decoding)
        means = [shape.decode_context_total // shape.decodes for shape in decoding]
        for decodes in (1, most):
            for context in (max(1, min(means)), max(means)):
                found[BatchShape((), decodes, decodes * context, context, 0, decodes)] = None
    return [Point(shape, "corner") for shape in found]


def _between(region: Region, rng: np.random.Generator) -> BatchShape:
    """The chunks of one visited batch with the decodes of another: what a change of policy or load would visit."""
    with_chunks = [shape for shape in region.shapes if shape.chunks] or [None]
    with_decodes = [shape for shape in region.shapes if shape.decodes] or [None]
    one = with_chunks[int(rng.integers(len(with_chunks)))]
    other = with_decodes[int(rng.integers(len(with_decodes)))]
    if one is None or other is None:
        shape = one or other
        assert shape is not None
        return shape
    samples = max(one.sampled - one.decodes, 0)
    return BatchShape(
        one.chunks, other.decodes, other.decode_context_total, other.decode_context_max, 0, other.decodes + samples
    )


def _odd_or_aligned(shape: BatchShape, number: int) -> BatchShape:
    """Every second batch with its first chunk rounded to a multiple of 16, the others odd: kernels notice."""
    if not shape.chunks:
        return shape
    tokens, prefix = shape.chunks[0]
    if tokens < 32:
        return shape
    tokens = tokens // 16 * 16 if number % 2 else tokens | 1
    return shape._replace(chunks=((tokens, prefix), *shape.chunks[1:]))


def _typical(region: Region, count: int) -> list[int]:
    """The most visited shapes of different kinds and sizes: noise is measured where time is spent."""
    places = coordinates(region.shapes)
    weight = region.weights
    chosen: list[int] = []
    nearest = np.full(len(weight), 4.0)
    while len(chosen) < min(count, len(weight)):
        at = int(np.argmax(weight * nearest))
        chosen.append(at)
        nearest = np.minimum(nearest, distance(places, places[at]))
    return chosen


def clipped(shape: BatchShape, fits: Callable[[BatchShape], bool]) -> BatchShape | None:
    """The shape with its contexts and prefixes cut in proportion until it fits; None if it does not without any.

    fits: says of a shape whether there is memory for it; a shape with shorter contexts fits where a longer one does.
    """
    if fits(shape):
        return shape
    if not fits(_shortened(shape, 0.0)):
        return None
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(_shortened(shape, middle)) else (low, middle)
    return _shortened(shape, low)


def _shortened(shape: BatchShape, share: float) -> BatchShape:
    decodes, total, largest = shape.decodes, shape.decode_context_total, shape.decode_context_max
    if decodes:
        total = max(decodes, int(total * share))
        largest = min(max(int(largest * share), -(-total // decodes)), total - (decodes - 1))
    chunks = tuple((tokens, int(prefix * share)) for tokens, prefix in shape.chunks)
    return shape._replace(chunks=chunks, decode_context_total=total, decode_context_max=largest)


def tokens_held(shape: BatchShape) -> int:
    """KV tokens that a batch holds when it has run."""
    return sum([tokens + prefix for tokens, prefix in shape.chunks]) + shape.decode_context_total + shape.decodes


def longest_context(shape: BatchShape) -> int:
    """Longest context of any of its requests, the token after it included."""
    return max([tokens + prefix for tokens, prefix in shape.chunks] + [shape.decode_context_max]) + 1


def _point_row(point: Point) -> list[Any]:
    s = point.shape
    chunks = [list(chunk) for chunk in s.chunks]
    return [point.why, chunks, s.decodes, s.decode_context_total, s.decode_context_max, s.dummy_tokens, s.sampled]


def _point_of(row: Any, where: str) -> Point:
    try:
        why, chunks, *numbers = row
        pairs = tuple((int(tokens), int(prefix)) for tokens, prefix in chunks)
        return Point(BatchShape(pairs, *(int(number) for number in numbers)), str(why))
    except (TypeError, ValueError) as error:
        raise ProfileError(f"{where}: found {str(row)[:80]}: {error}") from None
