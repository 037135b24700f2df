"""Attention of one head layout on one device: two laws, what they miss on grids, and what uneven contexts add.

`fit_attention` reads a profile's attention rows. Grids are kept over the coordinates that were measured, so a fit
repeats its profile at the nodes, and the laws only have to carry it from one node to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from profiler.errors import ProfileError
from profiler.measurements.profile import TWIN, UNGROUPED, parse_chunks
from profiler.operators.fitting.folds import folds
from profiler.operators.laws.decode_law import DecodeLaw, fit_decode_law, fit_single
from profiler.operators.laws.lattice import Lattice, with_knots
from profiler.operators.laws.measured_grid import MeasuredGrid
from profiler.operators.laws.mixed_law import MixedLaw, fit_mixed_law
from profiler.operators.laws.prefill_law import ROW_TILES, TILES, PrefillLaw, fit_prefill_law
from profiler.operators.laws.smooth_batch_law import (
    BatchLaw,
    batch_us,
    chunk_share_us,
    fit_batch_law,
)
from profiler.operators.laws.uneven_contexts import fit_uneven

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

KV_BYTES = 4
"""A key and a value of 16 bits each."""

MANY_KNOTS = 24
"""More measured coordinates than this along an axis are dense enough for the tables' own knots."""

_AXES = {
    "decode": ("decodes", "context"),
    "single": ("context",),
    "prefill": ("tokens", "context"),
    "mixed": ("tokens", "context", "decodes", "context"),
}


