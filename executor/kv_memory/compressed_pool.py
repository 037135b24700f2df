"""Keys and values of old tokens in a few bits: packing, unpacking, and a pool that attention reads.

Two codings of a group of neighbouring tokens. `kivi` quantises keys per channel over the group's tokens and values per
token over its channels, as KIVI (ICML 2024) found that their outliers lie. `delta` stores a group's first token in full
and every further one as its difference from the token before, quantised per token against what the reader will have
reconstructed, so that errors do not add up (CacheGen, SIGCOMM 2024, codes deltas against an anchor token likewise).
The most recent tokens stay in full precision until whole blocks of them are old enough.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from executor.batches.batch_arrays import Ints
from executor.errors import ExecutorError
from executor.kv_memory.pool import KVCache
from profiler.specs.kv_compression import CODINGS, Compression

Coding = Literal["kivi", "delta"]


@dataclass
class Packed:
    """A group of n tokens, [..., n, d], packed. codes: uint8; scale, low: float16 (or the group's first token)."""

    codes: Tensor
    scale: Tensor
    low: Tensor
    first: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        parts = [self.codes, self.scale, self.low] + ([] if self.first is None else [self.first])
        return sum(part.numel() * part.element_size() for part in parts)


def quantise(values: Tensor, bits: int, over: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0..2^bits - 1, scale and low of `values`, each row along dimension `over` with a scale of its own.

    Scale and low are float16, and codes are chosen against what float16 keeps of them.
    """
    top = (1 << bits) - 1
    low = values.amin(dim=over, keepdim=True).to(torch.float16)
    span = values.amax(dim=over, keepdim=True) - low.to(values.dtype)
    scale = (span / top).clamp(min=1e-6).to(torch.float16)
    codes = ((values - low.to(values.dtype)) / scale.to(values.dtype)).round_().clamp_(0, top)
    return codes.to(torch.uint8), scale, low


def dequantise(codes: Tensor, scale: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype) * scale.to(dtype) + low.to(dtype)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes of `bits` bits, 8 / bits of them in a byte, along the last dimension."""
    per_byte = 8 // bits
    grouped = codes.unflatten(-1, (-1, per_byte))
    packed = grouped[..., 0].clone()
    for at in range(1, per_byte):
        packed |= grouped[..., at] << (bits * at)
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    mask = (1 << bits) - 1
    parts = [(packed >> (bits * at)) & mask for at in range(8 // bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def pack(values: Tensor, bits: int, coding: Coding, *, keys: bool) -> Packed:
    """Pack [..., tokens, channels]; keys and values have their outliers in different directions (kivi)."""
    if coding == "kivi":
        codes, scale, low = quantise(values, bits, over=-2 if keys else -1)
        return Packed(pack_codes(codes, bits), scale, low)
    tokens = values.shape[-2]
    first = values[..., :1, :].to(torch.float16)
    before = first.to(values.dtype)[..., 0, :]
    coded = []
    for at in range(1, tokens):
        codes, scale, low = quantise(values[..., at, :] - before, bits, over=-1)
        before = before + dequantise(codes, scale, low, values.dtype)
        coded.append((codes, scale, low))
    codes, scale, low = (torch.stack(parts, dim=-2) for parts in zip(*coded))
    return Packed(pack_codes(codes, bits), scale, low, first)


def unpack(packed: Packed, bits: int, dtype: torch.dtype) -> Tensor:
    """What `pack` was given, up to its rounding: [..., tokens, channels]."""
    values = dequantise(unpack_codes(packed.codes, bits), packed.scale, packed.low, dtype)
    if packed.first is None:
        return values
    return torch.cat((packed.first.to(dtype), values), dim=-2).cumsum(dim=-2)


class CompressedKVCache(KVCache):
    """A pool whose old blocks are packed, one group a block; a small pool holds the blocks in full precision.

    Block numbers are the ledger's, so nothing else has to know. `full_blocks`: blocks in full precision at once: the
    windows of the running requests and the tokens of one batch. A block is packed by `seal` once all of its tokens are
    older than the window, and gets room in full precision again when somebody writes into it. Which block is where is
    kept on the host; values stay on their device. Only whoever executes batches may change anything, in their order.
    """

    def __init__(
        self,
        spec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        compression: Compression,
        full_blocks: int,
    ) -> None:
        if compression.coding not in CODINGS:
            raise ExecutorError(f"compression: found {compression.coding!r}, expected one of {', '.join(CODINGS)}")
        if compression.bits not in (2, 4, 8) or spec.head_dim % (8 // compression.bits):
            raise ExecutorError(f"compression: found {compression.bits} bits, expected 2, 4 or 8")
        super().__init__(spec, full_blocks, block_size, dtype, device)
        self.full_blocks, self.blocks, self.compression = full_blocks, blocks, compression
        self._slot_of = torch.full((blocks,), -1, dtype=torch.long)
        self.sealed_tokens = self.seal_ns = 0
        self._free = list(range(full_blocks - 1, -1, -1))
        self._sealed = torch.zeros(blocks, dtype=torch.bool)
        self._slots: Tensor | None = None
        self._places: tuple[Tensor | None, Tensor, Tensor] | None = None
        self._places_there: tuple[object, Tensor] | None = None
        empty = torch.zeros(self.layers, self.kv_heads, block_size, self.head_dim)
        self._parts: list[list[Tensor]] = []
        for keys in (True, False):
            form = pack(empty, compression.bits, compression.coding, keys=keys)  # type: ignore[arg-type]
            made = [form.codes, form.scale, form.low] + ([] if form.first is None else [form.first])
            self._parts.append([torch.empty((blocks, *part.shape), dtype=part.dtype, device=device) for part in made])

    @property
    def packed_block_bytes(self) -> int:
        return sum(part[0].numel() * part.element_size() for part in self.packed_parts())

    @property
    def num_bytes(self) -> int:
        packed = self.blocks * self.packed_block_bytes
        return packed + self.pool.numel() * self.pool.element_size()

    def store(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        real, place, offset = self._room_for(slots)
        if real is not None:
            keys, values = keys[real], values[real]
        self.pool[layer, 0, place, :, offset] = keys.to(self.dtype)
        self.pool[layer, 1, place, :, offset] = values.to(self.dtype)

    def _room_for(self, slots: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """(rows that are stored or None for all, their block's place, offset in it); worked out once for all layers."""
        if self._places is None or slots is not self._slots:
            there = slots.cpu()
            real = there >= 0
            kept = None if bool(real.all()) else real.to(self.device)
            there = there[real]
            block = there // self.block_size
            for number in block.unique().tolist():
                if self._slot_of[number] < 0:
                    self._open(number)
            place, offset = self._slot_of[block].to(self.device), (there % self.block_size).to(self.device)
            self._slots, self._places = slots, (kept, place, offset)
        return self._places

    def read(self, layer: int, table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        used = table[: -(-tokens // self.block_size)].long().cpu()
        sealed = self._sealed[used]
        whole_at = self._slot_of[used[~sealed]]
        if bool((whole_at < 0).any()):
            raise ExecutorError("a KV block was read that holds nothing")
        shape = (len(used), self.kv_heads, self.block_size, self.head_dim)
        pair = []
        for which in (0, 1):
            whole = torch.empty(shape, dtype=self.dtype, device=self.device)
            if bool(sealed.any()):
                whole[sealed] = self._unpacked(used[sealed], layer, which)
            if not bool(sealed.all()):
                whole[~sealed] = self.pool[layer, which, whole_at]
            pair.append(whole.transpose(0, 1).flatten(1, 2)[:, :tokens])
        return pair[0], pair[1]

    def seal(self, blocks: list[int]) -> None:
        """Pack whole blocks, and give their room in full precision to others. Sealed ones stay as they are."""
        index = torch.tensor(blocks, dtype=torch.long)
        index = index[~self._sealed[index] & (self._slot_of[index] >= 0)]
        if not len(index):
            return
        started = time.perf_counter_ns()
        place = self._slot_of[index]
        bits, coding = self.compression.bits, self.compression.coding
        for which in (0, 1):
            whole = self.pool[:, which, place].transpose(0, 1).float()  # [blocks, layers, kv_heads, block_size, d]
            form = pack(whole, bits, coding, keys=which == 0)  # type: ignore[arg-type]
            made = [form.codes, form.scale, form.low] + ([] if form.first is None else [form.first])
            for kept, part in zip(self._parts[which], made):
                kept[index] = part
        self._sealed[index] = True
        self._free.extend(place.tolist())
        self._slot_of[index] = -1
        self._places = None
        self.sealed_tokens += len(index) * self.block_size
        self.seal_ns += time.perf_counter_ns() - started

    def drop(self, blocks: list[int]) -> None:
        """Blocks that nobody wants any more: their room in full precision is free."""
        self._places = None
        for block in blocks:
            if self._slot_of[block] >= 0:
                self._free.append(int(self._slot_of[block]))
                self._slot_of[block] = -1
            self._sealed[block] = False

    def leave(self, table: list[int], whole: int) -> None:
        """A request has gone. Its first `whole` blocks may be read again (a prefix cache); the others are forgotten."""
        blocks = [block for block in table if block > 0]
        self.seal(blocks[:whole])
        self.drop([block for block in blocks[whole:] if not self._sealed[block]])

    def seal_old(self, table: Tensor | Ints, context: int) -> None:
        """Pack those blocks of a request whose tokens are all older than the window. context: tokens computed."""
        old = max(0, context - self.compression.window) // self.block_size
        if old:
            self.seal(table[:old].tolist())

    def poison(self, blocks) -> None:
        """Forget blocks: reading one before it is written again is an error, as there is nothing to read."""
        self.drop(list(blocks))

    def _open(self, block: int) -> None:
        if not self._free:
            raise ExecutorError(
                f"KV pool: {self.full_blocks} blocks in full precision are not enough for the windows of all requests"
            )
        self._slot_of[block] = self._free.pop()
        self._sealed[block] = False
        self._places = None

    # What a kernel reads in place

    def places(self) -> Tensor:
        """Per block (int32 [blocks], on the device) where it lies whole, -1 where it is packed or holds nothing.

        The same until blocks are packed, dropped or opened again.
        """
        if self._places is None or self._places_there is None or self._places_there[0] is not self._places:
            self._places_there = (self._places, self._slot_of.to(torch.int32).to(self.device))
        return self._places_there[1]

    def coded(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Codes, scales and lows of a layer's keys and of its values, each [blocks, kv_heads, ...] (`kivi`)."""
        keys, values = ([part[:, layer] for part in parts] for parts in self._parts)
        return keys, values

    # Blocks on their way to host memory and back

    def sealed(self, blocks: list[int]) -> list[bool]:
        """Which of these blocks are packed."""
        return [bool(found) for found in self._sealed[torch.tensor(blocks, dtype=torch.long)].tolist()]

    def packed_parts(self) -> list[Tensor]:
        """The packed pool: tensors of [blocks, ...], keys' then values'."""
        return [part for parts in self._parts for part in parts]

    def whole(self, block: int) -> Tensor:
        """A block in full precision, [layers, 2, kv_heads, block_size, head_dim]: a view of where it lies."""
        place = int(self._slot_of[block])
        if place < 0:
            raise ExecutorError(f"KV block {block} holds nothing in full precision")
        return self.pool[:, :, place]

    def open(self, block: int) -> Tensor:
        """Room in full precision for a block whose content comes from elsewhere."""
        if self._slot_of[block] < 0:
            self._open(block)
        return self.whole(block)

    def came_packed(self, blocks: list[int]) -> None:
        """The packed pool holds these blocks now."""
        self.drop(blocks)
        self._sealed[torch.tensor(blocks, dtype=torch.long)] = True

    def _unpacked(self, blocks: Tensor, layer: int, which: int) -> Tensor:
        parts = [part[blocks, layer] for part in self._parts[which]]
        first = parts[3] if len(parts) > 3 else None
        return unpack(Packed(parts[0], parts[1], parts[2], first), self.compression.bits, torch.float32).to(self.dtype)
