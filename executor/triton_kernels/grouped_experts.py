"""Mixture of experts in Triton: routing, a sort of rows by expert, two grouped products, and their weighted sum.

Nothing is read back and no launch depends on where rows went: the products are launched for as many tiles as the worst
routing of so many rows could need, and a program without rows leaves at once. Rows of one expert are sorted in no fixed
order; a row's result does not depend on its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor.triton_kernels.runtime import Processor, interpreted, processor_of


@triton.jit(do_not_specialize=["rows"])
def route_rows(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    counts_ptr,
    rows,
    stride_logits,
    EXPERTS: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORM: tl.constexpr,
):
    """Top k of a softmax over one row's logits, and how many rows each expert gets. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E)
    there = expert < EXPERTS
    logits = tl.load(logits_ptr + row * stride_logits + expert, mask=there, other=float("-inf")).to(tl.float32)
    share = tl.exp(logits - tl.max(logits, 0))
    share = share / tl.sum(share, 0)
    left = tl.where(there, logits, float("-inf"))
    # A NaN is no largest value: whoever has one still goes to experts that exist, with weights that are NaN.
    left = tl.where(left == left, left, -3.0e38)
    total = 0.0
    for place in tl.static_range(TOP_K):
        chosen = tl.argmax(left, 0)
        weight = tl.sum(tl.where(expert == chosen, share, 0.0), 0)
        total += weight
        tl.store(ids_ptr + row * TOP_K + place, chosen)
        tl.store(weights_ptr + row * TOP_K + place, weight)
        tl.atomic_add(counts_ptr + chosen, 1)
        left = tl.where(expert == chosen, float("-inf"), left)
    if NORM:
        for place in tl.static_range(TOP_K):
            weight = tl.load(weights_ptr + row * TOP_K + place)
            tl.store(weights_ptr + row * TOP_K + place, weight / total)


