"""Decode attention in Triton over a pool whose old blocks are packed into a few bits: read as they lie, never unpacked
into memory.

A block is either whole, in a small pool of such, or packed by `kivi`: keys with a scale for each channel of the block,
values with one for each token. Codes of 4 bits take a quarter of the bytes of 16, which is what a decode waits for.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE_SEEN = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["first_row", "stride_table"])
def packed_decode(
    q_ptr,
    out_ptr,
    keys_ptr,
    values_ptr,
    key_codes_ptr,
    key_scale_ptr,
    key_low_ptr,
    value_codes_ptr,
    value_scale_ptr,
    value_low_ptr,
    tables_ptr,
    length_ptr,
    place_ptr,
    log2_scale,
    first_row,
    stride_q,
    stride_out,
    stride_place,
    stride_codes,
    stride_key_scale,
    stride_value_scale,
    stride_table,
    SHARE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One decode's context for the heads that share a KV head. Grid: (decodes, KV heads).

    Pointers of the pools are those of one layer; place [blocks]: where a block lies whole, -1 where it is packed.
    """
    decode = tl.program_id(0)
    kv_head = tl.program_id(1)
    length = tl.load(length_ptr + decode)
    if length > 0:
        member = tl.arange(0, G)
        head = kv_head * SHARE + member
        column = tl.arange(0, D)
        inner = column < HEAD_DIM
        mask = (member[:, None] < SHARE) & inner[None, :]
        row = (first_row + decode).to(tl.int64)
        q = tl.load(q_ptr + row * stride_q + head[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
        q = q.to(tl.float32)
        acc = tl.zeros([G, D], tl.float32)
        best = tl.full([G], NONE_SEEN, tl.float32)
        total = tl.zeros([G], tl.float32)
        token = tl.arange(0, N)
        PER: tl.constexpr = 8 // BITS
        first_block = 0
        if WINDOW > 0:
            first_block = tl.maximum(0, length - WINDOW) // BLOCK_SIZE
        for number in range(first_block, tl.cdiv(length, BLOCK_SIZE)):
            position = number * BLOCK_SIZE + token
            there = (token < BLOCK_SIZE) & (position < length)
            if WINDOW > 0:
                there = there & (position > length - 1 - WINDOW)
            wanted = there[:, None] & inner[None, :]
            block = tl.load(tables_ptr + decode.to(tl.int64) * stride_table + number).to(tl.int64)
            place = tl.load(place_ptr + block).to(tl.int64)
            # As vectors: the interpreter takes no mask that is made of a single number.
            packed = (token * 0 + place) < 0
            packed_channel = inner & ((column * 0 + place) < 0)
            # One of the two is read: a load whose mask is false moves nothing.
            at = place * stride_place + kv_head * (BLOCK_SIZE * HEAD_DIM) + token[:, None] * HEAD_DIM + column[None, :]
            whole = wanted & ((token * 0 + place) >= 0)[:, None]
            k = tl.load(keys_ptr + at, mask=whole, other=0.0).to(tl.float32)
            v = tl.load(values_ptr + at, mask=whole, other=0.0).to(tl.float32)
            coded = wanted & packed[:, None]
            byte = block * stride_codes + kv_head * (BLOCK_SIZE * HEAD_DIM // PER)
            byte += token[:, None] * (HEAD_DIM // PER) + column[None, :] // PER
            shift = (column % PER) * BITS
            key_code = (tl.load(key_codes_ptr + byte, mask=coded, other=0).to(tl.int32) >> shift[None, :]) & (
                (1 << BITS) - 1
            )
            value_code = (tl.load(value_codes_ptr + byte, mask=coded, other=0).to(tl.int32) >> shift[None, :]) & (
                (1 << BITS) - 1
            )
            of_channel = block * stride_key_scale + kv_head * HEAD_DIM + column
            key_scale = tl.load(key_scale_ptr + of_channel, mask=packed_channel, other=0.0).to(tl.float32)
            key_low = tl.load(key_low_ptr + of_channel, mask=packed_channel, other=0.0).to(tl.float32)
            of_token = block * stride_value_scale + kv_head * BLOCK_SIZE + token
            value_scale = tl.load(value_scale_ptr + of_token, mask=there & packed, other=0.0).to(tl.float32)
            value_low = tl.load(value_low_ptr + of_token, mask=there & packed, other=0.0).to(tl.float32)
            k += tl.where(coded, key_code.to(tl.float32) * key_scale[None, :] + key_low[None, :], 0.0)
            v += tl.where(coded, value_code.to(tl.float32) * value_scale[:, None] + value_low[:, None], 0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * log2_scale
            scores = tl.where(there[None, :], scores, NONE_SEEN)
            higher = tl.maximum(best, tl.max(scores, 1))
            weight = tl.where(there[None, :], tl.exp2(scores - higher[:, None]), 0.0)
            shrink = tl.exp2(best - higher)
            total = total * shrink + tl.sum(weight, 1)
            acc = acc * shrink[:, None] + tl.dot(weight, v, input_precision=PRECISION)
            best = higher
        result = acc / tl.maximum(total, 1.0e-30)[:, None]
        at_out = row * stride_out + head[:, None] * HEAD_DIM + column[None, :]
        tl.store(out_ptr + at_out, result.to(out_ptr.dtype.element_ty), mask=mask)
