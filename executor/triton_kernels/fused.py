"""The small steps between matrix products, each in one pass over memory: norm (with residual), rotation with the
store of keys and values, SiLU times up.

Every sum is taken in float32. A row with a negative slot is rotated but stored nowhere.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_rows(
    x_ptr,
    added_ptr,
    weight_ptr,
    out_ptr,
    stride_x,
    stride_added,
    stride_out,
    eps,
    COLUMNS: tl.constexpr,
    C: tl.constexpr,
    ADD: tl.constexpr,
):
    """out = rms_norm(x) * weight; with ADD x += added comes first, x is written back. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, C)
    mask = column < COLUMNS
    x = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x = x + tl.load(added_ptr + row * stride_added + column, mask=mask, other=0.0).to(tl.float32)
        # The norm sees what the next layer will read: the sum as it is stored.
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        tl.store(x_ptr + row * stride_x + column, x.to(x_ptr.dtype.element_ty), mask=mask)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / COLUMNS + eps)
    normed = (x * scale).to(x_ptr.dtype.element_ty).to(tl.float32) * weight
    tl.store(out_ptr + row * stride_out + column, normed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_rows(gate_up_ptr, out_ptr, stride_in, stride_out, COLUMNS: tl.constexpr, C: tl.constexpr):
    """out = silu(gate) * up, with gate and up side by side in a row. Grid: (rows, parts of C columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * C + tl.arange(0, C)
    mask = column < COLUMNS
    gate = tl.load(gate_up_ptr + row * stride_in + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride_in + COLUMNS + column, mask=mask, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out_ptr + row * stride_out + column, (active * up).to(kind), mask=mask)


@triton.jit
def rotate_and_store_rows(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    keys_ptr,
    values_ptr,
    stride_row,
    stride_block,
    stride_head,
    stride_slot,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
):
    """One head of one row: norm (Qwen3) and rotate a query in place, or a key on its way to the pool, or copy a value.

    Grid: (rows, HEADS + 2 KV_HEADS). The pairs are (i, i + HALF) over the rotated part of a head; a rotated key is
    also written back, as the plain kernels do.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, D)
    mask = column < HEAD_DIM
    base = qkv_ptr + row * stride_row + head * HEAD_DIM
    kind = qkv_ptr.dtype.element_ty
    x = tl.load(base + column, mask=mask, other=0.0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    is_value = head >= HEADS + KV_HEADS
    if head < HEADS + KV_HEADS:
        # The partner of a rotated column: the other half of its pair.
        first = column < HALF
        rotated = column < 2 * HALF
        partner = tl.where(first, column + HALF, column - HALF)
        y = tl.load(base + partner, mask=mask & rotated, other=0.0)
        wide = x.to(tl.float32)
        other = y.to(tl.float32)
        if NORMED:
            weight_ptr = tl.where(head < HEADS, q_norm_ptr, k_norm_ptr)
            scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / HEAD_DIM + eps)
            weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
            weight_other = tl.load(weight_ptr + partner, mask=mask & rotated, other=0.0).to(tl.float32)
            wide = ((wide * scale).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
            other = ((other * scale).to(kind).to(tl.float32) * weight_other).to(kind).to(tl.float32)
        position = tl.load(positions_ptr + row).to(tl.int64)
        at = position * HALF + tl.where(first, column, column - HALF)
        cos = tl.load(cos_ptr + at, mask=mask & rotated, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + at, mask=mask & rotated, other=0.0).to(tl.float32)
        x = tl.where(rotated, wide * cos + tl.where(first, -other, other) * sin, wide).to(kind)
        tl.debug_barrier()  # partners are read by other threads of this program before anybody writes
        tl.store(base + column, x, mask=mask)
    if (head >= HEADS) & (slot >= 0):
        kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
        target = tl.where(is_value, values_ptr, keys_ptr)
        place = (slot // BLOCK_SIZE) * stride_block + kv_head * stride_head + (slot % BLOCK_SIZE) * stride_slot
        tl.store(target + place + column, x.to(keys_ptr.dtype.element_ty), mask=mask)
