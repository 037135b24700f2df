"""Real vLLM runs, replayed: what the simulator says their requests experienced, against what they did.

Nothing is fitted on a run. The costs come from a profile of the same GPU, the schedule from `vllm_v1` with the settings
that the run recorded; what remains is error, and the ablation says which effect accounts for how much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import ExperimentError
from experiments.vllm.recorded_run import Column, VllmRun, read_vllm_run
from metrics.measures.latencies import finished_latencies
from profiler.measurements.facts import PROFILES
from profiler.operators.engine_terms import EngineTerms

if TYPE_CHECKING:
    from experiments.vllm.steps_from_request_times import Second, Stretch
    from profiler.measurements.profile import Profile
    from profiler.operators.fitted_model import FittedModel
    from profiler.operators.fitting.device_fit import DeviceFit
    from profiler.specs.hardware import Hardware
    from profiler.specs.model_spec import ModelSpec
    from simulator import Run

STATISTICS = ("mean", "p50", "p90", "p95", "p99")
AIMS = {"ttft": 0.05, "tpot": 0.01, "e2e": 0.02}
"""Largest error aimed at, of the mean and of P50."""


@dataclass(frozen=True)
class Variant:
    """One change to the engine or its costs, for the ablation."""

    name: str
    terms: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


ABLATION = (
    Variant("contexts all equal", {"uneven_contexts": False}),
    Variant("contexts just above a step of 128", {"typical_contexts": False}),
    Variant("chunk and decodes: sum of both kernels", {"fused_batches": False}),
    Variant("no CUDA-graph padding", {"graph_padding": False}),
    Variant("norms and activations as eager kernels", {"compiled": False}),
    Variant("no sampler", {"sampler": False}),
    Variant("1 us between two kernels", {"kernel_gap_us": 1.0}),
    Variant("synchronous scheduling", options={"async_scheduling": False}),
    Variant("no prefix cache", options={"prefix_caching": False}),
    Variant("freed blocks as in 0.32", options={"free_order": "0.32"}),
)


@dataclass(frozen=True)
class Fidelity:
    """One run and its replay. errors: relative, by latency and statistic."""

    run: VllmRun
    replayed: Run
    costs: Mapping[str, Any]
    measured: dict[str, dict[str, float]]
    simulated: dict[str, dict[str, float]]

    @property
    def errors(self) -> dict[str, dict[str, float]]:
        return {
            key: {name: self.simulated[key][name] / value - 1 for name, value in row.items()}
            for key, row in self.measured.items()
        }

    @property
    def missed(self) -> list[str]:
        """Statistics at the mean or P50 beyond their aim."""
        errors = self.errors
        return [
            f"{key} {name}" for key, aim in AIMS.items() for name in ("mean", "p50") if abs(errors[key][name]) > aim
        ]


@dataclass(frozen=True)
class Bench:
    """A run with everything a replay of it needs; `replay` may be called for any variant."""

    run: VllmRun
    fit: DeviceFit
    spec: ModelSpec
    hardware: Hardware
    tp: int
    terms: EngineTerms
    source: str

    def replay(self, variant: Variant | None = None) -> Fidelity:
        """Replay the run, changed as the variant says; raises what `simulator.replay` raises."""
        from simulator import replay

        variant = variant or Variant("as it is")
        cost = self._cost(replace(self.terms, **variant.terms))
        options = {**self.run.settings(), "tp": self.tp, **variant.options}
        options["max_model_len"] = options["max_model_len"] or self.spec.max_position
        replayed = replay(self.run.trace(), cost=cost, model=self.spec.name, gpu=self.hardware.name, **options)
        measured = {key: statistics(values) for key, values in self.run.latencies.items()}
        simulated = {key: statistics(values) for key, values in latencies_of(replayed).items()}
        return Fidelity(self.run, replayed, {**cost.provenance(), "source": self.source}, measured, simulated)

    def decode_seconds(self) -> list[Second]:
        """Seconds of the run's log with decode steps alone, measured and predicted."""
        from experiments.vllm.steps_from_request_times import decode_seconds

        return decode_seconds(self.run, self._cost(self.terms))

    def known_stretches(self) -> list[Stretch]:
        """Decode steps whose number the run's request times tell exactly, measured and predicted."""
        from experiments.vllm.steps_from_request_times import known_stretches

        return known_stretches(self.run, self._cost(self.terms))

    def _cost(self, terms: EngineTerms) -> FittedModel:
        """Costs of the run's own layout; experts and whatever else a fit of one model lacks are the card's."""
        from profiler.operators.compose import CardFiles, compose
        from profiler.operators.fitted_model import find_fitted
        from profiler.specs.parallel_layout import ParallelLayout

        settings = self.run.settings()
        whole = bool(settings["ep"]) and self.spec.experts > 0
        layout = ParallelLayout(self.tp, int(settings["dp"]), whole)
        files = CardFiles(find_fitted(self.hardware.kernels_of or self.hardware.name))
        return compose(self.fit, self.spec, self.hardware, tp=self.tp, layout=layout, files=files, terms=terms)

    def variants(self) -> tuple[Variant, ...]:
        """The ablation, with the blocks that the run's log shows to be shared where it shows any."""
        from experiments.vllm.steps_from_request_times import level_us

        second, blocks = self.run.overcommitted()
        found = list(ABLATION)
        missed = level_us(self.known_stretches())
        if missed is not None:
            name = f"{missed:+.0f} us a step (CALIBRATED on its last decodes)"
            calibrated = {"step_us": self.terms.step_us + missed}
            found.append(Variant(name, calibrated))
        if not blocks:
            return tuple(found)
        pool = self.run.settings()["num_blocks"]
        shared = {"num_blocks": pool + blocks}
        name = f"{blocks} shared blocks (log, {second:.0f} s)"
        both = Variant(f"{name}, contexts all equal", {"uneven_contexts": False}, shared)
        found += [Variant(name, options=shared), both]
        if missed is not None:
            found.append(Variant(f"{blocks} shared blocks, and CALIBRATED so", calibrated, shared))
        return tuple(found)


