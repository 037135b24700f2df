"""SARATHI's pipeline study (Sec. 5.3) beside our own runs: GPT-3 on 64 A100s, and where bubbles fall from 38 % to 5 %.

Nothing here is fitted to the paper: costs are the roofline's, and so are the differences (docs/concepts/pipelines.md).
Sequence lengths (prompt + output) are Zipf distributed between 1K and 4K, all requests wait at time 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import replace as with_fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.errors import ExperimentError

if TYPE_CHECKING:
    from profiler.cost_model import CostModel
    from workloads import Trace

MODEL, GPU, LONGEST = "gpt-3-175b", "a100", 4096
SLOTS_PIPELINE, SLOTS_REPLICA = 27, 11
"""Requests per micro-batch (TP8 PP8) and per replica (TP8) that the paper runs."""

PAPER = {
    "median bubble time per request, Orca / SARATHI": 6.29,
    "completion, Orca TP8 PP8 / SARATHI TP8 PP8": 1.91,
    "completion, eight TP8 replicas / SARATHI TP8 PP8": 1.48,
    "completion, Orca TP8 PP8 / eight TP8 replicas": 1.28,
}
"""SARATHI (arXiv 2308.16369v1), Sec. 5.3 and Fig. 12."""


@dataclass(frozen=True)
class Deployment:
    """One way to use 64 GPUs: a policy, its knobs, and how they are joined (link: what lies between stages)."""

    name: str
    policy: str
    knobs: Mapping[str, Any]
    pp: int = 8
    replicas: int = 1
    slots: int = SLOTS_PIPELINE
    link: str = "network"


@dataclass(frozen=True)
class Outcome:
    """What a deployment did. Bubbles are those of pipelines: shares of in-flight stage time, seconds per request."""

    name: str
    finished: int
    completion_s: float
    iterations: int
    bubble_share: float | None = None
    bubble_share_by_cause: Mapping[str, float] = field(default_factory=dict)
    request_bubble_s_p50: float | None = None
    cost_model: str = ""
    request_bubble_s: Sequence[float] = ()
    """Percentiles 0 to 100 of the bubble time of a request."""


def deployments(chunk_size: int = 256) -> tuple[Deployment, ...]:
    """SARATHI and best-case Orca in one pipeline, and eight replicas under Orca and (beyond the paper) SARATHI.

    Best case: at most one whole prompt in a batch, so that batches differ as little as whole prompts allow.
    """
    sarathi = {"chunk_size": chunk_size}
    orca = {"reserve": "longest", "max_prompts": 1}
    return (
        Deployment("SARATHI TP8 PP8", "decode_maximal", sarathi),
        Deployment("Orca TP8 PP8", "orca", {**orca, "max_batch_size": SLOTS_PIPELINE}),
        Deployment("Orca 8 x TP8", "orca", {**orca, "max_batch_size": SLOTS_REPLICA}, 1, 8, SLOTS_REPLICA),
        Deployment("SARATHI 8 x TP8", "decode_maximal", sarathi, 1, 8, SLOTS_REPLICA),
    )


def pipeline_trace(
    requests: int = 10_000, *, lengths: str = "zipf:0.4,1024,4096", pd: float = 10.0, seed: int = 0
) -> Trace:
    """Requests that all wait at time 0. lengths: of prompt and output together; pd: prompt / output tokens."""
    import numpy as np

    from workloads import Trace
    from workloads.generating.lengths import parse, uniform_draws
    from workloads.generating.random_streams import random_stream

    if requests < 1 or not pd > 0:
        raise ExperimentError(f"trace: found {requests} requests with P:D {pd}, expected at least 1 and above 0")
    total = parse(lengths).of(uniform_draws(requests, random_stream(seed)))
    output = np.maximum(1, np.rint(total / (pd + 1))).astype(np.int64)
    prompt = np.maximum(1, total - output)
    return Trace(f"{lengths}, P:D {pd:g}", np.zeros(requests, np.int64), prompt, output, output)


def run_deployment(deployment: Deployment, trace: Trace, cost: CostModel | None = None) -> Outcome:
    """Replay the trace on one deployment. KV memory holds as many requests of the longest length as there are slots."""
    import numpy as np

    from metrics.pipelines.bubbles import find_bubbles
    from metrics.pipelines.request_bubbles import request_bubble_ns
    from simulator import ReplayConfig, replay

    config = ReplayConfig(
        policy=deployment.policy,
        knobs=deployment.knobs,
        model=MODEL,
        gpu=GPU,
        cost_model="roofline",
        tp=8,
        pp=deployment.pp,
        pp_link=deployment.link,
        replicas=deployment.replicas,
        max_model_len=LONGEST,
        num_blocks=deployment.slots * deployment.pp * (LONGEST // 16),
    )
    run = replay(trace, config, cost=cost)
    summary = run.summary
    shown = (deployment.name, summary["finished"], summary["duration_s"], summary["iterations"])
    name = str(run.config["cost_model"])
    if deployment.pp == 1:
        return Outcome(*shown, cost_model=name)
    bubbles = find_bubbles(run.tables)
    percentiles = np.percentile(request_bubble_ns(run.tables, bubbles) / 1e9, range(101)).tolist()
    return Outcome(*shown, bubbles.share, bubbles.cause_shares, percentiles[50], name, percentiles)


def sarathi_pipeline(
    requests: int = 10_000, *, seed: int = 0, chunk_size: int = 256, kv_efficiency: float | None = None
) -> dict[str, Any]:
    """Run all deployments; returns their outcomes and the paper's ratios beside ours.

    kv_efficiency: a what-if, decode attention at this share of memory bandwidth instead of the roofline's own.
    """
    trace = pipeline_trace(requests, seed=seed)
    outcomes = [run_deployment(each, trace, _cost(each.pp, kv_efficiency)) for each in deployments(chunk_size)]
    sarathi, orca, replicas, _ = outcomes
    assert sarathi.request_bubble_s_p50 is not None
    assert orca.request_bubble_s_p50 is not None
    ours = {
        "median bubble time per request, Orca / SARATHI": orca.request_bubble_s_p50 / sarathi.request_bubble_s_p50,
        "completion, Orca TP8 PP8 / SARATHI TP8 PP8": orca.completion_s / sarathi.completion_s,
        "completion, eight TP8 replicas / SARATHI TP8 PP8": replicas.completion_s / sarathi.completion_s,
        "completion, Orca TP8 PP8 / eight TP8 replicas": orca.completion_s / replicas.completion_s,
    }
    return {
        "requests": requests,
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "ratios": [{"what": what, "paper": paper, "ours": ours[what]} for what, paper in PAPER.items()],
    }


def bubble_survey(
    requests: int = 400,
    *,
    pds: Sequence[float] = (1, 2, 5, 10, 20, 50),
    lengths: Sequence[str] = ("zipf:0.4,1024,4096", "fixed:2048"),
    link: str = "link",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Bubble shares of 8 stages for whole-prompt and chunking policies over P:D and spread of lengths.

    link: what lies between the stages; a network alone costs this pipeline 2 % (its transfers are bubbles too).
    """
    contenders = {
        "orca, one prompt": Deployment("", "orca", {"reserve": "longest", "max_batch_size": 27, "max_prompts": 1}),
        "orca": Deployment("", "orca", {"reserve": "longest", "max_batch_size": 27}),
        "prefill_priority": Deployment("", "prefill_priority", {}),
        "decode_maximal 256": Deployment("", "decode_maximal", {"chunk_size": 256}),
        "chunked 512": Deployment("", "chunked", {"chunk_size": 512}),
    }
    rows = []
    for spread in lengths:
        for pd in pds:
            trace = pipeline_trace(requests, lengths=spread, pd=pd, seed=seed)
            shares = {
                name: run_deployment(with_fields(each, link=link), trace).bubble_share
                for name, each in contenders.items()
            }
            rows.append({"lengths": spread, "pd": pd, **shares})
    return rows


