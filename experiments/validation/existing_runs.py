"""A validation against runs that exist already: live run folders of ours, or logs of another engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import ExperimentError
from experiments.running.report_document import Block, Bullets, Heading, Picture, Table, Text, write_document
from experiments.validation.comparing.batch_agreement import Agreement, agreement, scheduler_of
from experiments.validation.comparing.fed_with_measured_times import Fed, feed, model_of_run, why_not_fed
from experiments.validation.comparing.live_side import PolicyChoice
from experiments.validation.comparing.statistics import Comparison, Iterations, compare
from experiments.validation.other_engines import OtherRun, read_other_run
from experiments.validation.pages.report import statistics_table
from metrics.measures.summary_keys import BASIS

if TYPE_CHECKING:
    from metrics import RunTables
    from profiler.cost_model import CostModel
    from simulator.config import ReplayConfig
    from workloads import Trace

ENSEMBLE = 31
SAME = (
    "policy",
    "knobs",
    "model",
    "dtype",
    "num_blocks",
    "block_size",
    "token_budget",
    "max_num_seqs",
    "max_model_len",
    "tp",
    "pp",
    "trace",
)
"""What repeats of one live run have in common, beside all settings of `live` but its seed."""

UNKNOWN = {
    "preemption": ("recompute", "what moving a block took is not in its folder"),
    "ladder": (None, "it acts on times and rates that are not in its folder"),
    "kv_compression": (None, "costs of packed keys and values are not in its folder"),
}
"""Settings of a live run that cannot be simulated from its folder, unless they are as given here, and why."""


@dataclass
class AgainstResult:
    """What was compared: one policy, one workload; agreements only where the reference has batches. basis: what the
    predicted run's costs rest on (`metrics.measures.summary_keys.BASIS`)."""

    name: str
    cost_name: str
    basis: Mapping[str, Any]
    comparisons: list[Comparison]
    agreements: dict[str, Agreement]
    fed: dict[str, Fed | str]
    iterations: Iterations | None
    inside: float
    simulated: RunTables | None = None
    """The predicted run."""
    runs: dict[str, RunTables] = field(default_factory=dict)
    """Live run folders by name; none of another engine's log."""


def validate_against(
    references: Sequence[Path],
    *,
    cost_model: str,
    gpu: str | None,
    model: str | None,
    options: dict[str, Any],
    say: Callable[[str], None],
) -> AgainstResult:
    """Simulate what the references served, and compare.

    references: run folders of one policy and workload (repeats), or one log of another engine. cost_model: as for the
    simulator. gpu, model: needed for another engine's log. options: fields of ReplayConfig that a log does not say.
    """
    from metrics import is_run_folder, read_run

    if all(is_run_folder(path) for path in references):
        return _against_ours([read_run(path) for path in references], references, cost_model, gpu, say)
    if len(references) > 1:
        raise ExperimentError(
            "--against: several references have to be run folders; expected one log of another engine"
        )
    if gpu is None or model is None:
        raise ExperimentError("--against: another engine's log does not say what it ran on: give --model and --gpu")
    return _against_other(read_other_run(references[0]), cost_model, gpu, model, options, say)


def trace_of_run(run: RunTables) -> Trace:
    """The requests of a run as they arrived, by row; answers that never ended have their declared length."""
    from workloads import Trace

    frame = run.frame("requests").sort_values("request").reset_index(drop=True)
    if frame["request"].tolist() != list(range(len(frame))):
        raise ExperimentError("--against: found a run without some of its requests, expected rows 0, 1, 2, ...")
    arrival = np.rint(frame["arrival_s"].to_numpy() * 1e9).astype(np.int64)
    if (np.diff(arrival) < 0).any():
        raise ExperimentError(
            "--against: found a closed-loop run, whose arrivals are not in row order; expected an open one"
        )
    finished = (frame["status"] == "finished").to_numpy()
    output = np.where(finished, frame["output_tokens"], frame["max_output_tokens"])
    return Trace(
        str(run.config.get("trace", {}).get("name", "run")),
        arrival,
        frame["prompt_tokens"].to_numpy(),
        output,
        frame["max_output_tokens"].to_numpy(),
        priority=frame["priority"].to_numpy(),
        session=[_name(value) for value in frame["session"]],
        slo=[_name(value) for value in frame["slo"]],
        tenant=[_name(value) for value in frame["tenant"]],
        program=[_name(value) for value in frame["program"]],
    )


