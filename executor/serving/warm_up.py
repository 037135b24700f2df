"""Before the first request: kernels, buffers and graphs are used once, and what admission has to know is measured."""

from __future__ import annotations

import time

import numpy as np
import torch

from executor.batches.batch_arrays import Step
from executor.kernels.experts import Experts
from executor.kv_memory.compressed_pool import CompressedKVCache
from executor.serving.memory_measures import MeasuredCosts
from executor.serving.runner import Runner
from policies import Scheduler


def warm_up(runner: Runner) -> None:
    """First use of kernels, buffers, threads and graphs, so that the first request does not pay for them."""
    model = runner.loaded.model
    if runner.cache.device.type == "cuda":
        model.attention.warm(runner.cache, model.kernels.activation_dtype)
        if of_experts := [layer.down for layer in model.layers if isinstance(layer.down, Experts)]:
            of_experts[0].warm()  # all such layers have one shape
    if runner.graphs is not None:
        runner.graphs.warm_all(runner.rows)
    none = np.empty(0, np.int32)
    for tokens in (64, 1):
        step = Step(
            rows=tokens,
            token_ids=np.zeros(tokens, np.int64),
            positions=np.zeros(tokens, np.int32),
            slots=np.full(tokens, -1, np.int64),  # stored nowhere
            tables=np.zeros((1, 1), np.int32),
            chunk_row=none,
            chunk_tokens=none,
            chunk_prefix=none,
            chunk_table=none,
            decode_row=none,
            decode_context=none,
            decode_table=none,
            sampled_rows=none,
            sampled_table=none,
            device=runner.cache.device,
        )
        runner.loaded.model.forward(step.tensor(step.token_ids), step, runner.cache)


def measure_costs(runner: Runner, scheduler: Scheduler, costs: MeasuredCosts) -> None:
    """What swap and admission have to know of this machine: time of a block's copy, and of a token's prefill."""
    if runner.host is None and scheduler.admission is None:
        return
    costs.token_ns = prefill_token_ns(runner)
    if runner.host is not None:
        costs.block_ns = runner.host.measured_move_ns()
    if scheduler.admission is not None and scheduler.admission.rate is None:
        scheduler.admission.rate = 1e9 / costs.token_ns


def prefill_token_ns(runner: Runner, tokens: int = 256, repeats: int = 2) -> float:
    """Nanoseconds per prompt token of one chunk on an empty cache (blocks that nobody has yet are written)."""
    size = runner.cache.block_size
    packed = runner.cache if isinstance(runner.cache, CompressedKVCache) else None
    room = (packed.full_blocks if packed is not None else runner.cache.blocks) - 1
    tokens = max(1, min(tokens, room * size, runner.loaded.max_tokens))
    span = np.arange(tokens, dtype=np.int32)
    zero = np.zeros(1, np.int32)
    none = np.empty(0, np.int32)
    step = Step(
        rows=tokens,
        token_ids=np.zeros(tokens, np.int64),
        positions=span,
        slots=(span + size).astype(np.int64),  # from block 1 on
        tables=np.arange(1, -(-tokens // size) + 1, dtype=np.int32)[None],
        chunk_row=zero,
        chunk_tokens=np.array([tokens], np.int32),
        chunk_prefix=zero,
        chunk_table=zero,
        decode_row=none,
        decode_context=none,
        decode_table=none,
        sampled_rows=none,
        sampled_table=none,
        device=runner.cache.device,
    )
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter_ns()
        runner.loaded.model.forward(step.tensor(step.token_ids), step, runner.cache)
        if runner.cache.device.type == "cuda":
            torch.cuda.synchronize(runner.cache.device)
        best = min(best, (time.perf_counter_ns() - started) / tokens)
    if packed is not None:
        packed.drop(list(range(packed.blocks)))
    return best
