"""The executor's flags: what each is called, what it says in --help, and where it stands there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _option(flag: str, text: str, panel: str, **more: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=panel, **more)


_POLICY, _ENGINE, _MEMORY, _TRACE, _ANSWER, _OUTPUT = "Policy", "Engine", "KV memory", "Trace", "Answers", "Output"
TraceFile = Annotated[Path | None, typer.Argument(help="Trace file; may come from --config instead.")]
PolicyName = Annotated[
    str, _option("--policy", "Name of a policy, or file.py:ClassName; its knobs are flags too.", _POLICY)
]
ChunkSize = Annotated[
    int | None, _option("--chunk-size", "Most tokens of a batch, its decodes counted (the policy's knob).", _POLICY)
]
TokenBudget = Annotated[int | None, _option("--token-budget", "Most tokens of a batch.", _POLICY)]
MaxNumSeqs = Annotated[int | None, _option("--max-num-seqs", "Most requests admitted at once.", _POLICY)]
Ahead = Annotated[bool, _option("--async/--sync", "Plan one step ahead of the running one.", _POLICY)]
ModelName = Annotated[
    str, _option("--model", "Hugging Face folder, .gguf, smollm2, or a spec's name (random weights).", _ENGINE)
]
Device = Annotated[str, _option("--device", "auto, cpu, cuda or cuda:N.", _ENGINE)]
DType = Annotated[str, _option("--dtype", "Weights; auto is float32 on a CPU, the model's own on CUDA.", _ENGINE)]
KVDType = Annotated[str, _option("--kv-dtype", "Keys and values; auto is that of the weights.", _ENGINE)]
KernelSet = Annotated[str, _option("--kernels", "auto, native (C++), triton, compiled, plain_device, torch.", _ENGINE)]
Attention = Annotated[
    str, _option("--attention", "auto, flash_attn, triton, native, sdpa, flex, paged, reference.", _ENGINE)
]
Graphs = Annotated[str, _option("--graphs", "CUDA graphs: auto (on CUDA where they can be), on or off.", _ENGINE)]
Allocator = Annotated[str, _option("--allocator", "PyTorch's on CUDA: default, expandable or async.", _ENGINE)]
Streams = Annotated[
    bool, _option("--streams/--one-stream", "Chunks' and decodes' attention side by side (triton on CUDA).", _ENGINE)
]
Nvtx = Annotated[bool, _option("--nvtx", "Name passes and operators in a profiler's timeline (CUDA).", _ENGINE)]
Threads = Annotated[int | None, _option("--threads", "Threads of the model; PyTorch's own number by default.", _ENGINE)]
TP = Annotated[int, _option("--tp", "Ranks over which every layer is split; a process each.", _ENGINE)]
PP = Annotated[int, _option("--pp", "Pipeline stages; a process each.", _ENGINE)]
LayerSplit = Annotated[str | None, _option("--layer-split", "Layers of each stage, as 20,12.", _ENGINE)]
ChaseChunks = Annotated[
    bool, _option("--chase-chunks", "A prompt's next chunk may follow its last one through the stages.", _ENGINE)
]
Trim = Annotated[
    bool, _option("--trim-last-layer/--whole-last-layer", "Carry only sampled rows through the last layer.", _ENGINE)
]
MaxModelLen = Annotated[
    int | None,
    _option("--max-model-len", "Longest prompt + output; by default the trace's, if the model allows.", _ENGINE),
]
BlockSize = Annotated[int, _option("--block-size", "Tokens per KV block.", _MEMORY)]
NumBlocks = Annotated[
    int | None, _option("--num-blocks", "Usable KV blocks; by default what the trace needs.", _MEMORY)
]
MemoryShare = Annotated[
    float | None,
    _option("--memory-share", "KV pool: most of a CPU's free memory (0.5), or share of a GPU in use (0.9).", _MEMORY),
]
Watermark = Annotated[float | None, _option("--watermark", "Share of blocks that admission leaves free.", _MEMORY)]
Poison = Annotated[bool, _option("--poison", "Fill freed blocks with NaN (a check of the engine).", _MEMORY)]
PrefixCaching = Annotated[
    bool, _option("--prefix-caching", "Share the KV blocks of texts that agree from their beginning.", _MEMORY)
]
PreemptionKind = Annotated[
    str, _option("--preemption", "What preempted requests do: recompute, swap, or the cheaper (auto).", _MEMORY)
]
SwapGiB = Annotated[float, _option("--swap-gib", "Host memory to swap to, in GiB.", _MEMORY)]
SwapPage = Annotated[float, _option("--swap-page-mib", "Page of host memory, the unit of swapping, in MiB.", _MEMORY)]
LadderRungs = Annotated[
    str | None,
    _option(
        "--ladder", "Against full memory: preempt, plain, offload, oversubscribe, reject; or all, or none.", _MEMORY
    ),
]
TroubleFrom = Annotated[float, _option("--trouble-from", "Share of blocks in use from which memory is short.", _MEMORY)]
PlainTokens = Annotated[
    int, _option("--plain-tokens", "Most prefill tokens of a batch without decodes (rung plain).", _MEMORY)
]
Risk = Annotated[
    float,
    _option("--risk", "Answers counted on: 0 the longest allowed, 1 the expected (rung oversubscribe).", _MEMORY),
]
MaxWait = Annotated[
    float, _option("--max-wait", "Longest expected wait for a first token, in s (rung reject).", _MEMORY)
]
KVCompression = Annotated[
    str | None, _option("--kv-compression", "Pack old keys and values: kivi4, kivi2, delta8, ...", _MEMORY)
]
KVWindow = Annotated[int, _option("--kv-window", "Most recent tokens that stay in full precision.", _MEMORY)]
TimeScale = Annotated[float, _option("--time-scale", "Arrival times are multiplied by this.", _TRACE)]
AtOnce = Annotated[bool, _option("--as-fast-as-possible", "All requests arrive at once, in the trace's order.", _TRACE)]
Limit = Annotated[int | None, _option("--limit", "Only the first so many requests.", _TRACE)]
Seed = Annotated[int, _option("--seed", "Seed of weights, prompts and sampling.", _TRACE, min=0)]
PromptFile = Annotated[
    str | None, _option("--prompts", "Text file, one prompt a line, cut to the trace's lengths.", _ANSWER)
]
Temperature = Annotated[float, _option("--temperature", "0 is greedy.", _ANSWER)]
TopK = Annotated[int, _option("--top-k", "Sample among the k most likely; 0 for all.", _ANSWER)]
TopP = Annotated[float, _option("--top-p", "Sample among the most likely that hold this mass.", _ANSWER)]
IgnoreEos = Annotated[
    bool, _option("--ignore-eos/--stop-at-eos", "Answers have the trace's lengths, or end at a stop token.", _ANSWER)
]
Warmup = Annotated[str | None, _option("--warmup", "Requests (100) or seconds (30s) left out of statistics.", _OUTPUT)]
Slo = Annotated[str | None, _option("--slo", "Objective, as ttft_p99=2,tbt_p99=0.2 (seconds).", _OUTPUT)]
Out = Annotated[Path | None, _option("--out", "Folder for the run.", _OUTPUT)]
ConfigFile = Annotated[Path | None, _option("--config", "TOML with these flags, or a live run's config.json.", _OUTPUT)]
Json = Annotated[bool, _option("--json", "Print JSON only.", _OUTPUT)]
