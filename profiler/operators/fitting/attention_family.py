"""Attention of any head layout from measurements of many: what a kernel deals out is heads, whoever owns them.

Decodes cost by their number of KV streams (sequences x KV heads) and the context of each; prompts by their number of
query heads (prompts x heads) and tokens, besides writing keys and values. Kernel tables of many layouts fall together
along these, so a family keeps two grids where a layout of its own would need one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from profiler.operators.fitting.attention_fit import KV_BYTES, AttentionFit, batch_columns, measured_grids
from profiler.operators.fitting.folds import folds
from profiler.operators.fitting.learnt_grids import TABLE, Misses, chosen, densified, learnt
from profiler.operators.laws.decode_law import SPLIT_BELOW, DecodeLaw, fit_decode_law
from profiler.operators.laws.lattice import Lattice
from profiler.operators.laws.measured_grid import MeasuredGrid
from profiler.operators.laws.prefill_law import PrefillLaw, fit_prefill_law
from profiler.operators.laws.smooth_batch_law import (
    CONTEXT_STEP,
    QUERY_ROWS,
    BatchLaw,
    chunk_blocks,
    fit_batch_law,
    joined_us,
)

if TYPE_CHECKING:
    import pandas as pd

    from profiler.specs.hardware import Hardware

Array = NDArray[np.float64]

FAR = 131072.0
FA3_ROWS = 128

UNEVEN_SHARE = 0.65
"""Of a block's step per token: what a token of the longest context costs beyond the mean in a decode-only batch of
FlashAttention 2, and beside a chunk (0.9). Measured on the RTX 4090 (0.67, 0.98) and the RTX PRO 6000 (0.62, 0.84)."""
UNEVEN_BESIDE = 0.9
_FADE = ((4.0, 1.0), (8.0, 0.77), (16.0, 0.3))
"""How the first fades with streams a processor, as measured on the same two."""


@dataclass(frozen=True)
class AttentionFamily:
    """Head layouts of one head size and one number of query heads a KV head (`group`) on one device; microseconds.

    batch_law, prefill_law: of one query head's blocks; their `write` is per 1000 tokens and KV head. decode_law: over
        streams.
    misses: log(measured / law), "decode" over (streams, context), "prefill" over (query heads, tokens), and for a
        number of KV heads that was measured itself "decode:N" over (decodes, context) and "prefill:N" over tokens, with
        knots between the measured ones where a learner knows better (`profiler.operators.fitting.learnt_grids`).
        Where one decode is another kernel, "single:N" over its context, and "single:0" of any number of KV heads.
    kernel: "fa2", whose decodes beside a chunk are blocks of the same kernel, or "fa3", whose decodes stream beside it.
    region: largest streams and context measured, largest tokens, query heads.
    grids: where a number of KV heads was measured, by the names of misses: "decode:N" over (decodes, context),
        "prefill:N" over (tokens, prefix).
    """

    head_dim: int
    group: int
    sms: int
    kernel: str
    batch_law: BatchLaw
    decode_law: DecodeLaw
    misses: Mapping[str, Lattice] = field(default_factory=dict)
    region: Mapping[str, int] = field(default_factory=dict)
    prefill_law: PrefillLaw | None = None
    grids: Mapping[str, MeasuredGrid] = field(default_factory=dict)

    def for_layout(self, heads: int, kv_heads: int) -> AttentionFit:
        """The fit of one layout, for `profiler.operators.attention_tables`."""
        decode = self.misses["decode"]
        decode = self.misses.get(f"decode:{kv_heads}") or Lattice(
            [decode.axes[0] / kv_heads, decode.axes[1]], decode.values
        )
        prefill = self.misses.get(f"prefill:{kv_heads}") or self.misses["prefill"]
        tokens = prefill.axes[1]
        alone = prefill(np.full(len(tokens), float(heads)), tokens)
        single = self.misses.get(f"single:{kv_heads}") or self.misses.get("single:0")
        misses = {
            **({"single": single} if single else {}),
            "decode": decode,
            "prefill": Lattice([tokens, [0.0, FAR]], np.stack([alone, alone], axis=1)),
        }
        law = replace(self.batch_law, write=self.batch_law.write * kv_heads)
        decode_law = self.decode_law.resized(kv_heads)
        fit = AttentionFit(
            heads, kv_heads, self.head_dim, self.sms, law, decode_law, misses, streams_beside=self.kernel != "fa2"
        )
        region = {
            "tokens": self.region["tokens"],
            "prefix": 0,
            "decodes": self.region["streams"] // kv_heads,
            "context": self.region["context"],
        }
        waves = self.prefill_law and replace(self.prefill_law, write=self.prefill_law.write * kv_heads)
        own = {kind: self.grids.get(f"{kind}:{kv_heads}") for kind in (DECODE, PREFILL)}
        grids = {kind: grid for kind, grid in own.items() if grid is not None}
        return replace(fit, region=region, prefill_law=waves, grids=grids, **self._uneven(kv_heads))

    def _uneven(self, kv_heads: int) -> dict[str, Any]:
        """FlashAttention 2's price of uneven contexts, carried over from where it was measured; none for others."""
        if self.kernel != "fa2":
            return {}
        token = self.batch_law.step / CONTEXT_STEP
        split = float(np.ceil(SPLIT_BELOW * 2 * self.sms / kv_heads))
        knots = [(max(1.0, split - 1), 0.0), (max(2.0, split), token * UNEVEN_SHARE)]
        for streams, share in _FADE:
            decodes = streams * self.sms / kv_heads
            if decodes > knots[-1][0]:
                knots.append((decodes, token * UNEVEN_SHARE * share))
        return {"uneven_decode": tuple(knots), "uneven_token_us": token * UNEVEN_BESIDE}