def _cost(pp: int, kv_efficiency: float | None) -> CostModel | None:
    if kv_efficiency is None:
        return None
    from profiler import load_cost_model
    from profiler.roofline.constants import RooflineConstants

    return load_cost_model(
        MODEL,
        GPU,
        cost_model="roofline",
        tp=8,
        pp=pp,
        pipeline_link="network",
        constants=RooflineConstants(kv_efficiency=kv_efficiency),
    )


def register(app: typer.Typer) -> None:
    app.command("sarathi-pipeline")(command)


def command(
    requests: Annotated[
        int | None, typer.Option(help="Requests; 10,000 as in the paper, 400 each of the survey.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the lengths.", min=0)] = 0,
    chunk_size: Annotated[int, typer.Option(help="SARATHI's chunk size.")] = 256,
    kv_efficiency: Annotated[
        float | None, typer.Option(help="What if decode attention reached only this share of memory bandwidth?")
    ] = None,
    link: Annotated[str, typer.Option(help="Between the stages of the survey: link (NVLink) or network.")] = "link",
    survey: Annotated[
        bool, typer.Option("--survey", help="Bubble shares over P:D and lengths instead: where do 38 % become 5 %?")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """SARATHI Sec. 5.3: GPT-3 on 64 A100s, one pipeline against eight replicas, paper beside ours."""
    if survey:
        if kv_efficiency is not None or chunk_size != 256:
            raise ExperimentError("--survey: takes no --chunk-size and no --kv-efficiency")
        rows = bubble_survey(400 if requests is None else requests, link=link, seed=seed)
        print(json.dumps(rows, indent=2)) if as_json else _print_survey(rows)
        return
    result = sarathi_pipeline(
        10_000 if requests is None else requests, seed=seed, chunk_size=chunk_size, kv_efficiency=kv_efficiency
    )
    print(json.dumps(result, indent=2)) if as_json else _print(result)


def _print(result: Mapping[str, Any]) -> None:
    print(f"{'deployment':<18}{'completion':>12}{'batches':>10}{'bubbles':>10}{'per request':>13}")
    for row in result["outcomes"]:
        piped = row["bubble_share"] is not None
        bubbles = f"{row['bubble_share']:>10.1%}{row['request_bubble_s_p50']:>11.2f} s" if piped else ""
        print(f"{row['name']:<18}{row['completion_s']:>10,.0f} s{row['iterations']:>10,}{bubbles}")
        if piped:
            causes = sorted(row["bubble_share_by_cause"].items(), key=lambda cause: -cause[1])
            print("    " + ", ".join(f"{name} {share:.1%}" for name, share in causes if share >= 0.0005))
    print(f"\n{'':<50}{'paper':>8}{'ours':>8}")
    for row in result["ratios"]:
        print(f"{row['what']:<50}{row['paper']:>8.2f}{row['ours']:>8.2f}")
    print("costs: roofline (uncalibrated)")


def _print_survey(rows: Sequence[Mapping[str, Any]]) -> None:
    names = [name for name in rows[0] if name not in ("lengths", "pd")]
    print(f"{'lengths':<22}{'P:D':>5}" + "".join(f"{name:>20}" for name in names))
    for row in rows:
        print(f"{row['lengths']:<22}{row['pd']:>5g}" + "".join(f"{row[name]:>20.1%}" for name in names))
    print("costs: roofline (uncalibrated)")
