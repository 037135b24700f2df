"""Paged attention in Triton: prefill chunks with prefix over block tables, and split decodes with their merge.

Both keep running maxima and sums (the online softmax of FlashAttention), read keys and values straight from the pool
through the block table, and never touch a slot beyond a request's context, whatever lies there. Work comes as device
arrays: a program without work leaves at once, so that a launch may be larger than its batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NONE_SEEN = tl.constexpr(-1.0e30)


@triton.jit
def _attend_keys(
    q,
    acc,
    best,
    total,
    from_key,
    to_key,
    row_position,
    end,
    keys,
    values,
    table,
    stride_block,
    stride_slot,
    log2_scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One pass over keys [from_key, to_key) in steps of N; rows see keys up to row_position, none at or beyond end."""
    column = tl.arange(0, D)
    inner = column < HEAD_DIM
    for start in range(from_key, to_key, N):
        key = start + tl.arange(0, N)
        there = key < end
        block = tl.load(table + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        at = block * stride_block + (key % BLOCK_SIZE) * stride_slot
        mask = there[:, None] & inner[None, :]
        k = tl.load(keys + at[:, None] + column[None, :], mask=mask, other=0.0)
        v = tl.load(values + at[:, None] + column[None, :], mask=mask, other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        else:
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * log2_scale
        if MASKED:
            seen = (key[None, :] <= row_position[:, None]) & there[None, :]
            if WINDOW > 0:
                seen = seen & (key[None, :] > row_position[:, None] - WINDOW)
            scores = tl.where(seen, scores, NONE_SEEN)
        higher = tl.maximum(best, tl.max(scores, 1))
        weight = tl.exp2(scores - higher[:, None])
        if MASKED:
            weight = tl.where(seen, weight, 0.0)
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        best = higher
    return acc, best, total


# Numbers that differ from batch to batch are not compiled for: Triton would make variants of their divisibility by 16.
@triton.jit(do_not_specialize=["stride_table"])
def chunk_attention(
    q_ptr,
    out_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    tile_row_ptr,
    tile_count_ptr,
    tile_position_ptr,
    tile_chunk_ptr,
    log2_scale,
    stride_q,
    stride_out,
    stride_block,
    stride_head,
    stride_slot,
    stride_table,
    SHARE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """M rows of one query tile of one head, at consecutive positions of one request. Grid: (heads, tiles, rows of a
    tile / M): where shared memory is short, several programs share a tile."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    skipped = tl.program_id(2) * M
    count = tl.minimum(tl.load(tile_count_ptr + tile) - skipped, M)
    if count > 0:
        first_row = (tl.load(tile_row_ptr + tile) + skipped).to(tl.int64)
        position = tl.load(tile_position_ptr + tile) + skipped
        table = tables_ptr + tl.load(tile_chunk_ptr + tile).to(tl.int64) * stride_table
        of_head = (head // SHARE).to(tl.int64) * stride_head
        keys = keys_ptr + of_head
        values = values_ptr + of_head
        row = tl.arange(0, M)
        column = tl.arange(0, D)
        mask = (row[:, None] < count) & (column[None, :] < HEAD_DIM)
        q_at = (first_row + row[:, None]) * stride_q + head * HEAD_DIM + column[None, :]
        q = tl.load(q_ptr + q_at, mask=mask, other=0.0)
        if WIDEN:
            q = q.to(tl.float32)
        acc = tl.zeros([M, D], tl.float32)
        best = tl.full([M], NONE_SEEN, tl.float32)
        total = tl.zeros([M], tl.float32)
        row_position = position + row
        end = position + count
        from_key = 0
        seen_by_all = 0
        if WINDOW > 0:
            from_key = tl.maximum(0, position - WINDOW + 1) // N * N
            seen_by_all = from_key
        else:
            # Keys that every row of the tile sees need no mask.
            seen_by_all = (position + 1) // N * N
            acc, best, total = _attend_keys(
                q,
                acc,
                best,
                total,
                from_key,
                seen_by_all,
                row_position,
                end,
                keys,
                values,
                table,
                stride_block,
                stride_slot,
                log2_scale,
                BLOCK_SIZE,
                HEAD_DIM,
                D,
                N,
                WINDOW,
                False,
                WIDEN,
                PRECISION,
            )
        acc, best, total = _attend_keys(
            q,
            acc,
            best,
            total,
            seen_by_all,
            end,
            row_position,
            end,
            keys,
            values,
            table,
            stride_block,
            stride_slot,
            log2_scale,
            BLOCK_SIZE,
            HEAD_DIM,
            D,
            N,
            WINDOW,
            True,
            WIDEN,
            PRECISION,
        )
        out_at = (first_row + row[:, None]) * stride_out + head * HEAD_DIM + column[None, :]
        result = acc / tl.maximum(total, 1.0e-30)[:, None]
        tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_row", "stride_table"])
def decode_attention(
    q_ptr,
    out_ptr,
    part_ptr,
    weight_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    length_ptr,
    log2_scale,
    first_row,
    stride_q,
    stride_out,
    stride_block,
    stride_head,
    stride_slot,
    stride_table,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One part of one decode's context, for the heads that share a KV head. Grid: (decodes, KV heads, SPLITS).

    With one split the result goes to out; otherwise part [decodes, HEADS, SPLITS, HEAD_DIM] (float32, normalised) and
    weight [decodes, HEADS, SPLITS] (log2 of its share) wait for `merge_splits`.
    """
    decode = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(length_ptr + decode)
    if length > 0:
        member = tl.arange(0, G)
        head = kv_head * SHARE + member
        column = tl.arange(0, D)
        mask = (member[:, None] < SHARE) & (column[None, :] < HEAD_DIM)
        row = (first_row + decode).to(tl.int64)
        q = tl.load(q_ptr + row * stride_q + head[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
        if WIDEN:
            q = q.to(tl.float32)
        first_key = 0
        if WINDOW > 0:
            first_key = tl.maximum(0, length - WINDOW) // N * N
        span = tl.cdiv(tl.cdiv(length - first_key, N), SPLITS) * N
        from_key = first_key + split * span
        to_key = tl.minimum(length, from_key + span)
        acc = tl.zeros([G, D], tl.float32)
        best = tl.full([G], NONE_SEEN, tl.float32)
        total = tl.zeros([G], tl.float32)
        table = tables_ptr + decode.to(tl.int64) * stride_table
        of_head = kv_head.to(tl.int64) * stride_head
        acc, best, total = _attend_keys(
            q,
            acc,
            best,
            total,
            from_key,
            to_key,
            tl.zeros([G], tl.int32) + (length - 1),
            to_key,
            keys_ptr + of_head,
            values_ptr + of_head,
            table,
            stride_block,
            stride_slot,
            log2_scale,
            BLOCK_SIZE,
            HEAD_DIM,
            D,
            N,
            WINDOW,
            True,
            WIDEN,
            PRECISION,
        )
        result = acc / tl.maximum(total, 1.0e-30)[:, None]
        if SPLITS == 1:
            at = row * stride_out + head[:, None] * HEAD_DIM + column[None, :]
            tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            place = (decode.to(tl.int64) * HEADS + head) * SPLITS + split
            tl.store(part_ptr + place[:, None] * HEAD_DIM + column[None, :], result, mask=mask)
            share = tl.where(total > 0.0, best + tl.log2(tl.maximum(total, 1.0e-30)), NONE_SEEN)
            tl.store(weight_ptr + place, share, mask=member < SHARE)


@triton.jit(do_not_specialize=["first_row"])
def merge_splits(
    part_ptr,
    weight_ptr,
    out_ptr,
    length_ptr,
    first_row,
    stride_out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    S: tl.constexpr,
):
    """Join the parts of one head of one decode. Grid: (decodes, HEADS)."""
    decode = tl.program_id(0)
    head = tl.program_id(1)
    if tl.load(length_ptr + decode) > 0:
        split = tl.arange(0, S)
        column = tl.arange(0, D)
        inner = column < HEAD_DIM
        place = (decode.to(tl.int64) * HEADS + head) * SPLITS + split
        share = tl.load(weight_ptr + place, mask=split < SPLITS, other=NONE_SEEN)
        # A split without keys has written nothing but zeros, and weighs nothing.
        weight = tl.where(share > NONE_SEEN, tl.exp2(share - tl.max(share, 0)), 0.0)
        mask = (split[:, None] < SPLITS) & inner[None, :]
        part = tl.load(part_ptr + place[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
        result = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
        at = (first_row + decode).to(tl.int64) * stride_out + head * HEAD_DIM + column
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inner)
