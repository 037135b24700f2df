"""How many KV blocks a GPU holds, from what was measured after a warm-up, and which allocator serves PyTorch.

The pool is allocated once, from what is left when weights are loaded, the largest batch has run and graphs are counted:
what a batch needs beside the pool is then known, not guessed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from executor.batches.batch_arrays import Step
from executor.errors import ExecutorError
from executor.model.loading import Loaded
from profiler.specs.memory_plan import kv_blocks

SHARE_OF_FREE, SHARE_OF_DEVICE = 0.5, 0.9
"""Memory that a pool may take if nobody says so: of what a CPU has free, and of all of a GPU (weights included)."""

ALLOCATORS = {
    "default": "",
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
}
"""expandable: segments grow in place, so a large pool leaves no holes. async: CUDA's own pooled allocator."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device: all there is, taken by anybody before the pool, and at most beside the pool in a batch."""

    total: int
    taken: int
    peak_activations: int
    graphs: int = 0

    def blocks(self, block_bytes: int, utilisation: float) -> int:
        """KV blocks that fit when `utilisation` of the device may be used in all."""
        return kv_blocks(self.total, utilisation, self.taken + self.peak_activations + self.graphs, block_bytes)


def pool_blocks(use: MemoryUse, block_bytes: int, *, utilisation: float = 0.9, least: int = 1) -> int:
    """Whole KV blocks that fit, the unused block 0 left out of the count.

    Raises ExecutorError if fewer than `least` do, and says where the memory went.
    """
    if not 0 < utilisation <= 1:
        raise ExecutorError(f"utilisation: found {utilisation:g}, expected above 0 and at most 1")
    blocks = use.blocks(block_bytes, utilisation) - 1
    if blocks < least:
        gib = 1 << 30
        raise ExecutorError(
            f"KV pool: {max(blocks, 0)} blocks fit, {least} are needed: of {use.total / gib:.2f} GiB, "
            f"{utilisation:.0%} may be used; {use.taken / gib:.2f} are taken, a batch needs "
            f"{use.peak_activations / gib:.2f}, graphs {use.graphs / gib:.2f}; lower --max-model-len or "
            "--token-budget, or take fewer graphs"
        )
    return int(blocks)


def measure_use(
    loaded: Loaded, *, most_rows: int, most_sampled: int, block_size: int = 16, graph_bytes: int = 0
) -> MemoryUse:
    """Run the largest batch once and see what it takes: `most_rows` tokens, `most_sampled` rows of logits.

    block_size: of the pool to come, since attention may refuse any other. Attention reads no context here: its kernels
    keep nothing but per-row sums. On a CPU nothing can be measured that way; the available memory is the total and
    nothing is taken.
    """
    device = loaded.device
    if device.type != "cuda":
        return MemoryUse(free_memory_bytes(device), 0, 0, 0)
    gc.collect()  # a pool of an engine that has gone is nobody's
    cache = loaded.new_cache(1, block_size)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    loaded.model.attention.warm(cache, loaded.model.kernels.activation_dtype)
    step = dummy_step(most_rows, most_sampled, device)
    logits = loaded.model.forward(step.tensor(step.token_ids), step, cache)
    loaded.model.kernels.argmax(logits)
    torch.cuda.synchronize(device)
    # Buffers that stay are allocated now; what came and went on top of them is the rest of the peak.
    stays = int(torch.cuda.memory_allocated(device))
    passing = int(torch.cuda.max_memory_allocated(device)) - stays
    del logits, cache
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(int(total), int(total - free), passing, graph_bytes)


def blocks_that_fit(loaded: Loaded, *, most_rows: int, most_sampled: int, block_size: int, graph_bytes: int = 0) -> int:
    """KV blocks for which there is memory beside weights, graphs and the largest batch (on a CPU, in half of it)."""
    block_bytes = loaded.kv_bytes_per_token * block_size
    use = measure_use(
        loaded, most_rows=most_rows, most_sampled=most_sampled, block_size=block_size, graph_bytes=graph_bytes
    )
    if loaded.device.type != "cuda":
        return use.blocks(block_bytes, SHARE_OF_FREE) - 1
    return pool_blocks(use, block_bytes, utilisation=SHARE_OF_DEVICE)


def free_memory_bytes(device: torch.device) -> int:
    """Memory that is free on the device now (what the operating system calls available, on a CPU)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: assume a small machine rather than fail
    return 4 << 30


def dummy_step(rows: int, sampled: int, device: torch.device) -> Step:
    """Rows that are stored nowhere and attend to nothing, the first `sampled` of them sampled."""
    none = np.empty(0, np.int32)
    sampled = min(sampled, rows)
    return Step(
        rows=rows,
        token_ids=np.zeros(rows, np.int64),
        positions=np.zeros(rows, np.int32),
        slots=np.full(rows, -1, np.int64),
        tables=np.zeros((1, 1), np.int32),
        chunk_row=none,
        chunk_tokens=none,
        chunk_prefix=none,
        chunk_table=none,
        decode_row=none,
        decode_context=none,
        decode_table=none,
        sampled_rows=np.arange(sampled, dtype=np.int32),
        sampled_table=np.zeros(sampled, np.int32),
        device=device,
    )


def choose_allocator(
    name: str, environment: dict[str, str] | os._Environ[str] = os.environ, *, started: Callable[[], bool] | None = None
) -> None:
    """Choose PyTorch's CUDA allocator by a name of ALLOCATORS; a setting that is there already is kept beside it.

    Raises ExecutorError for an unknown name, or once CUDA is in use: the choice would be ignored.
    """
    if name not in ALLOCATORS:
        raise ExecutorError(f"allocator: found {name!r}, expected one of {', '.join(ALLOCATORS)}")
    setting = ALLOCATORS[name]
    if not setting:
        return
    if setting in environment.get("PYTORCH_ALLOC_CONF", "").split(","):
        return
    if (started or torch.cuda.is_initialized)():
        raise ExecutorError(f"allocator: {name} has to be chosen before CUDA is first used")
    # Newer versions of PyTorch read the first name, older ones the second.
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        parts = [part for part in environment.get(variable, "").split(",") if part]
        key = setting.partition(":")[0]
        environment[variable] = ",".join([part for part in parts if not part.startswith(key + ":")] + [setting])
