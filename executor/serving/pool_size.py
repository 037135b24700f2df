"""How many KV blocks a live run has when nobody says so: what its trace could use, or what the device holds.

On a GPU the largest batch runs once first, so that weights, passing activations and graphs are counted and not guessed;
the pool is then allocated once. On a CPU the operating system's idea of available memory has to do.
"""

from __future__ import annotations

from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.model.cuda_graphs import graph_bytes
from executor.model.loading import Loaded
from executor.serving.device_memory import (
    SHARE_OF_DEVICE,
    SHARE_OF_FREE,
    MemoryUse,
    free_memory_bytes,
    measure_use,
    pool_blocks,
)
from executor.serving.memory_measures import compression_of, full_blocks
from workloads.trace import Trace


def default_blocks(
    config: LiveConfig,
    loaded: Loaded,
    trace: Trace,
    max_model_len: int,
    use: MemoryUse | None = None,
    *,
    most_tokens: int = 2048,
) -> int:
    """Blocks for the whole trace at once, if the memory holds them; else what it holds.

    use: what the device holds beside the pool, measured here if not given. most_tokens: of one batch. Raises
    ExecutorError if not even the longest request fits.
    """
    lengths = trace.prompt_tokens + trace.max_output_tokens
    wanted = int((-(-lengths // config.block_size)).sum()) * 2 + 1  # twice: no watermark shall bite
    longest = -(-max_model_len // config.block_size)
    if use is None and loaded.is_sharded:
        use = MemoryUse(free_memory_bytes(loaded.device), 0, 0)  # of rank 0; no rank can run a batch alone
    elif use is None:
        use = measure_use(
            loaded,
            most_rows=most_tokens,
            most_sampled=config.max_num_seqs or 256,
            block_size=config.block_size,
            graph_bytes=graph_bytes(loaded),
        )
    block_bytes, beside = loaded.kv_bytes_per_token * config.block_size, 0
    compression = compression_of(config)
    if compression is not None:
        # Everybody's window lies beside the packed pool in full precision.
        rows = min(config.max_num_seqs or 256, len(trace))
        beside = full_blocks(config, rows, most_tokens) * block_bytes
        block_bytes = round(compression.packed_bytes_per_token(loaded.spec) * config.block_size)
    if loaded.device.type != "cuda":
        share = config.memory_share or SHARE_OF_FREE
        room = use.blocks(block_bytes, share) - beside // block_bytes
        if room < longest:
            raise ExecutorError(
                f"KV pool: {room} blocks of {config.block_size} tokens fit into {share:.0%} of the free memory, the "
                f"longest request needs {longest}; lower --max-model-len or raise --memory-share"
            )
    else:
        used = MemoryUse(use.total, use.taken + beside, use.peak_activations, use.graphs)
        room = pool_blocks(used, block_bytes, utilisation=config.memory_share or SHARE_OF_DEVICE, least=longest)
    return max(longest, min(room, wanted))
