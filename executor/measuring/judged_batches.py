"""The batches by which a device is judged: each timed with an optimisation on and off, and held against its bound.

Seconds are whole forward passes between device events, launches included, so that a pass bound by its host shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from executor.attention.triton import TritonAttention
from executor.batches.batch_arrays import Step
from executor.checks.self_test import random_step
from executor.kernels.device import TritonKernels
from executor.kv_memory.pool import KVCache
from executor.machine.ceilings import Ceilings, bound_of, time_calls
from executor.model.cuda_graphs import Buckets, Capture, CudaCapture, GraphedModel
from executor.model.loading import Loaded
from policies import BatchShape


@dataclass(frozen=True)
class Aim:
    """A batch and what is wanted of it: a share of its bound, or a time on the device that the aim was set for."""

    name: str
    chunks: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    share: float = 0.0
    seconds: float = 0.0

    @property
    def shape(self) -> BatchShape:
        n = len(self.contexts)
        return BatchShape(self.chunks, n, sum(self.contexts), max(self.contexts, default=0), 0, n + len(self.chunks))

    @property
    def longest(self) -> int:
        return max([tokens + prefix for tokens, prefix in self.chunks] + [context + 1 for context in self.contexts])


def aims(scale: int = 1) -> list[Aim]:
    """Those of Llama-3.1-8B in bfloat16 on an H200; scale divides tokens, contexts and decodes, for a small machine.

    The time is the sum of the kernels that AIConfigurator measured of vLLM for such a decode step.
    """
    n = max(1, 64 // scale)
    few = max(1, 32 // scale)
    return [
        Aim("decode", (), (1024 // scale,) * n, share=0.8),
        Aim("prefill", ((2048 // scale, 0),), (), share=0.7),
        Aim("mixed", ((448 // scale, 0),), (1024 // scale,) * n, share=0.7),
        Aim("decode, long contexts", (), (2000 // scale,) * few, seconds=7.3e-3),
        Aim("short chunk", ((128 // scale, 1024 // scale),), ()),
    ]


def measure_aims(
    loaded: Loaded,
    ceilings: Ceilings,
    *,
    wanted: list[Aim] | None = None,
    block_size: int = 16,
    repeats: int = 10,
    new_capture: Callable[[], Capture] | None = None,
) -> Iterator[dict[str, Any]]:
    """One row a batch and variant, as soon as it is measured.

    Variants: "plain", "graphs" (where kernels and attention can be captured), "two streams" (Triton attention, mixed
    batches), "no fusion" (Triton kernels). new_capture: real CUDA graphs on CUDA, nothing elsewhere, if not given.
    """
    if new_capture is None and loaded.device.type == "cuda":
        new_capture = CudaCapture
    dtype, kv_dtype = (str(kind).removeprefix("torch.") for kind in (loaded.dtype, loaded.kv_dtype))
    for aim in aims() if wanted is None else wanted:
        step = random_step(list(aim.chunks), list(aim.contexts), block_size, loaded.device)
        cache = loaded.new_cache(int(step.tables.max()), block_size)
        cache.pool.normal_(0.0, 0.5)
        bound = bound_of(loaded.spec, aim.shape, ceilings, dtype=dtype, kv_dtype=kv_dtype)
        ids = step.tensor(step.token_ids)
        for variant, call in _variants(loaded, aim, cache, step, new_capture):
            times = time_calls(lambda call=call, ids=ids: call(ids), loaded.device, repeats)
            seconds = median(times)
            reached = bound.share(seconds)
            yield {
                "batch": aim.name,
                "variant": variant,
                "seconds": seconds,
                "quickest_s": min(times),
                "slowest_s": max(times),
                "bound_s": bound.seconds,
                "bound_by": bound.by,
                "share": reached,
                "wanted_share": aim.share,
                "wanted_s": aim.seconds,
                "reached": (reached >= aim.share) if aim.share else (seconds <= aim.seconds) if aim.seconds else None,
                "kernels": loaded.model.kernels.name,
                "attention": loaded.model.attention.name,
            }


def _variants(
    loaded: Loaded, aim: Aim, cache: KVCache, step: Step, new_capture: Callable[[], Capture] | None
) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    model = loaded.model
    kernels, attention = model.kernels, model.attention

    def plain(ids: Tensor) -> Tensor:
        # A new batch is packed anew, every time.
        step.arrays = None
        step.__dict__.pop("only_sampled", None)
        return model.forward(ids, step, cache)

    yield "plain", plain
    if new_capture is not None and kernels.capturable and attention.capturable:
        most = -(-sum(tokens for tokens, _ in aim.chunks) // 128) * 128
        decodes = (len(aim.contexts),) if aim.contexts else (1,)
        buckets = Buckets(blocks=-(-aim.longest // cache.block_size), decodes=decodes, chunk_rows=max(128, most))
        graphed = GraphedModel(model, cache, buckets, new_capture=new_capture)
        yield "graphs", lambda ids: graphed.forward(ids, step, cache)
    if isinstance(attention, TritonAttention) and aim.chunks and aim.contexts:
        before, attention.two_streams = attention.two_streams, True
        yield "two streams", plain
        attention.two_streams = before
    if isinstance(kernels, TritonKernels):
        fused, kernels.fused = kernels.fused, frozenset()
        yield "no fusion", plain
        kernels.fused = fused