DECODE, PREFILL = "decode", "prefill"


def fit_families(
    table: pd.DataFrame,
    hardware: Hardware,
    kernel: str,
    *,
    beside: tuple[AttentionFamily, ...] = (),
    learning: bool = True,
) -> tuple[AttentionFamily, ...]:
    """Families of a kernel table: one a head size and group (query heads a KV head) that it has decodes and prompts of.

    beside: families of the same device, which give what `table` has no rows of (all decodes, or all prompts).
    learning: whether grids may be learnt; False: all are interpolated, which takes a fraction of the time.
    """
    batches = batch_columns(table)
    batches["heads"], batches["kv_heads"] = table["heads"].to_numpy(float), table["kv_heads"].to_numpy(float)
    batches["head_dim"] = table["head_dim"].to_numpy(int)
    batches["group"] = batches["heads"] / batches["kv_heads"]
    known = {(family.head_dim, family.group): family for family in beside}
    sms = hardware.sms
    query_rows = FA3_ROWS if kernel == "fa3" else QUERY_ROWS
    like: dict[tuple[int, str], DecodeLaw] = {}
    families: dict[tuple[int, int], AttentionFamily] = {}
    kept: dict[str, dict[tuple[int, int], tuple[pd.DataFrame, Array]]] = {DECODE: {}, PREFILL: {}}
    for (head_dim, group), rows in sorted(batches.groupby(["head_dim", "group"]), key=lambda one: -len(one[1])):
        if group != int(group):
            continue
        key = (int(head_dim), int(group))
        decodes, prompts = rows[rows["decodes"] > 0], rows[rows["tokens"] > 0]
        family = known.get(key) or AttentionFamily(*key, sms, kernel, BatchLaw(), DecodeLaw())
        if len(decodes):
            walked = "fa2 whole" if kernel == "fa2" and group == 1 else kernel
            cache = hardware.cache_bytes and hardware.cache_bytes / (1000.0 * KV_BYTES * key[0])
            law, misses, region, miss = _fit_decode(decodes, sms, walked, like.get((key[0], walked)), cache)
            like.setdefault((key[0], walked), law)
            family = _with(family, DECODE, misses, region, decode_law=law)
            kept[DECODE][key] = decodes, miss
        if len(prompts):
            batch, waves, misses, region, miss = _fit_prefill(prompts, sms, query_rows)
            family = _with(family, PREFILL, misses, region, batch_law=batch, prefill_law=waves)
            kept[PREFILL][key] = prompts, miss
        if {DECODE, PREFILL} <= set(family.misses):
            families[key] = family
    for kind, parts in kept.items():
        for head_dim in {key[0] for key in families}:
            mine = {key: part for key, part in parts.items() if key in families and key[0] == head_dim}
            for key, misses in _layouts(kind, mine, kernel, learning).items():
                families[key] = replace(families[key], misses={**families[key].misses, **misses})
    for key, rows in batches.groupby(["head_dim", "group"]):
        if key in families:
            grids = {**families[key].grids, **family_grids(rows)}
            families[key] = replace(families[key], grids=grids)
    return tuple(sorted(families.values(), key=lambda family: (family.head_dim, family.group)))


