"""An engine composed from measured operators, as plain data: what `profiler.operators.compose` hands to
`profiler.operators.fitted_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiler.evidence import ASSUMED
from profiler.operators.attention_tables import AttentionTables
from profiler.operators.engine_terms import EngineTerms
from profiler.operators.fitting.error_sizes import Spread
from profiler.operators.laws.physical_floor import GemmFloor
from profiler.operators.mixed_attention import MixedTables
from profiler.roofline.row_table import TABLED_ROWS

RowTerms = Callable[[NDArray[np.float64]], Mapping[str, NDArray[np.float64]]]


@dataclass(frozen=True)
class Operator:
    """One kernel by rows. us: microseconds of many row counts. measured: where these come from a measurement.
    otherwise: what they rest on elsewhere (`profiler.evidence`)."""

    us: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    measured: Callable[[NDArray[np.float64]], Any] = lambda rows: False
    otherwise: str = ASSUMED

    def __call__(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.us(rows)

    def times(self, count: float) -> Operator:
        """So many of them."""
        return replace(self, us=lambda rows: count * self.us(rows))


class RisingTerms:
    """Row terms as they are where they were measured, and never less than those of fewer rows elsewhere."""

    def __init__(self, terms: RowTerms, operators: Mapping[str, Operator]) -> None:
        self._terms, self._operators = terms, operators
        self._most: dict[str, NDArray[np.float64]] = {}
        self._size = 0

    def __call__(self, rows: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        terms = dict(self._terms(rows))
        outside = {
            name: ~np.broadcast_to(self._operators[name].measured(rows), rows.shape)
            for name in terms
            if name in self._operators
        }
        if not any(mask.any() for mask in outside.values()):
            return terms
        at = np.minimum(rows, TABLED_ROWS).astype(np.int64)
        if int(at.max()) >= self._size:
            self._size = min(max(int(at.max()) + 1, 2 * self._size), TABLED_ROWS + 1)
            each = self._terms(np.arange(self._size, dtype=np.float64))
            self._most = {name: np.maximum.accumulate(us) for name, us in each.items()}
        for name, mask in outside.items():
            terms[name] = np.where(mask, np.maximum(terms[name], self._most[name].take(at)), terms[name])
        return terms


@dataclass(frozen=True)
class Region:
    """The measured region: largest rows, sampled rows, chunk tokens, prefix, decodes and context.

    mixed: whether chunks were measured beside decodes.
    composed: operators that were not measured in this width, by name. unmeasured: those of them that stand on more
        than an interpolation between measured widths or one pass over their bytes, so that no shape counts as inside.
    """

    rows: int
    sampled: int
    tokens: int
    prefix: int
    decodes: int
    context: int
    mixed: bool = True
    composed: tuple[str, ...] = ()
    unmeasured: tuple[str, ...] = ()


@dataclass(frozen=True)
class Engine:
    """What `profiler.operators.compose` hands over: everything that a FittedModel evaluates.

    layer_rows: microseconds of one layer's row operators by name, over rows; first_rows, last_rows: the same for what
    the first and the last stage have besides; sampled: for the last stage over sampled rows. send: (ns, ns per row).
    half_widths: of 90 % intervals by operator, one factor for all shapes
    (`profiler.operators.fitting.error_factors`); spreads: errors that
    differ from shape to shape (`profiler.operators.fitting.error_sizes`); gemms: (n, k) of each linear layer, none
    of which beats the floor; operators: what each of the row operators rests on; kernels: launches a layer; tp:
    devices a stage; ranks: data-parallel ranks whose experts work together, and together: microseconds of the mean
    layer of what they do together, by the rows of all of them (layer_rows has it as if all ran the same); sustained:
    least microseconds a row of a linear layer, where the card's clocks fall.
    """

    name: str
    layer_split: tuple[int, ...]
    layer_rows: RowTerms
    first_rows: RowTerms
    last_rows: RowTerms
    sampled: RowTerms
    attention: AttentionTables | MixedTables
    region: Region
    terms: EngineTerms
    floor: GemmFloor
    send: tuple[float, float] = (0.0, 0.0)
    tile: int = 128
    tp: int = 1
    kernels: int = 0
    ranks: int = 1
    together: RowTerms | None = None
    sustained: Mapping[str, float] = field(default_factory=dict)
    half_widths: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    gemms: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    operators: Mapping[str, Operator] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
