"""`python -m experiments live-pools`: prompts in one process, answers in another, beside what the simulator says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from experiments.errors import ExperimentError
from experiments.validation.comparing.hand_overs import HandOvers, compare_hand_overs

if TYPE_CHECKING:
    from executor.config import LiveConfig
    from executor.live_pools import PoolsRun
    from profiler.cost_model import CostModel
    from workloads.trace import Trace


def register(app: typer.Typer) -> None:
    app.command("live-pools")(live_pools_command)


def live_pools_command(
    trace: Annotated[Path, typer.Argument(help="Trace file.")],
    model: Annotated[str, typer.Option(help="Model, as the executor takes it.")] = "nano",
    policy: Annotated[str, typer.Option(help="Of the process that computes prompts.")] = "prefill_priority",
    decode_policy: Annotated[str, typer.Option(help="Of the process that decodes.")] = "chunked",
    num_blocks: Annotated[int, typer.Option(help="KV blocks of the prefill process.", min=1)] = 2000,
    decode_blocks: Annotated[int, typer.Option(help="KV blocks of the decode process.", min=1)] = 2000,
    limit: Annotated[int, typer.Option(help="Requests of the trace that are used.", min=1)] = 40,
    time_scale: Annotated[float, typer.Option(help="Arrival times are multiplied by this.")] = 1.0,
    threads: Annotated[int, typer.Option(help="Threads of each process.", min=1)] = 1,
    cost_model: Annotated[
        Path | None, typer.Option(help="Model fitted on this machine, as calibrate writes it: also simulate.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and prompts.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Serve a trace with live prefill and decode pools on this CPU, and hold hand-overs beside their prediction."""
    from executor.config import LiveConfig
    from executor.live_pools import replay_pools
    from workloads import read_trace

    if not time_scale > 0:
        raise ExperimentError(f"--time-scale: found {time_scale:g}, expected above 0")
    requests = read_trace(trace).head(limit)
    config = LiveConfig(
        model=model, device="cpu", threads=threads, policy=policy, num_blocks=num_blocks, seed=seed,
        time_scale=time_scale,
    )  # fmt: skip
    run = replay_pools(requests, config, decode={"policy": decode_policy, "num_blocks": decode_blocks})
    found = compare_hand_overs(run)
    facts: dict[str, Any] = {"hand_overs": found.as_dict(), "live": measured(run)}
    if cost_model is not None:
        from profiler.iterations.iteration_file import read_fit
        from profiler.iterations.iteration_model import IterationModel

        costs = IterationModel(read_fit(cost_model))
        device = str(cost_model.parent / "device.toml")
        facts["simulated"] = simulated(requests, config, decode_policy, decode_blocks, found, device, costs)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for line in lines_of(found, facts):
        print(line)


def measured(run: PoolsRun) -> dict[str, float]:
    """Medians of a live run: seconds from arrival, and from a first token to the arrival of its KV."""
    return {
        "finished": float(sum(status == "finished" for status in run.ended.values())),
        "ttft_s_p50": float(np.median(list(run.ttft_s.values()))),
        "e2e_s_p50": float(np.median(list(run.e2e_s.values()))),
        "after_prompt_s_mean": float(np.mean([(move.ended_ns - move.asked_ns) / 1e9 for move in run.moved])),
    }


def simulated(
    trace: Trace,
    config: LiveConfig,
    decode_policy: str,
    decode_blocks: int,
    found: HandOvers,
    device: str,
    cost: CostModel | None = None,
) -> dict[str, float]:
    """The same of the simulator: two pools of one replica, the link that was fitted before the run, and costs as given.

    device: a GPU's name or a hardware table. cost: of both pools; the roofline if not given.
    """
    from simulator import ReplayConfig, replay

    pools: tuple[Mapping[str, Any], ...] = (
        {"role": "prefill", "replicas": 1},
        {"role": "decode", "replicas": 1, "policy": decode_policy, "num_blocks": decode_blocks},
    )
    scaled = trace.scaled(1.0 / config.time_scale) if config.time_scale != 1.0 else trace
    settings = ReplayConfig(
        model=config.model, gpu=device, dtype="float32", policy=config.policy,
        num_blocks=config.num_blocks, block_size=config.block_size, pools=pools,
        kv_latency_s=found.link.latency_s, kv_bandwidth=found.link.bytes_per_s,
    )  # fmt: skip
    run = replay(scaled, settings, cost=cost)
    summary, moved = run.summary, run.config["cluster"]["kv"]
    return {
        "finished": float(summary["finished"]),
        "ttft_s_p50": float(summary["ttft_s_p50"]),
        "e2e_s_p50": float(summary["e2e_s_p50"]),
        "after_prompt_s_mean": float(moved["after_prompt_s_mean"]),
    }


def lines_of(found: HandOvers, facts: Mapping[str, Any]) -> list[str]:
    """What a person reads."""
    lines = [
        f"{found.moves} hand-overs, {found.moved_bytes / 2**20:.1f} MiB",
        f"copies: {found.measured_s * 1e6:,.0f} us measured, {found.predicted_s * 1e6:,.0f} us predicted (medians), "
        f"{found.error:+.1%} in the middle; link: {found.link.latency_s * 1e6:,.0f} us and "
        f"{found.link.bytes_per_s / 1e9:.2f} GB/s, fitted before the run",
        f"beside them: {found.room_s * 1e3:.2f} ms until the decode pool had room, {found.engines_s * 1e3:.2f} ms "
        "until it had ended a batch (medians)",
    ]
    for name in ("live", "simulated"):
        if name in facts:
            each = facts[name]
            lines.append(
                f"{name}: {each['finished']:.0f} finished, TTFT {each['ttft_s_p50'] * 1e3:.1f} ms, E2E "
                f"{each['e2e_s_p50'] * 1e3:.1f} ms (medians), KV arrived {each['after_prompt_s_mean'] * 1e3:.2f} ms "
                "after its prompt (mean)"
            )
    return lines