@triton.jit(do_not_specialize=["tiles"])
def lay_out_tiles(
    counts_ptr, first_ptr, tile_expert_ptr, tile_place_ptr, tiles,
    EXPERTS: tl.constexpr, E: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Where each expert's rows begin (`first`), and of each tile of M rows its expert (-1: none) and place among the
    expert's rows. Grid: (tiles / T,); the first program writes `first` for all."""
    expert = tl.arange(0, E)
    counts = tl.load(counts_ptr + expert, mask=expert < EXPERTS, other=0)
    ends = tl.cumsum(counts, 0)
    if tl.program_id(0) == 0:
        tl.store(first_ptr + expert, ends - counts, mask=expert < EXPERTS)
    own = (counts + M - 1) // M
    tile_ends = tl.cumsum(own, 0)
    tile = tl.program_id(0) * T + tl.arange(0, T)
    before = tile_ends[None, :] <= tile[:, None]
    found = tl.sum(before.to(tl.int32), 1)
    skipped = tl.max(tl.where(before, tile_ends[None, :], 0), 1)
    mask = tile < tiles
    tl.store(tile_expert_ptr + tile, tl.where(found < EXPERTS, found, -1), mask=mask)
    tl.store(tile_place_ptr + tile, (tile - skipped) * M, mask=mask)


@triton.jit(do_not_specialize=["slots"])
def place_rows(ids_ptr, first_ptr, cursor_ptr, sorted_ptr, slots, B: tl.constexpr):
    """Slots (a row's first expert, its second, ...) sorted by expert. Grid: (slots / B,)."""
    slot = tl.program_id(0) * B + tl.arange(0, B)
    mask = slot < slots
    expert = tl.load(ids_ptr + slot, mask=mask, other=0)
    place = tl.atomic_add(cursor_ptr + expert, 1, mask=mask)
    first = tl.load(first_ptr + expert, mask=mask, other=0)
    tl.store(sorted_ptr + first + place, slot, mask=mask)


@triton.jit
def gated_products(
    x_ptr, weights_ptr, active_ptr, sorted_ptr, counts_ptr, first_ptr, tile_expert_ptr, tile_place_ptr,
    stride_x,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """active = silu(x gate^T) * (x up^T) for M sorted rows of one expert and N of its columns. weights: [experts,
    2 WIDTH, HIDDEN], gate above up; active: [slots, WIDTH], sorted. Grid: (tiles, WIDTH / N)."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= 0:
        place = tl.load(tile_place_ptr + tile) + tl.arange(0, M)
        there = place < tl.load(counts_ptr + expert)
        at = (tl.load(first_ptr + expert) + place).to(tl.int64)
        row = (tl.load(sorted_ptr + at, mask=there, other=0) // TOP_K).to(tl.int64)
        column = tl.program_id(1) * N + tl.arange(0, N)
        inside = column < WIDTH
        of_expert = weights_ptr + expert.to(tl.int64) * (2 * WIDTH * HIDDEN)
        gate_rows = of_expert + column.to(tl.int64)[None, :] * HIDDEN
        gate = tl.zeros((M, N), tl.float32)
        up = tl.zeros((M, N), tl.float32)
        for start in range(0, HIDDEN, K):
            inner = start + tl.arange(0, K)
            known = inner < HIDDEN
            mask = known[:, None] & inside[None, :]
            x = tl.load(
                x_ptr + row[:, None] * stride_x + inner[None, :], mask=there[:, None] & known[None, :], other=0.0
            )
            g = tl.load(gate_rows + inner[:, None], mask=mask, other=0.0)
            u = tl.load(gate_rows + WIDTH * HIDDEN + inner[:, None], mask=mask, other=0.0)
            if WIDEN:
                x = x.to(tl.float32)
                g = g.to(tl.float32)
                u = u.to(tl.float32)
            gate = gate + tl.dot(x, g, input_precision=PRECISION)
            up = up + tl.dot(x, u, input_precision=PRECISION)
        active = gate / (1.0 + tl.exp(-gate)) * up
        out = active_ptr + at[:, None] * WIDTH + column[None, :]
        tl.store(out, active.to(active_ptr.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def down_products(
    active_ptr, weights_ptr, share_ptr, product_ptr, sorted_ptr, counts_ptr, first_ptr, tile_expert_ptr, tile_place_ptr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """product = share * (active down^T) for M sorted rows of one expert and N of the hidden columns, back in the order
    of slots. weights: [experts, HIDDEN, WIDTH]. Grid: (tiles, HIDDEN / N)."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= 0:
        place = tl.load(tile_place_ptr + tile) + tl.arange(0, M)
        there = place < tl.load(counts_ptr + expert)
        at = (tl.load(first_ptr + expert) + place).to(tl.int64)
        slot = tl.load(sorted_ptr + at, mask=there, other=0).to(tl.int64)
        column = tl.program_id(1) * N + tl.arange(0, N)
        inside = column < HIDDEN
        rows = weights_ptr + expert.to(tl.int64) * (HIDDEN * WIDTH) + column.to(tl.int64)[None, :] * WIDTH
        acc = tl.zeros((M, N), tl.float32)
        for start in range(0, WIDTH, K):
            inner = start + tl.arange(0, K)
            known = inner < WIDTH
            x = tl.load(
                active_ptr + at[:, None] * WIDTH + inner[None, :], mask=there[:, None] & known[None, :], other=0.0
            )
            w = tl.load(rows + inner[:, None], mask=known[:, None] & inside[None, :], other=0.0)
            if WIDEN:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            acc = acc + tl.dot(x, w, input_precision=PRECISION)
        acc = acc * tl.load(share_ptr + slot, mask=there, other=0.0)[:, None]
        out = product_ptr + slot[:, None] * HIDDEN + column[None, :]
        tl.store(out, acc.to(product_ptr.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def sum_products(product_ptr, out_ptr, stride_out, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, C: tl.constexpr):
    """out += the products of a row's experts, in their order. Grid: (rows, HIDDEN / C)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * C + tl.arange(0, C)
    mask = column < HIDDEN
    total = tl.zeros((C,), tl.float32)
    for place in tl.static_range(TOP_K):
        total += tl.load(product_ptr + (row * TOP_K + place) * HIDDEN + column, mask=mask, other=0.0).to(tl.float32)
    at = out_ptr + row * stride_out + column
    total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


TILE_SIZES = (16, 32, 64, 128)
"""Rows of a tile: each is compiled for."""


class ExpertTile(NamedTuple):
    """Rows, columns and depth of one program's step in the grouped products, and how it is launched."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_of_experts(rows_an_expert: float, item_bytes: int, processor: Processor) -> ExpertTile:
    """The tile for so many rows that a touched expert has in the mean: its weights are read once for each tile of rows.

    Operands in flight (rows and two matrices of `columns`) stay within shared memory.
    """
    rows = next((size for size in TILE_SIZES if size >= rows_an_expert), TILE_SIZES[-1])
    columns, depth, stages = 64, 64 if item_bytes == 2 else 32, 4
    while stages > 2 and _in_flight_bytes(rows, columns, depth, stages, item_bytes) > processor.shared_bytes - 2048:
        stages -= 1
    return ExpertTile(rows, columns, depth, 8 if rows >= 128 else 4, stages)


def _in_flight_bytes(rows: int, columns: int, depth: int, stages: int, item_bytes: int) -> int:
    return stages * depth * (rows + 2 * columns) * item_bytes


def add_experts(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    norm_topk: bool,
    counts: Tensor,
    out: Tensor,
    buffer: Callable[[str, int, int], Tensor],
) -> None:
    """out += each row's top_k experts, x and out [rows, hidden], logits [rows, experts]; weights as `ExpertWeights`.

    counts: int32 [experts], overwritten. buffer(name, rows, columns): reused memory in the dtype of x.
    """
    rows, hidden = x.shape
    experts, _, width = down.shape
    counts.zero_()
    if not rows:
        return
    slots, e = rows * top_k, _power(experts)
    tile = tile_of_experts(slots / min(experts, slots), x.element_size(), processor_of(x.device))
    tiles = min(slots, experts + slots // tile.rows)
    ints = torch.empty(3 * slots + 2 * experts + 2 * tiles, dtype=torch.int32, device=x.device)
    ids, ordered, share, first, cursor, tile_expert, tile_place = ints.split(
        [slots, slots, slots, experts, experts, tiles, tiles]
    )
    share = share.view(torch.float32)
    cursor.zero_()
    route_rows[(rows,)](
        logits, ids, share, counts, rows, logits.stride(0),
        EXPERTS=experts, E=e, TOP_K=top_k, NORM=norm_topk, num_warps=1,
    )  # fmt: skip
    laid = (counts, first, tile_expert, tile_place)
    lay_out_tiles[(-(-tiles // 32),)](*laid, tiles, EXPERTS=experts, E=e, M=tile.rows, T=32, num_warps=4)
    place_rows[(-(-slots // 128),)](ids, first, cursor, ordered, slots, B=128, num_warps=4)
    shape = {
        "HIDDEN": hidden,
        "WIDTH": width,
        "M": tile.rows,
        "N": tile.columns,
        "K": tile.depth,
        # The interpreter multiplies bfloat16 matrices wrongly without a word: it gets float32.
        "WIDEN": interpreted(),
        "PRECISION": "ieee" if x.dtype == torch.float32 or interpreted() else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    active, products = buffer("expert_active", slots, width), buffer("expert_products", slots, hidden)
    gated_products[tiles, -(-width // tile.columns)](
        x, gate_up, active, ordered, *laid, x.stride(0), TOP_K=top_k, **shape
    )
    down_products[tiles, -(-hidden // tile.columns)](active, down, share, products, ordered, *laid, **shape)
    part = min(1024, _power(hidden))
    sum_products[rows, -(-hidden // part)](
        products, out, out.stride(0), HIDDEN=hidden, TOP_K=top_k, C=part, num_warps=4
    )


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