@dataclass(frozen=True)
class AttentionFit:
    """Times of one layer in microseconds.

    batch_law, decode_law: the physics. misses: log(measured / law) as grids: "decode" over (decodes, context), "single"
        over context for one decode, which is another kernel (3 us below two decodes, however short),
    "prefill" over (tokens, prefix), "mixed" over (tokens, prefix, decodes, context). A grid that was not measured is
    absent; mixed batches are then the chunk plus what the law says the decodes add to it.
    uneven_decode: (decodes, us): what each token costs by which the longest context of a decode-only batch beats the
        mean. Next to nothing while few sequences are split over the processors, see `SPLIT_BELOW`.
    uneven_token_us: the same beside a chunk: per token by which the longest context beats both the mean and the
        chunk's own end.
    grouped: decodes of all query heads of a KV head share their reads; otherwise query heads are what is dealt out.
    streams_beside: without a "mixed" grid, decodes beside a chunk cost what they cost alone, less one launch (assumed
        of FlashAttention 3); otherwise what the law says blocks of the same kernel add (FlashAttention 2).
    prefill_law: of chunks alone, where blocks are dealt in waves; None: batch_law.
    mixed_law: the same of chunks beside decodes, which "mixed" is then counted from; None: batch_law. It is too slow
        for an engine's tables and is put into the grid by `tabled`.
    straight: between two measured numbers of decodes, the share (of the logarithm) of a straight line from one to the
        other; the rest is the law and what it misses. At measured numbers both agree.
    own: measured in this layout. Where it was not, decodes beside a chunk cost at least what they cost alone, less one
        launch: the same bytes have to come (on both RTX cards they cost more than that in 95 % of 20,000 mixed
        batches that stream for over 30 us, 1.7 to 2.2 times at the median), and without grouped heads bytes decide.
    token_us: least time a token of context in all takes in a layout that was not measured: its bytes from memory.
    region: largest measured tokens, prefix, decodes, context.
    grids: where decodes alone, a chunk alone ("prefill") and both ("mixed") were measured, over the axes of misses.
    """

    heads: int
    kv_heads: int
    head_dim: int
    sms: int
    batch_law: BatchLaw
    decode_law: DecodeLaw
    misses: Mapping[str, Lattice] = field(default_factory=dict)
    uneven_decode: tuple[tuple[float, float], ...] = ()
    uneven_token_us: float = 0.0
    streams_beside: bool = False
    grouped: bool = True
    prefill_law: PrefillLaw | None = None
    mixed_law: MixedLaw | None = None
    straight: float = 0.0
    own: bool = True
    token_us: float = 0.0
    region: Mapping[str, int] = field(default_factory=dict)
    grids: Mapping[str, MeasuredGrid] = field(default_factory=dict)

    def by_law(self) -> AttentionFit:
        """The laws alone, with nothing of what they miss."""
        nothing = {name: Lattice(grid.axes, np.zeros_like(grid.values)) for name, grid in self.misses.items()}
        return replace(self, misses=nothing, straight=0.0)

    def decode_us(self, decodes: ArrayLike, context: ArrayLike, typical: bool = False) -> Array:
        """Decodes of equal context and nothing else; `typical`: of a context near this one (`context_steps`)."""
        us = self._decode_by_law(decodes, context, typical)
        if not self.straight or "decode" not in self.misses:
            return us
        knots = self.misses["decode"].axes[0]
        decodes, context = np.broadcast_arrays(np.asarray(decodes, float), np.asarray(context, float))
        above = np.clip(np.searchsorted(knots, decodes), 1, len(knots) - 1)
        low, high = knots[above - 1], knots[above]
        share = (decodes - low) / (high - low)
        line = self._decode_by_law(low, context, typical) * (1.0 - share)
        line = line + self._decode_by_law(high, context, typical) * share
        between = (share > 0.0) & (share < 1.0)
        return np.where(between, us ** (1.0 - self.straight) * np.abs(line) ** self.straight, us)

    def _decode_by_law(self, decodes: ArrayLike, context: ArrayLike, typical: bool) -> Array:
        """The law and what it misses."""
        miss: Array | float = self.misses["decode"](decodes, context) if "decode" in self.misses else 0.0
        if "single" in self.misses:
            miss = np.where(np.asarray(decodes) < 2, self.misses["single"](context), miss)
        us = self.decode_law.us(decodes, context, typical) * np.exp(miss)
        if not self.token_us:
            return us
        return np.maximum(us, self.decode_law.launch + self.token_us * np.multiply(decodes, context))

    def prefill_us(self, tokens: ArrayLike, prefix: ArrayLike) -> Array:
        """One chunk alone."""
        miss = self.misses["prefill"](tokens, prefix) if "prefill" in self.misses else 0.0
        return self._prefill_by_law(tokens, prefix) * np.exp(miss)

    def _prefill_by_law(self, tokens: ArrayLike, prefix: ArrayLike) -> Array:
        if self.prefill_law is not None:
            return self.prefill_law.us(self.heads, tokens, prefix, tokens)
        return batch_us(self.batch_law, self.heads, self.sms, tokens, prefix, 0, 0)

    def batch_us(
        self, tokens: ArrayLike, prefix: ArrayLike, decodes: ArrayLike, context: ArrayLike, typical: bool = False
    ) -> Array:
        """One chunk beside at least one decode; `typical` as in `decode_us`."""
        if self.mixed_law is not None:
            both = self.mixed_law.us(self.heads, tokens, prefix, decodes, context, typical)
        else:
            both = batch_us(self.batch_law, self.heads, self.sms, tokens, prefix, decodes, context, typical)
        if "mixed" in self.misses:
            both = both * np.exp(self.misses["mixed"](tokens, prefix, decodes, context))
            if self.own:
                return both
        chunk = self.prefill_us(tokens, prefix)
        apart = chunk + np.maximum(self.decode_us(decodes, context, typical) - self.decode_law.launch, 0.0)
        if self.streams_beside:
            return apart
        if "mixed" not in self.misses:
            both = chunk + (both - batch_us(self.batch_law, self.heads, self.sms, tokens, prefix, 0, 0))
        return np.maximum(both, apart)

    def chunk_share_us(self, tokens: ArrayLike, prefix: ArrayLike) -> Array:
        """A further chunk in the same batch."""
        return chunk_share_us(self.batch_law, self.heads, self.sms, tokens, prefix)

    def knots(self, axis: str, most: int = MANY_KNOTS) -> Array:
        """Coordinates of grids along "tokens", "context" (prefixes too) or "decodes" that have no more than `most`."""
        found: list[Array] = [np.zeros(0)]
        for name, lattice in self.misses.items():
            for index, coordinate in enumerate(_AXES[name]):
                if coordinate == axis and len(lattice.axes[index]) <= most:
                    found.append(lattice.axes[index])
        return np.unique(np.concatenate(found))

    def uneven_decode_us(self, decodes: ArrayLike) -> Array:
        """Microseconds per token of `uneven_decode` for any number of decodes (straight lines over its logarithm)."""
        if not self.uneven_decode:
            return np.zeros(np.shape(decodes))
        knots = np.array(self.uneven_decode)
        return np.interp(np.log2(np.maximum(np.asarray(decodes, float), 1)), np.log2(knots[:, 0]), knots[:, 1])


