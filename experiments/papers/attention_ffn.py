"""Attention and FFN on devices of their own: what throughput that costs, or brings, at each bound on latency.

All ways to use a number of devices are compared by their frontier: the most output tokens per second of a decode-only
iteration whose time stays within the bound and whose contexts fit in memory. Costs are the roofline's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.errors import ExperimentError

if TYPE_CHECKING:
    from simulator.replica.replica_kind import Engine

BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)

MOST_DEVICES = 1024


@dataclass(frozen=True)
class Point:
    """One way to run one batch: decodes over all replicas, time between two tokens, tokens per second."""

    setup: str
    decodes: int
    tbt_s: float
    tokens_per_s: float


def frontiers(
    *,
    model: str = "llama-3.1-70b",
    gpu: str = "h100",
    devices: int = 8,
    context: int = 2048,
    bounds_ms: Sequence[float] = (10, 12, 15, 20, 25, 30, 40, 50, 75, 100),
    link: str = "network",
) -> list[dict[str, Any]]:
    """Per bound: the best point together, the best apart, and the throughput lost by going apart (negative: won).

    together: any number of equal tensor-parallel replicas on these devices. apart: any division into an attention and
    an FFN group with 1 to 4 micro-batches, `link` between them (network, or link for NVLink).
    """
    if not 1 <= context <= 10**9:
        raise ExperimentError(f"--context: found {context}, expected 1 to 1e9 tokens")
    _check_names(model, gpu, devices, link)
    together = [point for setup in _together(model, gpu, devices) for point in _points(*setup, context)]
    apart = [point for setup in _apart(model, gpu, devices, link) for point in _points(*setup, context)]
    if not together or not apart:
        raise ExperimentError(f"{model} fits on {devices} x {gpu} in no way both together and apart")
    rows = []
    for bound in bounds_ms:
        best = [_best(points, bound / 1e3) for points in (together, apart)]
        lost = 1 - best[1].tokens_per_s / best[0].tokens_per_s if best[0] and best[1] else None
        rows.append({"bound_ms": bound, "together": _row(best[0]), "apart": _row(best[1]), "throughput_lost": lost})
    return rows


def _check_names(model: str, gpu: str, devices: int, link: str) -> None:
    """What is wrong in itself is told as such; what remains are setups that do not fit."""
    from profiler import load_hardware, load_model_spec
    from simulator.replica.attention_ffn_apart import make_apart

    load_model_spec(model)
    load_hardware(gpu)
    make_apart({"attention": 1, "ffn": 1, "link": link})
    if not 2 <= devices <= MOST_DEVICES:
        raise ExperimentError(f"--devices: found {devices}, expected 2 (one of each group) to {MOST_DEVICES}")


def _together(model: str, gpu: str, devices: int) -> Iterator[tuple[str, int, Engine]]:
    for tp in (1, 2, 4, 8, 16):
        if tp <= devices and devices % tp == 0 and (engine := _engine(model, gpu, tp=tp)):
            yield f"{devices // tp} x TP{tp}", devices // tp, engine


def _apart(model: str, gpu: str, devices: int, link: str) -> Iterator[tuple[str, int, Engine]]:
    for attention in (1, 2, 4, 8, 16):
        ffn = devices - attention
        for micro_batches in (1, 2, 3, 4):
            afd = {"attention": attention, "ffn": ffn, "micro_batches": micro_batches, "link": link}
            if ffn > 0 and (engine := _engine(model, gpu, afd=afd)):
                yield f"{attention} + {ffn}, {micro_batches} micro-batches", 1, engine


def _engine(model: str, gpu: str, **settings: Any) -> Engine | None:
    """The engine of a setup; None where the model does not fit or cannot be split so."""
    from profiler import ProfileError
    from simulator import ReplayConfig, SimulationError
    from simulator.replica.replica_kind import make_engine
    from workloads import generate

    config = ReplayConfig(policy="vllm_v1", model=model, gpu=gpu, cost_model="roofline", **settings)
    try:
        return make_engine(config, generate(requests=1))
    except (ProfileError, SimulationError):
        return None


def _points(setup: str, replicas: int, engine: Engine, context: int) -> Iterator[Point]:
    """Decode iterations of growing batches, each replica with its share, as far as KV memory reaches."""
    from policies import BatchShape

    most = engine.num_blocks * engine.config.block_size // context
    for decodes in BATCHES:
        share = -(-decodes // replicas)
        if share > most:
            return
        shape = BatchShape((), share, share * context, context, 0, share)
        tbt = (sum(engine.cost.host_ns(shape)) + engine.cost.stage_ns(shape)) / 1e9
        yield Point(setup, decodes, tbt, decodes / tbt)


def _best(points: Sequence[Point], bound_s: float) -> Point | None:
    within = [point for point in points if point.tbt_s <= bound_s]
    return max(within, key=lambda point: point.tokens_per_s, default=None)


def _row(point: Point | None) -> dict[str, Any] | None:
    if point is None:
        return None
    return {
        "setup": point.setup,
        "decodes": point.decodes,
        "tbt_ms": point.tbt_s * 1e3,
        "tokens_per_s": point.tokens_per_s,
    }


def register(app: typer.Typer) -> None:
    app.command("attention-ffn")(command)


def command(
    model: Annotated[str, typer.Option(help="Model.")] = "llama-3.1-70b",
    gpu: Annotated[str, typer.Option(help="GPU of all devices.")] = "h100",
    devices: Annotated[int, typer.Option(help="Devices in all.")] = 8,
    context: Annotated[int, typer.Option(help="Tokens of context of each decode.")] = 2048,
    link: Annotated[str, typer.Option(help="Between the groups: network, or link (NVLink).")] = "network",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Attention and FFN together or apart: most throughput within each bound on the time between tokens."""
    rows = frontiers(model=model, gpu=gpu, devices=devices, context=context, link=link)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{model} on {devices} x {gpu}, contexts of {context}, {link} between the groups; output tokens/s")
    print(f"{'TBT within':>10}  {'together':<34}{'apart':<46}{'lost':>8}")
    for row in rows:
        lost = f"{row['throughput_lost']:>8.0%}" if row["throughput_lost"] is not None else ""
        print(f"{row['bound_ms']:>7g} ms  {_text(row['together']):<34}{_text(row['apart']):<46}{lost}")
    print("costs: roofline (uncalibrated)")


def _text(row: Mapping[str, Any] | None) -> str:
    return "-" if row is None else f"{row['tokens_per_s']:>7,.0f}  {row['setup']}, {row['decodes']} decodes"