def make_bench(
    folder: str | Path,
    *,
    profile: str | Path | None = None,
    model: str | None = None,
    gpu: str | None = None,
    tp: int | None = None,
    terms: Mapping[str, Any] | None = None,
    engine: str | Path = "none",
    p2p: bool | None = None,
) -> Bench:
    """Find the costs for a run: a profile folder of LLMServingSim, a profile or model file, or what ships for the GPU.

    profile: by default the folder of the same GPU and model below the public profiles. model: by default the run's own.
    engine, terms: as `load_cost_model` takes them; the scheduler's settings stay the run's. p2p: whether the node's
    GPUs reach each other directly, as the card's table says by default.
    """
    from profiler.operators.named_engines import load_engine
    from profiler.specs.hardware import load_hardware
    from profiler.specs.model_config import load_model_spec

    run = read_vllm_run(folder)
    spec = load_model_spec(model or str(run.meta.get("model") or run.folder.name))
    degree = tp or int(run.settings()["tp"])
    where = Path(profile) if profile is not None else _profile_beside(run)
    hardware = load_hardware(gpu) if gpu else _hardware_of(run, where)
    if p2p is not None:
        hardware = replace(hardware, p2p=p2p)
    fit, source = _fit_of(where, hardware, degree)
    if degree > 1 and not hardware.p2p:
        source += ", no p2p: all-reduces CALIBRATED on RTXPRO6000/Qwen3-32B"
    named = load_engine(engine)
    if named.name != "none":
        source += f", engine {named.label}"
    graph = {"graph_padding": run.largest_graph > 0, "largest_graph": max(run.largest_graph, 1)}
    all_terms = EngineTerms.from_mapping({**fit.terms, **named.terms, **graph, **(terms or {})})
    return Bench(run, fit, spec, hardware, degree, all_terms, source)


