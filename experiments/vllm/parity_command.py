"""`python -m experiments parity`: hold `vllm_v1` against the step log of a real vLLM engine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    app.command("parity")(parity)


def parity(
    steps: Annotated[
        Path, typer.Argument(help="Step log: one JSON object a line with t and reqs, or such a table (.parquet).")
    ],
    requests: Annotated[Path, typer.Argument(help="Request log: id, prompt, output, added in each line or row.")],
    token_budget: Annotated[int, typer.Option(help="Most tokens of a batch of the engine.")],
    num_blocks: Annotated[int, typer.Option(help="KV blocks of the engine, the null block included.")],
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")],
    max_num_seqs: Annotated[int, typer.Option(help="max_num_seqs of the engine.")],
    prefix_caching: Annotated[bool, typer.Option("--prefix-caching", help="The engine's prefix cache was on.")] = False,
    long_prefill_token_threshold: Annotated[int, typer.Option(help="The engine's setting, 0 for none.")] = 0,
    free_order: Annotated[str, typer.Option(help="Free-list order: 0.32 or 0.19.")] = "0.32",
    reserve_full: Annotated[
        bool, typer.Option("--reserve-full/--no-reserve-full", help="Admit only whole prompts that fit (0.19 on).")
    ] = True,
    speculation: Annotated[
        str, typer.Option(help="How the engine speculated, with the drafts of a step: ngram:4, draft:3, eagle:4.")
    ] = "",
    max_model_len: Annotated[int, typer.Option(help="The engine's longest sequence; 0 where none comes near it.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Every step of a vLLM log: same requests, order, tokens and contexts (and drafts)? Exit code 1 if not."""
    from experiments.vllm.parity import compare_with_vllm

    result = compare_with_vllm(
        steps,
        requests,
        token_budget=token_budget,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching,
        long_prefill_token_threshold=long_prefill_token_threshold,
        free_order=free_order,
        reserve_full=reserve_full,
        speculation=speculation,
        max_model_len=max_model_len,
    )
    if as_json:
        print(json.dumps({**asdict(result), "exact": result.exact}, indent=2))
    else:
        print(f"steps {result.steps}, matched {result.matched}, preemptions {result.preemptions}", end="")
        print(f", free blocks compared {result.free_blocks_checked} times" if result.free_blocks_checked else "")
        if result.divergence is not None:
            _print_divergence(result.divergence)
    if not result.exact:
        raise typer.Exit(1)


def _print_divergence(divergence: Any) -> None:
    print(f"first divergence at step {divergence['step']}:")
    for side in ("vllm", "ours"):
        counts = [f"{name} {value}" for name, value in divergence[side].items() if name != "reqs"]
        print(f"  {side}: {', '.join(counts)}")
        print("    " + " ".join(f"{row[0]}:{row[1]}@{row[2]}" + _drafts(row) for row in divergence[side]["reqs"]))


def _drafts(row: Any) -> str:
    return f"({row[3]} drafts)" if len(row) > 3 else ""