def family_grids(rows: pd.DataFrame) -> dict[str, MeasuredGrid]:
    """Where each number of KV heads of a family was measured; rows: `batch_columns` and `kv_heads`."""
    grids = {}
    for kv_heads, own in rows[rows["chunks"].isin((0, 1))].groupby("kv_heads"):
        grids |= {f"{kind}:{int(kv_heads)}": grid for kind, grid in measured_grids(own).items() if kind != "mixed"}
    return grids


def _with(
    family: AttentionFamily, kind: str, misses: Mapping[str, Lattice], region: Mapping[str, int], **laws: Any
) -> AttentionFamily:
    """The family with everything that it knows of decodes, or of prompts, put in the place of what it knew."""
    mine = (DECODE, "single") if kind == DECODE else (PREFILL,)
    others = {name: grid for name, grid in family.misses.items() if name.partition(":")[0] not in mine}
    return replace(family, misses={**others, **misses}, region={**family.region, **region}, **laws)


LEARNT_GROUPS = 8
"""Query heads a KV head up to which grids are learnt; beyond are layouts of no language model served here."""


def _layouts(
    kind: str, parts: Mapping[tuple[int, int], tuple[pd.DataFrame, Array]], kernel: str, learning: bool
) -> dict[tuple[int, int], dict[str, Lattice]]:
    """A grid of every measured number of KV heads of every group; a denser one if a learner of all beats the grids."""
    layouts: dict[int, tuple[tuple[int, int], int]] = {}
    each: list[Misses] = []
    for key, (rows, miss) in parts.items():
        if key[1] > LEARNT_GROUPS:
            continue
        several = (rows["decodes"] > 1) | (kernel != "fa2") if kind == DECODE else rows["chunks"] == 1
        for kv_heads in np.unique(rows["kv_heads"][several]):
            own = (several & (rows["kv_heads"] == kv_heads)).to_numpy()
            number = len(layouts)
            layouts[number] = key, int(kv_heads)
            axes = ("decodes", "context") if kind == DECODE else ("tokens",)
            places = rows.loc[own, list(axes)].to_numpy(float)
            each.append(Misses(np.full(own.sum(), number), places, _hints(kind, *layouts[number])(places), miss[own]))
    if not each:
        return {}
    everything = Misses(
        *(np.concatenate([getattr(one, name) for one in each]) for name in ("layout", "coordinates", "hints", "miss"))
    )
    method = chosen(everything, lambda values: list(folds(values))) if learning else TABLE
    predict = learnt(everything, method)
    found: dict[tuple[int, int], dict[str, Lattice]] = {}
    for number, (key, kv_heads) in layouts.items():
        rows_of = each[number]
        grid = (
            Lattice.from_points(list(rows_of.coordinates.T), rows_of.miss)
            if predict is None
            else densified(rows_of, predict, _hints(kind, key, kv_heads))
        )
        if kind == PREFILL:
            grid = Lattice([[float(key[1] * kv_heads)], *grid.axes], grid.values[None])
        found.setdefault(key, {})[f"{kind}:{kv_heads}"] = grid
    return found