STREAMED = 0.7
"""Share of peak bandwidth at which decodes of a layout that was not measured read their bytes at best, as in
`profiler.roofline.constants`: kernels whose query heads share reads in a cache look faster than memory until each head
has keys of its own."""


def transferred(
    fit: AttentionFit, heads: int, kv_heads: int, head_dim: int, bytes_per_us: float | None = None
) -> AttentionFit:
    """The fit of one head layout restated for another: sequences x KV heads are dealt out, bytes grow with head_dim.

    bytes_per_us: peak bandwidth of the device, if known.
    """
    size = head_dim / fit.head_dim
    streams = kv_heads / fit.kv_heads if fit.grouped else heads / fit.heads
    batch, decode = fit.batch_law, fit.decode_law
    misses = dict(fit.misses)
    if "decode" in misses:
        known = misses["decode"]
        misses["decode"] = Lattice([known.axes[0] / streams, known.axes[1]], known.values)
    return replace(
        fit,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        batch_law=replace(
            batch,
            step=batch.step * size,
            decode_step=batch.decode_step * size,
            write=batch.write * streams * size,
        ),
        decode_law=decode.resized(decode.streams * streams, size),
        prefill_law=fit.prefill_law
        and replace(fit.prefill_law, step=fit.prefill_law.step * size, write=fit.prefill_law.write * streams * size),
        misses=misses,
        own=False,
        token_us=kv_heads * head_dim * KV_BYTES / (bytes_per_us * STREAMED) if bytes_per_us else 0.0,
        uneven_decode=tuple((n / streams, us * size) for n, us in fit.uneven_decode if n / streams >= 1),
        uneven_token_us=fit.uneven_token_us * size,
    )