def config_of_run(run: RunTables, path: Path) -> ReplayConfig:
    """How the simulator serves what a live run served. ExperimentError for a run that its folder says too little of."""
    from simulator.config import ReplayConfig

    config, live, knobs = run.config, run.config.get("live", {}), dict(run.config["knobs"])
    for name, (plain, why) in UNKNOWN.items():
        if live.get(name, plain) != plain:
            flag = name.replace("_", "-")
            raise ExperimentError(f"{path}: found a live run with --{flag} {live[name]}, expected one without: {why}")
    if (live.get("prefix_caching") or knobs.get("prefix_caching")) and run.column("requests", "cached_tokens").any():
        raise ExperimentError(
            f"{path}: found a live run whose requests shared prefixes, expected one without: its folder does not say "
            "which texts are equal"
        )
    if config.get("ahead"):
        if "async_scheduling" not in knobs:
            raise ExperimentError(
                f"{path}: found a live run of {config['policy']} with --ahead, expected one without: the simulator "
                "plans ahead under policies with the knob async_scheduling alone"
            )
    if "async_scheduling" in knobs:
        knobs["async_scheduling"] = bool(config.get("ahead"))
    split = config.get("layer_split")
    return ReplayConfig(
        policy=str(config["policy"]),
        knobs=knobs,
        model=model_of_run(config),
        tp=int(config.get("tp") or 1),
        pp=int(config.get("pp") or 1),
        layer_split=tuple(split) if split else None,
        token_budget=config["token_budget"],
        max_num_seqs=config["max_num_seqs"],
        max_model_len=config["max_model_len"],
        block_size=config["block_size"],
        num_blocks=config["num_blocks"],
        watermark=live.get("watermark"),
        chase_chunks=bool(live.get("chase_chunks")),
        prefix_caching=bool(live.get("prefix_caching")),
        warmup=live.get("warmup"),
    )


def _live(run: RunTables) -> dict[str, Any]:
    return {name: value for name, value in run.config.get("live", {}).items() if name != "seed"}


def _against_ours(
    runs: Sequence[RunTables], paths: Sequence[Path], cost_model: str, gpu: str | None, say: Callable[[str], None]
) -> AgainstResult:
    first = runs[0].config
    for run, path in zip(runs, paths):
        same = all(run.config.get(key) == first.get(key) for key in SAME) and _live(run) == _live(runs[0])
        if run.config.get("world") != "live" or not same:
            raise ExperimentError(
                f"{path}: found a run of another world, policy, engine or trace, expected repeats of one live run"
            )
    config = config_of_run(runs[0], paths[0])
    trace = trace_of_run(runs[0])
    kv_dtype = first.get("kv_dtype") if first.get("kv_dtype") != first.get("dtype") else "auto"
    cost = _cost(
        cost_model,
        config.model,
        gpu,
        str(first.get("dtype", "auto")),
        config.tp,
        config.pp,
        config.layer_split,
        str(kv_dtype),
    )
    comparisons, simulated = _compare(str(first["policy"]), trace, config, cost, [run.summary for run in runs], say)
    agreements, fed, residuals = {}, {}, []
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    for run, name in zip(runs, names):
        own = trace_of_run(run)
        agreements[name] = agreement(run, own, scheduler_of(run, cost))
        fed[name] = why_not_fed(run) or feed(run, own, cost)
        residuals.append(Iterations.of(run, cost))
    iterations = Iterations.joined(residuals)
    return AgainstResult(
        f"{first['policy']}, {trace.name}",
        cost.name,
        _basis(simulated),
        comparisons,
        agreements,
        fed,
        iterations,
        float(iterations.inside.mean()),
        simulated,
        dict(zip(names, runs)),
    )


def _against_other(
    other: OtherRun, cost_model: str, gpu: str, model: str, options: dict[str, Any], say: Callable[[str], None]
) -> AgainstResult:
    from simulator.config import ReplayConfig

    tp, pp = (int(options.get(key) or 1) for key in ("tp", "pp"))
    cost = _cost(cost_model, model, gpu, str(options.get("dtype") or "auto"), tp, pp)
    known = {key: value for key, value in options.items() if value is not None}
    policy = PolicyChoice.parse(str(known.pop("policy", "vllm_v1")))
    config = ReplayConfig(policy=policy.name, knobs=policy.knobs, model=model, gpu=gpu, **known)
    comparisons, simulated = _compare(config.policy, other.trace, config, cost, [other.summary()], say)
    return AgainstResult(
        f"{config.policy}, {other.trace.name}",
        cost.name,
        _basis(simulated),
        comparisons,
        {},
        {},
        None,
        float("nan"),
        simulated,
    )


