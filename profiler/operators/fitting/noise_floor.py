"""How well any model could do: what measurements that ought to agree differ by.

Kernel tables keep one number of each shape, so repeats have to be found among the shapes. Some do equal work: GEMMs of
2 to 15 rows fill one tile, decodes of up to 127 tokens of context walk one step. Elsewhere a shape is held against the
line between its two neighbours along the axis that changes least (the depth of a GEMM, whose kernel it does not
change). Both over-state noise by whatever else differs, and under-state what an axis left out hides: they say where an
aim cannot be met, not that it could be met elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from profiler.operators.fitting.attention_fit import batch_columns
from profiler.operators.laws.gemm_law import SAME_TILE, GemmLaw, is_grid, misses
from profiler.operators.laws.row_curves import RowCurve
from profiler.operators.laws.smooth_batch_law import CONTEXT_STEP

if TYPE_CHECKING:
    import pandas as pd

    from profiler.operators.fitting.attention_family import AttentionFamily

Array = NDArray[np.float64]

USED_WIDTHS = (1024, 16384)
USED_ROWS = 8192
USED_HEAD, USED_GROUPS = 128, (1, 4, 8)
"""GEMMs and head layouts of language models; errors count these only."""
LEAST_REPEATS = 3
FURTHEST = 2.1
"""Neighbours further apart than this factor say nothing about what lies between."""


def gemm_floor(law: GemmLaw, curves: Sequence[RowCurve]) -> Array:
    """Relative noise of measured GEMMs of a grid of shapes, one value each; empty without such a grid.

    Rows of one tile against their median, others against the depths beside theirs.
    """
    low, high = USED_WIDTHS
    used = [curve for curve in curves if low <= curve.n <= high and low <= curve.k <= high]
    if not is_grid(curves):
        return np.zeros(0)
    found = [np.zeros(0)]
    by_place: dict[tuple[int, float], list[tuple[float, float]]] = {}
    for curve in used:
        miss = misses(law, curve)
        same = (curve.rows >= SAME_TILE[0]) & (curve.rows <= SAME_TILE[1])
        if same.sum() >= LEAST_REPEATS:
            found.append(_among_repeats(miss[same]))
        for rows, value in zip(curve.rows[~same], miss[~same], strict=True):
            if rows <= USED_ROWS:
                by_place.setdefault((curve.n, float(rows)), []).append((float(curve.k), float(value)))
    found += [_between_neighbours(*np.array(sorted(line)).T) for line in by_place.values()]
    return np.concatenate(found)


def attention_floors(rows: pd.DataFrame, families: Sequence[AttentionFamily]) -> dict[str, Array]:
    """The same of a kernel table's "decode" (contexts within one step) and "prefill" (prompts between their neighbours
    in tokens), in the layouts whose errors count."""
    batches = batch_columns(rows)
    batches["heads"], batches["kv_heads"] = rows["heads"].to_numpy(float), rows["kv_heads"].to_numpy(float)
    found: dict[str, list[Array]] = {"decode": [], "prefill": []}
    for family in families:
        mine = (batches["heads"] == batches["kv_heads"] * family.group) & (
            rows["head_dim"] == family.head_dim
        ).to_numpy()
        if family.head_dim != USED_HEAD or family.group not in USED_GROUPS:
            continue
        for (heads, kv_heads), group in batches[mine].groupby(["heads", "kv_heads"]):
            law = family.for_layout(int(heads), int(kv_heads)).by_law()
            decodes = group[(group["tokens"] == 0) & (group["context"] < CONTEXT_STEP)]
            miss = np.log(decodes["us"] / law.decode_us(decodes["decodes"], decodes["context"])).to_numpy(float)
            for _, places in decodes.groupby("decodes").indices.items():
                found["decode"].append(_among_repeats(miss[places]))
            prompts = group[(group["decodes"] == 0) & (group["chunks"] == 1)].sort_values("tokens")
            miss = np.log(prompts["us"] / law.prefill_us(prompts["tokens"], prompts["prefix"])).to_numpy(float)
            found["prefill"].append(_between_neighbours(prompts["tokens"].to_numpy(float), miss))
    return {kind: np.concatenate(parts) for kind, parts in found.items() if parts}


def summary(noise: Mapping[str, Array]) -> dict[str, float]:
    """Median and P95 of each operator's noise, as "gemm median" and "gemm p95"."""
    known = {kind: values for kind, values in noise.items() if len(values)}
    medians = {f"{kind} median": float(np.median(values)) for kind, values in known.items()}
    return {**medians, **{f"{kind} p95": float(np.quantile(values, 0.95)) for kind, values in known.items()}}


def _among_repeats(miss: Array) -> Array:
    """Each against the median of the others, whose own noise is taken off as if it were normal."""
    if len(miss) < LEAST_REPEATS:
        return np.zeros(0)
    others = np.array([np.median(np.delete(miss, index)) for index in range(len(miss))])
    return np.abs(np.expm1((miss - others) / np.sqrt(1.0 + np.pi / 2 / (len(miss) - 1))))


def _between_neighbours(at: Array, miss: Array) -> Array:
    """Each against the line between the two beside it, whose own noise is taken off."""
    if len(at) < LEAST_REPEATS:
        return np.zeros(0)
    place = np.log2(at)
    share = (place[1:-1] - place[:-2]) / (place[2:] - place[:-2])
    line = miss[:-2] * (1.0 - share) + miss[2:] * share
    noise = np.abs(np.expm1((miss[1:-1] - line) / np.sqrt(1.0 + share**2 + (1.0 - share) ** 2)))
    near = (at[1:-1] / at[:-2] < FURTHEST) & (at[2:] / at[1:-1] < FURTHEST)
    return np.asarray(noise[near])
