"""Time one batch shape: whole, its attention alone, and beside the machine's own matrix rate and memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from executor.batches.batch_arrays import Step
from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.model.cuda_graphs import graphs_for
from executor.model.loading import Loaded
from executor.serving.replay import load_for


def shape_step(
    loaded: Loaded, chunks: list[tuple[int, int]], decodes: list[int], block_size: int, dummies: int = 0
) -> Step:
    """A step of (tokens, prefix) chunks and decodes with the given contexts, each in consecutive blocks of its own."""
    if not chunks and not decodes:
        raise ExecutorError("found an empty batch, expected a chunk or decodes")
    spans = [(prefix, prefix + tokens) for tokens, prefix in chunks] + [(context, context + 1) for context in decodes]
    width = max(-(-end // block_size) for _, end in spans)
    tables = 1 + np.arange(len(spans) * width, dtype=np.int32).reshape(len(spans), width)
    positions = np.concatenate([np.arange(start, end, dtype=np.int32) for start, end in spans])
    owners = np.repeat(np.arange(len(spans)), [end - start for start, end in spans])
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    sizes = np.array([end - start for start, end in spans])
    last = np.cumsum(sizes).astype(np.int32) - 1
    count = len(chunks)
    numbers = np.arange(len(spans), dtype=np.int32)
    rows = len(positions) + dummies
    return Step(
        rows=rows,
        token_ids=np.random.default_rng(0).integers(0, loaded.spec.vocab, rows),
        positions=np.concatenate((positions, np.zeros(dummies, np.int32))),
        slots=np.concatenate((slots, np.full(dummies, -1, np.int64))),
        tables=tables,
        chunk_row=(last - sizes + 1).astype(np.int32)[:count],
        chunk_tokens=np.array([tokens for tokens, _ in chunks], np.int32),
        chunk_prefix=np.array([prefix for _, prefix in chunks], np.int32),
        chunk_table=numbers[:count],
        decode_row=last[count:],
        decode_context=np.array(decodes, np.int32),
        decode_table=numbers[count:],
        sampled_rows=last,
        sampled_table=numbers,
        device=loaded.device,
    )


def blocks_of(step: Step) -> int:
    """Usable blocks that a step of `shape_step` needs."""
    return int(step.tables.max())


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was given; a CPU has when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(run: Callable[[], object], repeats: int, device: torch.device) -> list[tuple[float, float]]:
    """(wall, CPU) seconds of each of `repeats` runs, after one that does not count."""
    times = []
    for index in range(repeats + 1):
        wait_for(device)
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        run()
        wait_for(device)
        if index:
            times.append(((time.perf_counter_ns() - wall) / 1e9, (time.process_time_ns() - cpu) / 1e9))
    return times


def matrix_rate(device: torch.device, dtype: torch.dtype = torch.float32, size: int = 1536) -> float:
    """FLOP/s of PyTorch's own matrix product on this device: the best of a few."""
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    best = min(wall for wall, _ in measure(lambda: a @ b, 8, device))
    return 2 * size**3 / best


def linear_flops(loaded: Loaded, step: Step) -> int:
    """FLOPs of the matrix products that the whole model would need for a step (nothing left out in the last layer)."""
    spec = loaded.spec
    return spec.linear_flops_per_token() * step.rows + spec.head_flops_per_row * len(step.sampled_rows)


def bench_batch(
    config: LiveConfig, *, chunk: int, prefix: int, decodes: int, context: int, repeats: int = 10
) -> dict[str, Any]:
    """Best wall and CPU times of one mixed batch, its attention's share, and the distance to the matrix rate."""
    if repeats < 1 or min(chunk, prefix, decodes, context) < 0:
        raise ExecutorError("bench: sizes have to be 0 or more, repeats at least 1")
    loaded = load_for(config, max(prefix + chunk, context + 1))
    longest = max(prefix + chunk, context + 1)
    if longest > loaded.max_tokens:
        raise ExecutorError(f"bench: context of {longest} tokens: {loaded.spec.name} reaches {loaded.max_tokens}")
    step = shape_step(loaded, [(chunk, prefix)] if chunk else [], [context] * decodes, config.block_size)
    cache = loaded.new_cache(blocks_of(step), config.block_size)
    cache.pool.normal_()
    ids = step.tensor(step.token_ids)
    attention = loaded.model.attention
    spent = 0

    def timed(*arguments: Any) -> None:
        nonlocal spent
        wait_for(loaded.device)
        began = time.perf_counter_ns()
        type(attention).attend(attention, *arguments)
        wait_for(loaded.device)  # a launch alone says nothing
        spent += time.perf_counter_ns() - began

    graphs = graphs_for(loaded, cache, longest)
    forward = loaded.model.forward if graphs is None else graphs.forward
    times = measure(lambda: forward(ids, step, cache), repeats, loaded.device)
    attention.attend = timed  # type: ignore[method-assign]
    shares = []
    for _ in range(max(2, repeats // 2)):
        spent = 0
        loaded.model.forward(ids, step, cache)
        shares.append(spent / 1e9)
    del attention.attend
    wall = min(wall for wall, _ in times)
    flops = linear_flops(loaded, step)
    rate = matrix_rate(loaded.device, loaded.dtype)
    return {
        **{key: str(value) for key, value in loaded.describe().items()},
        "rows": step.rows if graphs is None else graphs.executed_rows,
        "wall_ms": wall * 1e3,
        "wall_median_ms": float(np.median([wall for wall, _ in times])) * 1e3,
        "cpu_ms": min(cpu for _, cpu in times) * 1e3,
        "attention_ms": min(shares) * 1e3,
        "linear_gflop": flops / 1e9,
        "linear_gflops_per_s": flops / 1e9 / max(wall - min(shares), 1e-9),
        "machine_gflops_per_s": rate / 1e9,  # in the weights' dtype
        "floor_ms": flops / rate * 1e3,
        "times_the_floor": wall / (flops / rate),
    }