def _hints(kind: str, key: tuple[int, int], kv_heads: int) -> Callable[[Array], Array]:
    """What a learner sees of a layout beside the coordinates: heads, and how much is dealt out."""
    heads = key[1] * kv_heads

    def of(places: Array) -> Array:
        dealt = places[:, 0] * kv_heads if kind == DECODE else heads * np.maximum(np.ceil(places[:, 0] / 128), 1)
        layout = np.broadcast_to(np.log2([heads, kv_heads]), (len(places), 2))
        return np.column_stack([layout, np.log2(dealt)])

    return of


def nearest_family(families: tuple[AttentionFamily, ...], heads: int, kv_heads: int, head_dim: int) -> Any:
    """The family of this head size whose group is nearest, or None."""
    same = [family for family in families if family.head_dim == head_dim]
    group = heads / kv_heads
    return min(same, key=lambda family: abs(np.log2(family.group / group)), default=None)


def prompts_us(
    law: BatchLaw, sms: int, heads: Array, kv_heads: Array, tokens: Array, prefix: Array, prompts: Array
) -> Array:
    """`prompts` equal chunks and nothing else, one layer; `law.write` per KV head as in AttentionFamily."""
    blocks, steps = chunk_blocks(tokens, prefix, law.query_rows)
    shared = heads * prompts / sms * (law.block * blocks + law.step * steps)
    alone = law.block + law.step * np.ceil((prefix + tokens) / CONTEXT_STEP)
    joined = joined_us(law, shared, alone, heads * prompts * blocks / sms)
    return np.asarray(law.launch + joined + law.write * kv_heads * prompts * tokens / 1000.0)


def _fit_prefill(
    rows: pd.DataFrame, sms: int, query_rows: int
) -> tuple[BatchLaw, PrefillLaw | None, dict[str, Lattice], dict[str, int], Array]:
    columns = [rows[key].to_numpy(float) for key in ("heads", "kv_heads", "tokens", "prefix", "chunks")]
    us = rows["us"].to_numpy(float)
    law = fit_batch_law(lambda law: prompts_us(law, sms, *columns), us, query_rows)
    miss = np.log(us / prompts_us(law, sms, *columns))
    query_heads = columns[0] * columns[4]
    waves = None
    if law.waves:
        dealt = (query_heads, columns[2], columns[3], columns[2] * columns[4] * columns[1])
        waves = fit_prefill_law(*dealt, us, sms, many_layouts=True)
        miss = miss if waves is None else np.log(us / waves.us(*dealt))
    axes = [2.0 ** np.arange(0, np.ceil(np.log2(query_heads.max())) + 0.5, 0.5), np.unique(columns[2])]
    grid = Lattice.from_scatter(axes, [query_heads, columns[2]], miss)
    return law, waves, {PREFILL: grid}, {"tokens": int(columns[2].max()), "query_heads": int(query_heads.max())}, miss


def _fit_decode(
    rows: pd.DataFrame, sms: int, kernel: str, like: DecodeLaw | None, cache: float | None
) -> tuple[DecodeLaw, dict[str, Lattice], dict[str, int], Array]:
    decodes, kv_heads, context, us = (rows[key].to_numpy(float) for key in ("decodes", "kv_heads", "context", "us"))
    streams = decodes * kv_heads
    many = (decodes > 1) | (kernel != "fa2")
    law = fit_decode_law(
        decodes[many], context[many], us[many], sms=sms, heads=kv_heads[many], kernel=kernel, like=like, cache=cache
    )
    miss = np.log(us / law.us(decodes, context, heads=kv_heads))
    misses = {"decode": Lattice.from_points([streams[many], context[many]], miss[many])}
    for heads in np.unique(kv_heads):
        own, one = (kv_heads == heads) & many, (kv_heads == heads) & ~many
        misses[f"decode:{int(heads)}"] = Lattice.from_points([decodes[own], context[own]], miss[own])
        if one.any():
            misses[f"single:{int(heads)}"] = Lattice.from_points([context[one]], miss[one])
    if not many.all():
        misses["single:0"] = Lattice.from_points([context[~many]], miss[~many])
    return law, misses, {"streams": int(streams.max()), "context": int(context.max())}, miss