def batch_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Attention rows as numbers: tokens, prefix, chunks (how many equal ones), decodes, context (mean), longest, us,
    twin.

    Rows with unequal chunks come out with chunks = -1.
    """
    import pandas as pd

    parsed = {text: parse_chunks(text) for text in table["chunks"].unique()}
    equal = {text: len(set(chunks)) <= 1 for text, chunks in parsed.items()}
    decodes = table["decodes"].to_numpy(float)
    return pd.DataFrame(
        {
            "tokens": [parsed[text][0][0] if text else 0 for text in table["chunks"]],
            "prefix": [parsed[text][0][1] if text else 0 for text in table["chunks"]],
            "chunks": [len(parsed[text]) if equal[text] else -1 for text in table["chunks"]],
            "decodes": decodes,
            "context": table["decode_context_total"].to_numpy(float) / np.maximum(decodes, 1),
            "longest": table["decode_context_max"].to_numpy(float),
            "us": table["median_s"].to_numpy(float) * 1e6,
            "twin": table["backend"].str.contains(TWIN).to_numpy(bool),
        }
    )


def fit_attention(table: pd.DataFrame, sms: int) -> AttentionFit:
    """Fit the attention rows of one head layout (a profile's rows of one model and degree); raises ProfileError."""
    layouts = table[["heads", "kv_heads", "head_dim"]].drop_duplicates()
    if len(layouts) != 1:
        raise ProfileError(f"attention: found {len(layouts)} head layouts, expected one at a time")
    heads, kv_heads, head_dim = (int(value) for value in layouts.iloc[0])
    batches = batch_columns(table)
    flat = batches["longest"] <= np.ceil(batches["context"])
    even = batches[flat & ~batches["twin"] & batches["chunks"].isin((0, 1))]
    grouped = not table["backend"].str.contains(UNGROUPED).any()
    fit = AttentionFit(
        heads,
        kv_heads,
        head_dim,
        sms,
        BatchLaw(),
        DecodeLaw(),
        grouped=grouped,
        region=_region(batches),
        grids=measured_grids(even),
    )
    fit = _fit_decode(fit, even[even["tokens"] == 0])
    fit = _fit_batches(fit, even[even["tokens"] > 0])
    return fit_uneven(fit, batches[~flat & (batches["chunks"] >= 0)], batches[batches["twin"]])


def measured_grids(even: pd.DataFrame) -> dict[str, MeasuredGrid]:
    """Where decodes alone, a chunk alone, and both were measured; even: `batch_columns` with equal contexts."""
    kinds = {
        "decode": even[even["tokens"] == 0],
        "prefill": even[(even["tokens"] > 0) & (even["decodes"] == 0)],
        "mixed": even[(even["tokens"] > 0) & (even["decodes"] > 0)],
    }
    axes = {"decode": ["decodes", "context"], "prefill": ["tokens", "prefix"]}
    return {
        kind: MeasuredGrid.of(*rows[axes.get(kind, axes["prefill"] + axes["decode"])].to_numpy(float).T)
        for kind, rows in kinds.items()
        if len(rows)
    }


def _region(batches: pd.DataFrame) -> dict[str, int]:
    largest = {"tokens": batches["tokens"], "prefix": batches["prefix"], "decodes": batches["decodes"]}
    region = {key: int(column.max()) for key, column in largest.items()}
    return {**region, "context": int(batches["longest"].max())}


def _fit_decode(fit: AttentionFit, rows: pd.DataFrame) -> AttentionFit:
    if not len(rows):
        return fit
    n, c, us = (rows[key].to_numpy(float) for key in ("decodes", "context", "us"))
    many = n > 1
    if not many.any() or not fit.grouped:
        many = np.full(len(n), True)
    streams = fit.kv_heads if fit.grouped else fit.heads
    kernel = "fa2" if fit.grouped and fit.heads > fit.kv_heads else "fa2 whole"
    law = fit_decode_law(n[many], c[many], us[many], sms=fit.sms, heads=streams, kernel=kernel).resized(streams)
    miss = np.log(us / law.us(n, c))
    misses = {**fit.misses, "decode": _grid([n[many], c[many]], miss[many])}
    if not many.all():
        misses["single"] = _single(law, c[~many], us[~many])
    return replace(fit, decode_law=law, misses=misses, straight=STRAIGHT if fit.grouped else 0.0)


def _single(law: DecodeLaw, context: Array, us: Array) -> Lattice:
    """What the law of several decodes misses of one alone, by a law of its own where no context was measured."""
    own = fit_single(law, context, us)
    measured = Lattice.from_points([context], np.log(us / own.us(1, context)))
    knots = with_knots(measured.axes[0], SINGLE_CONTEXTS)
    return Lattice([knots], measured(knots) + np.log(own.us(1, knots) / law.us(1, knots)))


SINGLE_CONTEXTS = tuple(round(16 * 2 ** (quarter / 4)) for quarter in range(49))
"""Where one decode alone has knots besides the contexts measured."""


STRAIGHT = 0.5
"""Share of a straight line between measured batch sizes. A law that knows waves is wrong where other things decide, a
line where waves do, mostly not in the same places: the mean of both needs no weight to be told from few batch sizes.
Not of kernels without grouped heads, which split nothing: there waves are all."""


def _fit_batches(fit: AttentionFit, rows: pd.DataFrame) -> AttentionFit:
    if not len(rows):
        return fit
    columns = [rows[key].to_numpy(float) for key in ("tokens", "prefix", "decodes", "context")]
    us = rows["us"].to_numpy(float)
    some = np.random.default_rng(0).permutation(len(us))[:SAMPLE]
    sampled = [column[some] for column in columns]
    law = fit_batch_law(lambda law: batch_us(law, fit.heads, fit.sms, *sampled), us[some])
    miss = np.log(us / batch_us(law, fit.heads, fit.sms, *columns))
    misses = dict(fit.misses)
    alone = columns[2] == 0
    if alone.any():
        tokens, prefix = columns[0][alone], columns[1][alone]
        tiles = TILES if fit.grouped else ROW_TILES
        waves = fit_prefill_law(fit.heads, tokens, prefix, tokens, us[alone], fit.sms, tiles=tiles)
        if waves is not None:
            own = np.log(us[alone] / waves.us(fit.heads, tokens, prefix, tokens))
            nearer = np.abs(own).mean() < np.abs(miss[alone]).mean()
            if nearer or _nearer_left_out(fit, tokens, prefix, us[alone], tiles):
                fit, miss[alone] = replace(fit, prefill_law=waves), own
        misses["prefill"] = _grid([tokens, prefix], miss[alone])
    if (~alone).any():
        beside = [column[~alone] for column in columns]
        if fit.prefill_law is not None and fit.grouped and len(beside[0]) >= LEAST_MIXED:
            deal = (fit.prefill_law.slots, fit.prefill_law.rows, fit.prefill_law.stride)
            mixed = fit_mixed_law(fit.heads, fit.kv_heads, deal, beside, us[~alone])
            dealt = np.log(us[~alone] / mixed.us(fit.heads, *beside))
            if np.abs(dealt).mean() < np.abs(miss[~alone]).mean():
                fit, miss[~alone] = replace(fit, mixed_law=mixed), dealt
        misses["mixed"] = _grid(beside, miss[~alone])
    return replace(fit, batch_law=law, misses=misses)


def _nearer_left_out(
    fit: AttentionFit, tokens: Array, prefix: Array, us: Array, tiles: Sequence[tuple[int, int]]
) -> bool:
    """Whether dealing blocks tells chunk sizes left out of these rows better than sharing their work out evenly, which
    has more coefficients and so comes nearer to the rows themselves."""
    shared, dealt = 0.0, 0.0
    for left_out in folds(tokens):
        out = np.isin(tokens, left_out)
        kept, kept_us = (tokens[~out], prefix[~out]), us[~out]
        waves = fit_prefill_law(fit.heads, *kept, kept[0], kept_us, fit.sms, tiles=tiles)
        if waves is None:
            return False
        machine = {"heads": fit.heads, "sms": fit.sms}
        alone = partial(batch_us, **machine, tokens=kept[0], prefix=kept[1], decodes=0, context=0)
        law = fit_batch_law(alone, kept_us)
        told = batch_us(law, fit.heads, fit.sms, tokens[out], prefix[out], 0, 0)
        shared += float(np.abs(np.log(us[out] / told)).sum())
        told = waves.us(fit.heads, tokens[out], prefix[out], tokens[out])
        dealt += float(np.abs(np.log(us[out] / told)).sum())
    return dealt < shared


SAMPLE = 3000
"""Batches that the law of chunks is fitted to; a profile has up to 45,000 of one layout."""

LEAST_MIXED = 50
"""Fewer batches of a chunk and decodes do not fill the coefficients of a law of their own."""


GEOMETRIC = 8
"""Knots an octave where a profile's coordinates are too many to be knots themselves."""

MANY = 160


def _grid(columns: list[Array], values: Array) -> Lattice:
    """A lattice over the coordinates themselves, or over geometric knots along an axis that has too many of them."""
    seen = [np.unique(column) for column in columns]
    if max(map(len, seen)) <= MANY:
        return Lattice.from_points(columns, values)
    return Lattice.from_scatter([axis if len(axis) <= MANY else _geometric(axis) for axis in seen], columns, values)


def _geometric(values: Array) -> Array:
    low, high = max(1.0, float(values[values > 0].min())), float(values.max())
    knots = low * 2.0 ** (np.arange(int(np.ceil(GEOMETRIC * np.log2(high / low))) + 1) / GEOMETRIC)
    return np.unique(np.round(np.minimum(knots, high)))
