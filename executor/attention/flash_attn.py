"""FlashAttention, whichever generation runs: all chunks in one variable-length launch, all decodes in another.

Generation 3 is the module `flash_attn_interface` (Hopper), 4 is `flash_attn.cute` (Hopper and Blackwell), 2 the package
`flash_attn` (Ampere and later), and 1 stands for the copy of 2 that PyTorch carries (`varlen_attn`, paged from 2.12),
for which nothing has to be installed. Keys and values are read from the pool through block tables; the pool's own
layout is handed over as a strided view. 1 and 2 want blocks in multiples of 256 tokens. 3 and 4 may load whole pages,
so a page's unused slots must be finite: the pool starts as zeros, and `--poison` does not go with them.

PyTorch's copy is called with num_splits = 1: with more, rows after the first are not written (pytorch issue 194167).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from executor.attention.base import AttentionBackend
from executor.batches.batch_arrays import Step
from executor.batches.device_arrays import DeviceArrays, arrays_of
from executor.errors import ExecutorError
from executor.kv_memory.pool import KVCache
from profiler.specs.model_spec import ModelSpec

Attend = Callable[..., Any]
BLOCKS_OF_2 = 256


class Generation(NamedTuple):
    """Where one generation lives. needs: parameters that its function must have; capabilities: lowest, highest."""

    number: int
    module: str
    function: str
    needs: tuple[str, ...]
    capabilities: tuple[int, int]


GENERATIONS = (
    Generation(3, "flash_attn_interface", "flash_attn_with_kvcache", ("page_table", "cu_seqlens_q"), (90, 90)),
    # Packages of version 2 carry an early `cute` without these; 12.x has no paged kernel of generation 4.
    Generation(4, "flash_attn.cute", "flash_attn_varlen_func", ("page_table", "max_seqlen_q", "seqused_k"), (90, 119)),
    Generation(2, "flash_attn", "flash_attn_varlen_func", ("block_table",), (80, 121)),
    Generation(1, "torch.nn.attention.varlen", "varlen_attn_out", ("block_table", "num_splits"), (80, 121)),
)
"""In the order in which they are tried."""


def find_generations(capability: int) -> tuple[list[int], str]:
    """Generations that import and may run on this compute capability, best first, and why the others do not."""
    found, reasons = [], []
    for each in GENERATIONS:
        lowest, highest = each.capabilities
        if not lowest <= capability <= highest:
            reasons.append(f"FlashAttention {each.number} is for other devices")
            continue
        try:
            parameters = signature(getattr(import_module(each.module), each.function)).parameters
        except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
            # The package is found even where its compiled half is not: only importing tells.
            reasons.append(f"{each.module}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            continue
        missing = [name for name in each.needs if name not in parameters]
        if missing:
            why = "has no paging before PyTorch 2.12" if each.number == 1 else f"has no {missing[0]}"
            reasons.append(f"{each.module}.{each.function} {why}")
            continue
        found.append(each.number)
    return found, "; ".join(reasons)


def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class FlashAttention(AttentionBackend):
    """bfloat16 or float16 on CUDA. The instance's name carries the generation, as in `flash_attn2`."""

    name = "flash_attn"
    capturable = True
    chosen: ClassVar[int] = 0
    """The generation that this class stands for; 0: the first that imports."""

    def __init__(self, spec: ModelSpec, *, heads: int | None = None, generation: int = 0) -> None:
        super().__init__(spec, heads=heads)
        generation = generation or self.chosen
        if not generation:
            found, reason = find_generations(_capability(torch.device("cuda", torch.cuda.current_device())))
            if not found:
                raise ExecutorError(f"attention flash_attn: {reason}")
            generation = found[0]
        self.generation = generation
        # Generation 3 plans its work in memory of its own at every call; graphs of one pool would share that memory.
        self.shares_graph_pool = generation != 3
        self.name = f"flash_attn{generation}"
        self._chunks, self._decodes = self._calls(generation)

    def _calls(self, generation: int) -> tuple[Attend, Attend]:
        return {1: self._of_torch, 2: self._second, 3: self._third, 4: self._fourth}[generation]()

    @classmethod
    def why_not(cls, spec: ModelSpec, device: torch.device, kv_dtype: torch.dtype) -> str:
        if device.type != "cuda":
            return f"FlashAttention runs on CUDA, the device is {device}"
        if kv_dtype not in (torch.bfloat16, torch.float16):
            return f"FlashAttention takes bfloat16 and float16, not {kv_dtype}"
        if spec.head_dim > 256 or spec.head_dim % 8:
            return f"FlashAttention takes heads of up to 256 in multiples of 8, found {spec.head_dim}"
        found, reason = find_generations(_capability(device))
        if cls.chosen:
            return "" if cls.chosen in found else reason
        return "" if found else reason

    @classmethod
    def why_not_blocks(cls, block_size: int) -> str:
        if not torch.cuda.is_available():
            return ""
        found = [cls.chosen] if cls.chosen else find_generations(_capability(torch.device("cuda")))[0]
        return "" if any(number > 2 for number in found) else _blocks_of_2(block_size)

    @classmethod
    def forms(cls, device: torch.device) -> list[type[AttentionBackend]]:
        """A class for each generation that imports: the one that runs is chosen, not the first that imports."""
        found, _ = find_generations(_capability(device))
        return [_form(number) for number in found] or [cls]

    def attend(self, layer: int, q: Tensor, out: Tensor, step: Step, cache: KVCache) -> None:
        if self.generation <= 2 and (reason := _blocks_of_2(cache.block_size)):
            raise ExecutorError(f"attention flash_attn: {reason}")
        arrays = arrays_of(step, cache.block_size)
        first, decodes = arrays.sizes.chunk_rows, arrays.sizes.decodes
        # The pool holds a head's tokens together; FlashAttention names its axes (block, token, head).
        pair = (cache.keys(layer).transpose(1, 2), cache.values(layer).transpose(1, 2))
        query = q.unflatten(-1, (self.heads, self.head_dim))
        target = out.unflatten(-1, (self.heads, self.head_dim))
        # A graph's own step is longer than its batches. FlashAttention returns memory that it has not cleared, and
        # writes no row beyond the last chunk's: whatever lay there would go on through the layers as padding.
        padded = step.num_chunks + step.num_decodes < arrays.sizes.chunks + decodes
        if arrays.sizes.chunks and first:
            attended = self._chunks(query[:first], *pair, arrays)
            if padded:
                attended = attended.masked_fill(arrays.slots[:first, None, None] < 0, 0)
            target[:first] = attended
        if decodes:
            attended = self._decodes(query[first : first + decodes, None], *pair, arrays)[:, 0]
            if padded:
                attended = attended.masked_fill(arrays.decode_length[:, None, None] == 0, 0)
            target[first : first + decodes] = attended

    def _window(self, unlimited: int | None) -> tuple[int | None, int | None]:
        return (self.window - 1, 0) if self.window else (unlimited, unlimited)

    def _of_torch(self) -> tuple[Attend, Attend]:
        from torch.nn.attention.varlen import varlen_attn_out

        def call(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            rows: Tensor,
            starts: Tensor,
            most: int,
            arrays: DeviceArrays,
            lengths: Tensor,
            tables: Tensor,
        ) -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            varlen_attn_out(
                out,
                q,
                k,
                v,
                rows,
                starts,
                most,
                arrays.most_context,
                scale=self.scale,
                window_size=(self.window - 1, 0) if self.window else (-1, 0),
                enable_gqa=True,
                seqused_k=lengths,
                block_table=tables,
                num_splits=1,
            )
            return out

        def chunks(q: Tensor, k: Tensor, v: Tensor, arrays: DeviceArrays) -> Tensor:
            return call(
                q,
                k,
                v,
                arrays.chunk_start,
                arrays.context_start,
                arrays.most_query,
                arrays,
                arrays.chunk_length,
                arrays.chunk_tables,
            )

        def decodes(q: Tensor, k: Tensor, v: Tensor, arrays: DeviceArrays) -> Tensor:
            return call(
                q[:, 0],
                k,
                v,
                arrays.decode_row,
                arrays.decode_start,
                1,
                arrays,
                arrays.decode_length,
                arrays.decode_tables,
            )[:, None]

        return chunks, decodes

    def _second(self) -> tuple[Attend, Attend]:
        from flash_attn import flash_attn_varlen_func

        same = {"softmax_scale": self.scale, "causal": True, "window_size": self._window(-1)}

        def chunks(q: Tensor, k: Tensor, v: Tensor, arrays: DeviceArrays) -> Tensor:
            return flash_attn_varlen_func(  # type: ignore[no-any-return]
                q,
                k,
                v,
                cu_seqlens_q=arrays.chunk_start,
                cu_seqlens_k=arrays.context_start,
                max_seqlen_q=arrays.most_query,
                max_seqlen_k=arrays.most_context,
                block_table=arrays.chunk_tables,
                **same,
            )

        def decodes(q: Tensor, k: Tensor, v: Tensor, arrays: DeviceArrays) -> Tensor:
            # Not flash_attn_with_kvcache: over pages it reads the longest length back to the host, in every layer.
            return flash_attn_varlen_func(  # type: ignore[no-any-return]
                q[:, 0],
                k,
                v,
                cu_seqlens_q=arrays.decode_row,
                cu_seqlens_k=arrays.decode_start,
                max_seqlen_q=1,
                max_seqlen_k=arrays.most_context,
                block_table=arrays.decode_tables,
                **same,
            )[:, None]

        return chunks, decodes

    def _third(self) -> tuple[Attend, Attend]:
        from flash_attn_interface import flash_attn_with_kvcache

        same = {"softmax_scale": self.scale, "causal": True, "window_size": self._window(-1)}

        def chunks(q: Tensor, k: Tensor, v: Tensor, arrays: DeviceArrays) -> Tensor:
            return flash_attn_with_kvcache(  # type: ignore[no-any-return]
                q,
                k,
                v,
                cache_seqlens=arrays.chunk_length,
                page_table=arrays.chunk_tables,
                cu_seqlens_q=arrays.chunk_start,
                max_seqlen_q=arrays.most_query,
                **same,
            )

        def decodes(q: Tensor, k: Tensor, v: Tensor, arrays: DeviceArrays) -> Tensor:
            return flash_attn_with_kvcache(  # type: ignore[no-any-return]
                q, k, v, cache_seqlens=arrays.decode_length, page_table=arrays.decode_tables, **same
            )

        return chunks, decodes

    def _fourth(self) -> tuple[Attend, Attend]:
        from flash_attn.cute import flash_attn_varlen_func

        same = {"softmax_scale": self.scale, "causal": True, "window_size": self._window(None)}

        def chunks(q: Tensor, k: Tensor, v: Tensor, arrays: DeviceArrays) -> Tensor:
            result = flash_attn_varlen_func(
                q,
                k,
                v,
                cu_seqlens_q=arrays.chunk_start,
                seqused_k=arrays.chunk_length,
                page_table=arrays.chunk_tables,
                max_seqlen_q=arrays.most_query,
                max_seqlen_k=arrays.most_context,
                **same,
            )
            return result[0] if isinstance(result, tuple) else result

        def decodes(q: Tensor, k: Tensor, v: Tensor, arrays: DeviceArrays) -> Tensor:
            result = flash_attn_varlen_func(
                q, k, v, seqused_k=arrays.decode_length, page_table=arrays.decode_tables, **same
            )
            return result[0] if isinstance(result, tuple) else result

        return chunks, decodes


@cache
def _form(number: int) -> type[AttentionBackend]:
    """One class a generation, the same at every call: self-tests are remembered by class."""
    return type(f"FlashAttention{number}", (FlashAttention,), {"chosen": number})


def _blocks_of_2(block_size: int) -> str:
    if block_size % BLOCKS_OF_2 == 0:
        return ""
    wanted = f"blocks in multiples of {BLOCKS_OF_2} tokens"
    return f"FlashAttention 2 (and PyTorch's copy of it) reads {wanted}, found --block-size {block_size}"
