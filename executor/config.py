"""Everything that defines a live run, as plain data: the same fields as flags, as TOML keys and in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from executor.errors import ExecutorError
from executor.machine.threads import check_threads
from policies.edges.declared_settings import check_declared, from_plain, setting
from policies.kv_memory.swap import PREEMPTIONS

POLICY, ENGINE, MEMORY, TRACE, ANSWER, OUTPUT = "Policy", "Engine", "KV memory", "Trace", "Answers", "Output"


def _split(text: str) -> tuple[int, ...] | None:
    from profiler.specs.layer_split import parse_split

    return parse_split(text)


@dataclass(frozen=True)
class LiveConfig:
    """A live run, apart from its trace. None means: decided by policy, model or trace.

    Every field says below what it is; `--help` and docs/settings.md show the same words. Fields of a simulated run's
    names mean the same here (simulator.config.ReplayConfig). num_blocks: by default as many as the trace could ever
    use, within memory_share of a CPU's free memory (0.5) or of all of a GPU's (0.9, with what else is on it). tp, pp:
    one process a rank (executor.distributed). kv_compression: the block is the group that is packed together.
    """

    policy: str = setting("chunked", "Name of a policy, or file.py:ClassName; its knobs are flags too.", group=POLICY)
    knobs: Mapping[str, Any] = setting(make=dict, text="Knobs of the policy; on a command line flags.", flag="")
    token_budget: int | None = setting(None, "Most tokens of a batch.", group=POLICY, least=1)
    max_num_seqs: int | None = setting(None, "Most requests admitted at once.", group=POLICY, least=1)
    ahead: bool | None = setting(
        None,
        "Plan one step ahead of the running one; by default as the policy's system.",
        group=POLICY,
        flag="--async/--sync",
    )

    model: str = setting(
        "tiny", "Hugging Face folder, .gguf, smollm2, or a spec's name (random weights).", group=ENGINE
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N.", group=ENGINE)
    dtype: str = setting("auto", "Weights; auto is float32 on a CPU, the model's own on CUDA.", group=ENGINE)
    kv_dtype: str = setting("auto", "Keys and values; auto is that of the weights.", group=ENGINE)
    kernels: str = setting("auto", "auto, native (C++), triton, compiled, plain_device, torch.", group=ENGINE)
    attention: str = setting("auto", "auto, flash_attn, triton, native, sdpa, flex, paged, reference.", group=ENGINE)
    graphs: str = setting("auto", "CUDA graphs: auto (on CUDA where they can be), on or off.", group=ENGINE)
    streams: bool = setting(
        False,
        "Chunks' and decodes' attention side by side (triton on CUDA).",
        group=ENGINE,
        flag="--streams/--one-stream",
    )
    nvtx: bool = setting(False, "Name passes and operators in a profiler's timeline (CUDA).", group=ENGINE)
    allocator: str = setting("default", "PyTorch's on CUDA: default, expandable or async.", group=ENGINE)
    threads: int | None = setting(None, "Threads of the model; PyTorch's own number by default.", group=ENGINE)
    tp: int = setting(1, "Ranks over which every layer is split; a process each.", group=ENGINE, least=1)
    pp: int = setting(1, "Pipeline stages; a process each.", group=ENGINE, least=1)
    layer_split: tuple[int, ...] | None = setting(
        None, "Layers of each stage, as 20,12.", group=ENGINE, typed=str | None, parse=_split, listed=int
    )
    chase_chunks: bool = setting(
        False, "A prompt's next chunk may follow its last one through the stages.", group=ENGINE
    )
    trim_last_layer: bool = setting(
        True,
        "Carry only sampled rows through the last layer.",
        group=ENGINE,
        flag="--trim-last-layer/--whole-last-layer",
    )
    max_model_len: int | None = setting(
        None, "Longest prompt + output; by default the trace's, if the model allows.", group=ENGINE, least=1
    )
    speculation: str | None = setting(
        None, "Drafts are verified: ngram:4 or draft:3, the method and drafts a step.", group=ENGINE
    )
    draft_model: str | None = setting(None, "Model that drafts (with draft:K); as --model.", group=ENGINE)

    block_size: int = setting(16, "Tokens per KV block.", group=MEMORY, least=1)
    num_blocks: int | None = setting(None, "Usable KV blocks; by default what the trace needs.", group=MEMORY, least=1)
    memory_share: float | None = setting(
        None,
        "KV pool: most of a CPU's free memory (0.5), or share of a GPU in use (0.9).",
        group=MEMORY,
        above=0,
        most=1,
    )
    watermark: float | None = setting(
        None, "Share of blocks that admission leaves free.", group=MEMORY, least=0, below=1
    )
    poison: bool = setting(False, "Fill freed blocks with NaN (a check of the engine).", group=MEMORY)
    prefix_caching: bool = setting(False, "Share the KV blocks of texts that agree from their beginning.", group=MEMORY)
    preemption: str = setting(
        "recompute",
        "What preempted requests do: recompute, swap, or the cheaper (auto).",
        group=MEMORY,
        choices=PREEMPTIONS,
    )
    swap_gib: float = setting(1.0, "Host memory to swap to, in GiB.", group=MEMORY, above=0)
    swap_page_mib: float = setting(16.0, "Page of host memory, the unit of swapping, in MiB.", group=MEMORY, above=0)
    ladder: str | None = setting(
        None, "Against full memory: preempt, plain, offload, oversubscribe, reject; or all, or none.", group=MEMORY
    )
    trouble_from: float = setting(0.9, "Share of blocks in use from which memory is short.", group=MEMORY)
    plain_tokens: int = setting(8192, "Most prefill tokens of a batch without decodes (rung plain).", group=MEMORY)
    risk: float = setting(
        1.0, "Answers counted on: 0 the longest allowed, 1 the expected (rung oversubscribe).", group=MEMORY
    )
    max_wait_s: float = setting(
        60.0, "Longest expected wait for a first token, in s (rung reject).", group=MEMORY, flag="--max-wait"
    )
    kv_compression: str | None = setting(None, "Pack old keys and values: kivi4, kivi2, delta8, ...", group=MEMORY)
    kv_window: int = setting(128, "Most recent tokens that stay in full precision.", group=MEMORY)

    time_scale: float = setting(1.0, "Arrival times are multiplied by this.", group=TRACE, least=0)
    as_fast_as_possible: bool = setting(False, "All requests arrive at once, in the trace's order.", group=TRACE)
    limit: int | None = setting(None, "Only the first so many requests.", group=TRACE, least=1)
    seed: int = setting(0, "Seed of weights, prompts and sampling.", group=TRACE, least=0)

    prompts: str | None = setting(None, "Text file, one prompt a line, cut to the trace's lengths.", group=ANSWER)
    temperature: float = setting(0.0, "0 is greedy.", group=ANSWER)
    top_k: int = setting(0, "Sample among the k most likely; 0 for all.", group=ANSWER)
    top_p: float = setting(1.0, "Sample among the most likely that hold this mass.", group=ANSWER)
    ignore_eos: bool = setting(
        True,
        "Answers have the trace's lengths, or end at a stop token.",
        group=ANSWER,
        flag="--ignore-eos/--stop-at-eos",
    )

    warmup: str | None = setting(None, "Requests (100) or seconds (30s) left out of statistics.", group=OUTPUT)
    slo: str | None = setting(None, "Objective, as ttft_p99=2,tbt_p99=0.2 (seconds).", group=OUTPUT)

    def __post_init__(self) -> None:
        check_declared(self, ExecutorError)
        if self.warmup is not None or self.slo is not None:
            from metrics.measures.slo import check_statistics

            check_statistics(self.warmup, self.slo, ExecutorError)
        check_threads(self.threads)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LiveConfig:
        """A config from plain data; an unknown key is an error that names the known ones."""
        return from_plain(cls, values, ExecutorError)