def _cost(
    cost_model: str,
    model: str,
    gpu: str | None,
    dtype: str,
    tp: int = 1,
    pp: int = 1,
    layer_split: tuple[int, ...] | None = None,
    kv_dtype: str = "auto",
) -> CostModel:
    """Fitted iterations, whole ones or those of a pipeline's stages, need no device; anything else is about one."""
    from profiler import load_cost_model, load_model_spec
    from profiler.iterations.iteration_file import is_iteration_fit, load_iterations
    from profiler.iterations.staged_model import is_staged_fit, load_staged
    from profiler.specs.layer_split import split_layers

    spec = load_model_spec(model)
    if is_staged_fit(cost_model):
        staged = load_staged(cost_model, spec, tp=tp, pp=pp)
        even = split_layers(spec.layers, pp)
        measured = tuple(staged.fit.stages[0].provenance.get("measured", {}).get("layer_split") or even)
        asked = layer_split or even
        if measured != asked:
            raise ExperimentError(
                f"--cost-model {cost_model}: was measured with {measured} layers a stage, the run had {asked}"
            )
        return staged
    if is_iteration_fit(cost_model):
        return load_iterations(cost_model, spec, pp=pp)  # iterations of ranks that share layers are whole ones, too
    if gpu is None:
        raise ExperimentError(
            f"--cost-model {cost_model}: needs the device: give --gpu, or the model.json of a validation"
        )
    return load_cost_model(
        model, gpu, cost_model=cost_model, dtype=dtype, kv_dtype=kv_dtype, tp=tp, pp=pp, layer_split=layer_split
    )


def _compare(
    policy: str,
    trace: Trace,
    config: ReplayConfig,
    cost: CostModel,
    live: Sequence[dict[str, Any]],
    say: Callable[[str], None],
) -> tuple[list[Comparison], RunTables]:
    from profiler.iterations.iteration_model import IterationModel
    from profiler.iterations.staged_model import StagedModel
    from simulator import replay

    say(f"predict: {policy}, {len(trace)} requests")
    predicted = replay(trace, config, cost=cost)
    simulated = predicted.summary
    draws = []
    if isinstance(cost, IterationModel | StagedModel):
        draws = [replay(trace, config, cost=cost.perturbed(seed)).summary for seed in range(ENSEMBLE)]
    rows = compare(policy, float("nan"), simulated, draws, (), live)
    predicted.tables.summary = simulated
    return rows, predicted.tables


def _basis(simulated: RunTables) -> dict[str, Any]:
    return {key: simulated.summary.get(key) for key in BASIS}


def write_against(result: AgainstResult, out: Path) -> list[Path]:
    """report.md and report.html in a folder."""
    return write_document(out, "report", against_blocks(result))


def against_short(result: AgainstResult) -> list[str]:
    """The findings, one sentence each."""
    lines = []
    for family, title in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E")):
        rows = {row.statistic: row for row in result.comparisons}
        parts = [
            f"{name} {rows[f'{family}_{name}'].error:+.1%}"
            for name in ("mean", "p50", "p90")
            if f"{family}_{name}" in rows
        ]
        lines.append(f"{title}: {', '.join(parts)} (predicted over measured, minus 1).")
    total = sum(found.iterations for found in result.agreements.values())
    if total:
        matched = sum(found.matched for found in result.agreements.values())
        exact = sum(not isinstance(found, str) and found.exact for found in result.fed.values())
        lines.append(
            f"Batch agreement: {100 * matched / total:.1f} % of {total:,} batches; the whole simulator fed the "
            "durations: "
            f"{exact} of {len(result.fed)} runs exact."
        )
    lines.append(f"Costs: {result.cost_name} ({result.basis['cost_basis']}).")
    return lines


def against_blocks(result: AgainstResult) -> list[Block]:
    """The report's content."""
    story: list[Block] = [
        Heading(f"Prediction against an existing run: {result.name}", 1),
        Bullets(against_short(result)),
        Heading("Statistics"),
        statistics_table(result.comparisons),
    ]
    if result.iterations is not None:
        from experiments.validation.pages.figures import iterations_figure

        caption = "Predicted and measured iterations."
        story += [Heading("Iterations"), Picture("iterations", iterations_figure(result.iterations), caption)]
    else:
        story.append(Text("The reference says nothing of batches: only statistics can be compared."))
    for name, found in result.agreements.items():
        if found.divergence is not None:
            rows = [(str(key), str(value)[:400]) for key, value in found.divergence.items()]
            story += [Heading(f"First divergence of {name}", 3), Table(("what", "value"), rows)]
    return story


def _name(value: Any) -> str | None:
    return None if value is None or value != value else str(value)
