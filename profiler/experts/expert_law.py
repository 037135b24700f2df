"""What the experts of one layer cost on one device, as physics: the weights of the experts that got a token, or the
grouped products in whole tiles of each expert; beside them gating, permuting rows and adding them up again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.errors import ProfileError
from profiler.experts.routing import MOST_DRAWN, TILES, Spread, columns

if TYPE_CHECKING:
    from profiler.specs.hardware import Hardware
    from profiler.specs.model_spec import ModelSpec
    from profiler.specs.parallel_layout import ParallelLayout

Array = NDArray[np.float64]

JOIN = 6.0
"""How sharply bytes and products take turns: the larger of both, rounded off where they are alike."""
ACTIVATION_BYTES = 2.0


@dataclass(frozen=True)
class ExpertShape:
    """The experts of one layer as one device has them.

    hidden: width of a token. width: of an expert's FFN on this device. experts, top_k: of the whole layer. ways:
    devices that whole experts are dealt to. gated: three matrices an expert instead of two.
    """

    hidden: int
    width: int
    experts: int
    top_k: int
    ways: int = 1
    gated: bool = True

    @property
    def weights(self) -> int:
        """Of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.width

    def features(self, spread: Spread, tokens: Sequence[int]) -> Array:
        return columns(spread, tokens, self.experts, self.top_k, self.ways)


@dataclass(frozen=True)
class ExpertLaw:
    """memory: share of peak bandwidth at which weights stream. efficiency: of peak FLOPs, one for each of TILES.
    launch, per_expert: microseconds of the kernels, and of each touched expert. rows: share of peak bandwidth at which
    rows are moved around.

    weight_bytes: of one weight with its scales. flops_per_us, bytes_per_us, sms: of the device.
    """

    memory: float
    efficiency: tuple[float, ...]
    launch: float
    per_expert: float
    rows: float
    weight_bytes: float
    flops_per_us: float
    bytes_per_us: float
    sms: int

    def us(self, shape: ExpertShape, tokens: ArrayLike, features: Array) -> Array:
        """Microseconds of batches of `tokens`; features: of the same batches (`ExpertShape.features`)."""
        touched, routed = features[:, 0], features[:, 1]
        inner = (3.0 if shape.gated else 2.0) * shape.width
        moved_rows = ACTIVATION_BYTES * (
            routed * (3.0 * shape.hidden + inner) + 2.0 * np.asarray(tokens) * shape.hidden
        )
        stream = touched * shape.weights * self.weight_bytes / (self.bytes_per_us * self.memory)
        fastest = None
        for index, (tile, share) in enumerate(zip(TILES, self.efficiency, strict=True)):
            flops = 2.0 * features[:, 2 + index] * shape.weights
            # A device that is not full works as long as a full one: tiles come in waves.
            tiles = features[:, 2 + index] / tile * -(-2 * shape.width // 128)
            fill = np.maximum(tiles / self.sms, np.minimum(tiles, 1.0)) / np.maximum(tiles / self.sms, 1e-9)
            us = flops / (self.flops_per_us * share) * np.minimum(fill, self.sms)
            fastest = us if fastest is None else np.minimum(fastest, us)
        assert fastest is not None
        work = (stream**JOIN + fastest**JOIN) ** (1.0 / JOIN)
        return np.asarray(self.launch + self.per_expert * touched + work + moved_rows / (self.bytes_per_us * self.rows))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def least_us(
    shape: ExpertShape, features: Array, weight_bytes: float, flops_per_us: float, bytes_per_us: float
) -> Array:
    """What no kernel beats: weights of touched experts at full bandwidth, products of routed rows at peak."""
    stream = features[:, 0] * shape.weights * weight_bytes / bytes_per_us
    return np.maximum(stream, 2.0 * features[:, 1] * shape.weights / flops_per_us)


def fit_expert_law(
    points: Sequence[tuple[ExpertShape, Array, Array, Array]], hardware: Hardware, weight_bytes: float, products: str
) -> ExpertLaw:
    """points: (shape, tokens, features, measured microseconds). products: dtype of the products."""
    from scipy.optimize import least_squares

    if not points:
        raise ProfileError("experts: found no measurement to fit")
    device = (weight_bytes, hardware.peak(products) / 1e6, hardware.memory_bandwidth / 1e6, hardware.sms)

    def law_of(x: Array) -> ExpertLaw:
        share = 1.0 / (1.0 + np.exp(-x[: len(TILES) + 2]))
        launch, expert = np.exp(x[len(TILES) + 2 :])
        efficiency = tuple(float(e) for e in share[2:])
        return ExpertLaw(float(share[0]), efficiency, float(launch), float(expert), float(share[1]), *device)

    measured = np.log(np.concatenate([us for *_, us in points]))

    def misses(x: Array) -> Array:
        law = law_of(x)
        said = np.concatenate([law.us(shape, tokens, features) for shape, tokens, features, _ in points])
        return np.log(said) - measured

    start = np.array([1.5, 0.0, -1.0, -0.5, 0.0, 0.5, 3.0, -3.0])
    found = least_squares(
        misses, start, loss="soft_l1", f_scale=0.1, diff_step=1e-2, max_nfev=40, bounds=(start - 6.0, start + 6.0)
    )
    return law_of(found.x)


def shape_of(spec: ModelSpec, layout: ParallelLayout) -> ExpertShape:
    """The experts of a model as one device of a layout has them."""
    ways = layout.expert_ways
    if layout.ep:
        return ExpertShape(spec.hidden, spec.expert_intermediate, spec.experts, spec.top_k, ways, spec.gated)
    width = spec.expert_intermediate // ways
    return ExpertShape(spec.hidden, width, spec.experts, spec.top_k, 1, spec.gated)


def by_knots(us: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Times of many batches from those of about two hundred sizes, straight lines between: loads are drawn, which takes
    its time, and what lies between two sizes an eighth apart is no news."""

    @cache
    def table() -> tuple[Array, Array]:
        knots = np.array(_KNOTS, float)
        return knots, np.maximum.accumulate(us(knots))

    def at(tokens: Array) -> Array:
        knots, values = table()
        found = np.interp(tokens, knots, values)
        beyond = tokens > knots[-1]
        return np.where(beyond, values[-1] * tokens / knots[-1], found)

    return at


def _knots() -> tuple[int, ...]:
    sizes = list(range(1, 33))
    while sizes[-1] < MOST_DRAWN:
        sizes.append(min(MOST_DRAWN, sizes[-1] + max(2, sizes[-1] // 12)))
    return tuple(sizes)


_KNOTS = _knots()
