"""Everything that defines a live run, as plain data: the same fields as flags, as TOML keys and in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from executor.errors import ExecutorError
from executor.machine.threads import check_threads
from policies.edges.settings import check_settings, listed
from policies.edges.settings_file import one_spelling
from policies.kv_memory.swap import PREEMPTIONS


@dataclass(frozen=True)
class LiveConfig:
    """A live run, apart from its trace. None means: decided by policy, model or trace.

    policy, knobs, token_budget, max_num_seqs, max_model_len, block_size, num_blocks, watermark, limit, seed, warmup,
        slo: as in a simulated run. num_blocks: by default as many as the trace could ever use, within memory_share of
        a CPU's free memory (0.5) or of all of a GPU's (0.9, with what else is on it).
    time_scale: the trace's arrival times are multiplied by it. as_fast_as_possible: all requests arrive at once.
    ahead: plan one step ahead of the running one; None: as the policy's system does on such a device. seed: of weights,
    of random prompts and of sampling.
    temperature, top_k, top_p: greedy by default. ignore_eos: every answer has the trace's length, whatever it says.
    graphs: CUDA graphs: auto (on CUDA where they can be), on, off. streams: a mixed batch's two attention launches side
        by side (attention triton on CUDA). nvtx: name passes and operators in a profiler's timeline. allocator: of
        PyTorch on CUDA: default, expandable (segments), async (cudaMallocAsync).
    poison: fill freed KV blocks with NaN (a check, not for measurements).
    prefix_caching: share the KV blocks of texts that agree from their beginning. preemption, swap_gib, swap_page_mib,
        ladder, trouble_from, plain_tokens, risk, max_wait_s: as in a simulated run.
    tp, pp: ranks over which every layer is split, and stages of layers: one process each (executor.distributed).
    layer_split: layers of each stage, even by default. chase_chunks: in a pipeline a prompt's next chunk may follow its
        last one.
    kv_compression: keys and values older than kv_window tokens packed, as kivi4 or delta8 (coding and bits); the block
        is the group that is packed together.
    """

    policy: str = "chunked"
    knobs: Mapping[str, Any] = field(default_factory=dict)
    model: str = "tiny"
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kernels: str = "auto"
    attention: str = "auto"
    graphs: str = "auto"
    streams: bool = False
    nvtx: bool = False
    allocator: str = "default"
    threads: int | None = None
    trim_last_layer: bool = True
    ahead: bool | None = None
    token_budget: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    memory_share: float | None = None
    watermark: float | None = None
    time_scale: float = 1.0
    as_fast_as_possible: bool = False
    limit: int | None = None
    prompts: str | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    ignore_eos: bool = True
    seed: int = 0
    warmup: str | None = None
    slo: str | None = None
    poison: bool = False
    prefix_caching: bool = False
    preemption: str = "recompute"
    swap_gib: float = 1.0
    swap_page_mib: float = 16.0
    ladder: str | None = None
    trouble_from: float = 0.9
    plain_tokens: int = 8192
    risk: float = 1.0
    max_wait_s: float = 60.0
    kv_compression: str | None = None
    kv_window: int = 128
    tp: int = 1
    pp: int = 1
    layer_split: tuple[int, ...] | None = None
    chase_chunks: bool = False

    def __post_init__(self) -> None:
        check_settings(self, ExecutorError)
        if self.warmup is not None or self.slo is not None:
            from metrics.measures.slo import check_statistics

            check_statistics(self.warmup, self.slo, ExecutorError)
        for name in ("token_budget", "max_num_seqs", "max_model_len", "block_size", "num_blocks", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ExecutorError(f"{_flag(name)}: found {value}, expected at least 1")
        check_threads(self.threads)
        if self.seed < 0:
            raise ExecutorError(f"--seed: found {self.seed}, expected 0 or more")
        for flag, ranks in (("--tp", self.tp), ("--pp", self.pp)):
            if ranks < 1:
                raise ExecutorError(f"{flag}: found {ranks}, expected at least 1")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise ExecutorError(f"--memory-share: found {self.memory_share:g}, expected above 0 and at most 1")
        if self.watermark is not None and not 0 <= self.watermark < 1:
            raise ExecutorError(f"--watermark: found {self.watermark:g}, expected at least 0 and below 1")
        if self.preemption not in PREEMPTIONS:
            raise ExecutorError(f"--preemption: found {self.preemption!r}, expected one of {', '.join(PREEMPTIONS)}")
        for flag, size in (("--swap-gib", self.swap_gib), ("--swap-page-mib", self.swap_page_mib)):
            if not 0 < size < float("inf"):
                raise ExecutorError(f"{flag}: found {size:g}, expected above 0")
        if not 0 <= self.time_scale < float("inf"):
            raise ExecutorError(f"--time-scale: found {self.time_scale}, expected 0 or more")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LiveConfig:
        """A config from plain data; an unknown key is an error that names the known ones."""
        known = {entry.name for entry in fields(cls)}
        cleaned: dict[str, Any] = {}
        for name, value in one_spelling(values, "config", ExecutorError).items():
            if name not in known:
                raise ExecutorError(f"config: unknown key {name!r}; known keys: {', '.join(sorted(known))}")
            if name == "layer_split" and value is not None:
                value = listed("--layer-split", value, int, ExecutorError)
            cleaned[name] = value
        return cls(**cleaned)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
