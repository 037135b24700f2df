"""Replay a trace over a prefilling and a decoding process, and say how long every hand-over took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as processes

from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.live_pools.engines import DecodeEngine, PrefillEngine
from executor.live_pools.wire import Moved, Region, copy_times
from executor.machine.threads import set_threads
from executor.model.loading import Loaded
from executor.model.sampler import GREEDY
from executor.serving.live_engine import LiveEngine
from executor.serving.prompts import Prompts, random_prompts
from executor.serving.replay import load_for
from executor.serving.runner import Runner
from executor.serving.warm_up import warm_up
from metrics import Recorder
from policies import make_policy, make_scheduler
from workloads.trace import Trace

START_S = 120.0
"""How long the decoding process may take to load its model."""


@dataclass(frozen=True)
class PoolsRun:
    """answers: row -> output ids. ttft_s, e2e_s: row -> seconds from arrival. moved: every hand-over, in its order.

    copies: (bytes, seconds) of hand-overs tried before the run. ended: row -> status.
    """

    answers: dict[int, list[int]]
    ended: dict[int, str]
    ttft_s: dict[int, float]
    e2e_s: dict[int, float]
    moved: list[Moved]
    copies: list[tuple[int, float]]
    config: dict[str, Any] = field(default_factory=dict)


def replay_pools(trace: Trace, config: LiveConfig, *, decode: Mapping[str, Any] | None = None) -> PoolsRun:
    """Serve a trace with prompts in this process and answers in another one, on a CPU.

    config: of the prefilling engine, num_blocks included. decode: fields of it that differ on the decoding one (policy,
    knobs, num_blocks, max_num_seqs). Raises ExecutorError for what cannot be handed over yet.
    """
    refuse(trace, config)
    longest = config.max_model_len or int((trace.prompt_tokens + trace.max_output_tokens).max())
    decoding = replace(config, **(decode or {}))
    set_threads(config.threads)
    loaded = load_for(config, longest)
    engine = _engine(PrefillEngine, config, loaded, trace, longest)
    assert isinstance(engine, PrefillEngine)
    cache = engine.runner.cache
    region = Region.for_pool(cache, -(-int(trace.prompt_tokens.max()) // config.block_size))
    copies = copy_times(region, cache)
    context = processes.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_decode, args=(theirs, region.memory, decoding, longest, torch.get_num_threads()), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_S) or ours.recv() != "ready":
            raise ExecutorError("the decoding process did not start")
        warm_up(engine.runner)
        engine.begin(ours, region)
        engine.run()
        engine.finish()
        process.join(10.0)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise ExecutorError("the decoding process has ended before its requests had") from None
    finally:
        if process.is_alive():
            process.kill()
        ours.close()
    return _result(trace, engine, copies, config, decoding)


def refuse(trace: Trace, config: LiveConfig) -> None:
    """ExecutorError for what a hand-over between live engines does not know yet."""
    for name, plain, flag in (
        ("tp", 1, "--tp"),
        ("pp", 1, "--pp"),
        ("temperature", 0.0, "--temperature"),
        ("kv_compression", None, "--kv-compression"),
        ("preemption", "recompute", "--preemption"),
    ):
        if getattr(config, name) != plain:
            raise ExecutorError(f"{flag} with live pools: not yet; leave it out")
    if config.device not in ("cpu", "auto") or (config.device == "auto" and torch.cuda.is_available()):
        raise ExecutorError(
            "live pools: hand-over is through shared memory of a CPU yet (NCCL or NIXL on GPUs); take cpu"
        )
    if trace.closed_loop:
        raise ExecutorError(f"{trace.name}: found a closed-loop trace, expected an open one for live pools")
    if config.num_blocks is None:
        raise ExecutorError("live pools: found no --num-blocks, expected the KV blocks of each engine")


def _engine(cls: type[LiveEngine], config: LiveConfig, loaded: Loaded, trace: Trace, longest: int) -> LiveEngine:
    assert config.num_blocks is not None
    scheduler = make_scheduler(
        make_policy(config.policy, config.knobs),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=min(longest, loaded.max_tokens),
        max_num_seqs=config.max_num_seqs,
        token_budget=config.token_budget,
        by_id=True,
    )
    cache = loaded.new_cache(scheduler.ledger.total_blocks, config.block_size)
    runner = Runner(loaded, cache, scheduler.ledger, longest)
    prompts: Prompts = random_prompts(trace, loaded.spec.vocab, config.seed) if len(trace) else _no_prompt
    return cls(
        scheduler, runner, Recorder(), trace, prompts, sampling=lambda row: GREEDY,
        time_scale=config.time_scale, at_once=config.as_fast_as_possible,
    )  # fmt: skip


def _no_prompt(row: int) -> np.ndarray:
    raise AssertionError("the decoding engine computes no prompt")


def _decode(connection: Connection, memory: torch.Tensor, config: LiveConfig, longest: int, threads: int) -> None:
    """The decoding process."""
    torch.set_num_threads(threads)
    none = np.zeros(0, np.int64)
    loaded = load_for(config, longest)
    engine = _engine(DecodeEngine, config, loaded, Trace("nothing", none, none, none, none), longest)
    assert isinstance(engine, DecodeEngine)
    warm_up(engine.runner)
    connection.send("ready")
    engine.serve(connection, Region(memory), connection.recv())


def _result(
    trace: Trace, engine: PrefillEngine, copies: list[tuple[int, float]], config: LiveConfig, decoding: LiveConfig
) -> PoolsRun:
    scale = 0.0 if config.as_fast_as_possible else config.time_scale
    arrival = {row: round(int(at) * scale) for row, at in enumerate(trace.arrival_ns.tolist())}
    ended = engine.ended
    moved = sorted((each.moved for each in ended.values() if each.moved), key=lambda move: move.begun_ns)
    return PoolsRun(
        {row: each.output for row, each in ended.items()},
        {row: each.status for row, each in ended.items()},
        {row: (at - arrival[row]) / 1e9 for row, at in engine.first_token_ns.items()},
        {row: (each.finished_ns - arrival[row]) / 1e9 for row, each in ended.items() if each.status == "finished"},
        moved,
        copies,
        {"prefill": config.policy, "decode": decoding.policy, "block_size": config.block_size},
    )