def _hardware_of(run: VllmRun, profile: Path | None) -> Hardware:
    """The GPU that the run recorded; where it recorded none, the one that a folder around it or its profile names."""
    from profiler.commands.profiles import gpu_name
    from profiler.errors import ProfileError
    from profiler.specs.hardware import load_hardware

    if (run.meta.get("hardware") or {}).get("device_name"):
        return load_hardware(gpu_name(run.gpu))
    folders = [*run.folder.absolute().parents, *(profile.absolute().parents if profile is not None else ())]
    for name in (run.gpu, run.folder.name, *(folder.name for folder in folders)):
        try:
            return load_hardware(gpu_name(name))
        except ProfileError:
            continue
    raise ExperimentError(f"{run.folder}: names no GPU, nor do the folders around it: name it with --gpu")


def _profile_beside(run: VllmRun) -> Path | None:
    """The carried profile of the GPU and model that the run's folders name."""
    beside = PROFILES / f"{run.folder.parent.name}_{run.folder.name}.parquet".lower()
    return beside if beside.exists() else None


def _fit_of(where: Path | None, hardware: Hardware, tp: int) -> tuple[DeviceFit, str]:
    from profiler.measurements.importers import import_profile
    from profiler.measurements.profile import read_profile
    from profiler.operators.fitted_model import find_fitted
    from profiler.operators.fitting.device_fit import fit_device
    from profiler.operators.fitting.model_file import read_model

    if where is None:
        found = find_fitted(hardware.name)
        if found is None:
            raise ExperimentError(f"no fitted costs ship for {hardware.name}: give --profile")
        return read_model(found), f"shipped fit of {hardware.name}"
    if where.is_dir():
        first_form = any(where.glob("tp*/layers.csv")) or (where / "layers.csv").exists()
        kind = "llmservingsim-v0" if first_form else "llmservingsim"
        return fit_device(import_profile(kind, where, tensor_parallel=tp), hardware), str(where)
    if where.suffix == ".json":
        return read_model(where), str(where)
    return fit_device(_at_degree(read_profile(where), tp), hardware), where.stem if where.parent == PROFILES else str(
        where
    )


def _at_degree(profile: Profile, tp: int) -> Profile:
    """Where one model's operators were measured at several degrees: those of one, and every all-reduce."""
    table = profile.table
    degrees = set(table.loc[table["operator"] == "qkv", "tensor_parallel"])
    if len(degrees) < 2 or tp not in degrees:
        return profile
    kept = table[(table["tensor_parallel"] == tp) | (table["operator"] == "all_reduce")]
    return replace(profile, table=kept.reset_index(drop=True))


def statistics(values: Column) -> dict[str, float]:
    """STATISTICS of a column; NaN where it is empty."""
    if not len(values):
        return dict.fromkeys(STATISTICS, float("nan"))
    return {
        name: float(np.mean(values) if name == "mean" else np.percentile(values, int(name[1:]))) for name in STATISTICS
    }


def latencies_of(run: Run) -> dict[str, Column]:
    """TTFT, TPOT (of two tokens or more), E2E of a replay's requests, in seconds; raises unless all finished."""
    table = run.tables.requests.to_pandas().sort_values("request")
    unfinished = table[table["status"] != "finished"]
    if len(unfinished):
        row = unfinished.iloc[0]
        raise ExperimentError(f"replay: request {row['request']} was {row['status']}: {row['reason']}")
    return {key: values for key, values in finished_latencies(run.tables).items() if key in AIMS}


def over_time(result: Fidelity) -> dict[str, Column]:
    """Running, waiting and KV use at every second of the log, simulated beside measured."""
    log = result.run.log
    iterations = result.replayed.tables.iterations.to_pandas().sort_values("end_s")
    at = np.clip(np.searchsorted(iterations["end_s"], log["t"], side="right") - 1, 0, None)
    now = iterations.iloc[at]
    over = log["t"].to_numpy(float) > float(iterations["end_s"].max())
    pool = float(result.replayed.config["num_blocks"])
    simulated = {
        "running": now["running"].to_numpy(float),
        "waiting": now["waiting"].to_numpy(float),
        "kv_cache_pct": 100 * (1 - now["free_blocks"].to_numpy(float) / pool),
    }
    columns = {"t": log["t"].to_numpy(float)}
    for key, values in simulated.items():
        columns[f"{key}_measured"] = log[key].to_numpy(float)
        columns[f"{key}_simulated"] = np.where(over, 0.0, values)
    return columns
