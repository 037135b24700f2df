"""One loop: measure capacity, plan and measure a profile, fit it, predict, run live, hold the two side by side.

The prediction is made before the live runs and from the profile alone. Every stage leaves its result in the folder as
soon as it is there, and is not repeated when the same command is started again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import ExperimentError
from experiments.running.stage_files import read_json, write_json
from experiments.sweeps.point import facts_as_toml
from experiments.validation.comparing.batch_agreement import agreement, scheduler_of
from experiments.validation.comparing.fed_with_measured_times import feed, why_not_fed
from experiments.validation.comparing.live_side import LiveSide, PolicyChoice
from experiments.validation.comparing.machine_drift import Probe, gauged_speed, speed_around, write_gauge
from experiments.validation.comparing.machine_speed_in_time import slowness_over_time, wandering_run
from experiments.validation.comparing.pipeline_bubbles import compare_bubbles
from experiments.validation.comparing.result import Result
from experiments.validation.comparing.settings import Settings, claim_folder, load_name, slice_of
from experiments.validation.comparing.statistics import Iterations, compare, rank, shapes_of_run
from policies.edges.distinct_names import folder_names
from policies.edges.input_file import parse_json, read_text
from policies.edges.output_file import write_text
from profiler.iterations.flicker import Later

if TYPE_CHECKING:
    from profiler.iterations.iteration_model import IterationModel
    from profiler.measurements.plan import MeasurementPlan
    from simulator import ReplayConfig
    from workloads import Trace

Say = Callable[[str], None]
DRY_LOAD = 1.15
"""The dry run that says where to measure is loaded this much more than the live runs will be."""


class Validation:
    """The stages of one validation, in order; `run` goes through all of them."""

    def __init__(
        self,
        settings: Settings,
        out: Path,
        *,
        profile: Path | None = None,
        anyway: bool = False,
        say: Say = lambda text: None,
    ) -> None:
        self.settings, self.out, self.say = settings, Path(out), say
        self.policies = [PolicyChoice.parse(text) for text in settings.policies]
        labels = [policy.label for policy in self.policies]
        self._places = dict(zip(labels, folder_names(labels)))
        self._given_profile = profile
        self._began = time.monotonic()
        self.trace = slice_of(settings)
        self.live_side = LiveSide(settings.engine, self.trace.longest)
        if profile is not None and settings.engine.is_sharded:
            raise ExperimentError("--profile: a pipeline measures its own stages; leave it out")
        claim_folder(self.out, settings, profile, anyway)

    def run(self) -> Result:
        """Every stage that is not done yet, then the comparison."""
        try:
            capacity = self.capacity()
            plan = self.plan(capacity)
            model = self.model(plan)
            self.predict(capacity, model)
            self.serve(capacity, model, plan)
        finally:
            self.live_side.close()
        return self.compared(capacity, model)

    # Stages

    def capacity(self) -> float:
        """Requests per second when all of them arrive at once, the slice repeated until its tail hardly counts.

        Under `chunked` where it is among the policies, else under the first: all policies are offered the same loads,
        and a share of what the slowest of them manages would leave the others idle.
        """
        file = self.out / "capacity.json"
        if file.exists():
            return float(read_json(file)["requests_per_s"])
        count = -(-3 * self.settings.engine.max_num_seqs // len(self.trace))
        repeated = _repeated(self.trace, count)
        policy = next((each for each in self.policies if each.name == "chunked"), self.policies[0])
        self.say(f"capacity: {len(repeated)} requests at once, {policy.label}")
        run = self.live_side.serve(repeated, policy, at_once=True)
        run.write(self.out / "capacity")
        ends = np.sort(
            run.tables.column("requests", "finished_s")[run.tables.column("requests", "status") == "finished"]
        )
        if not len(ends):
            raise ExperimentError(f"{self.trace.name}: no request of it fits the model; choose other rows")
        rate = len(ends) / float(ends[-1])
        # Rejected requests arrive too, at no cost.
        arriving = rate * len(repeated) / len(ends)
        write_json(
            file,
            {
                "requests_per_s": arriving,
                "requests": len(repeated),
                "num_blocks": run.config["num_blocks"],
                "makespan_s": float(ends[-1]),
            },
        )
        return arriving

    def plan(self, capacity: float) -> MeasurementPlan:
        """Which batches to measure: where a dry run with a crude cost model goes, a little more loaded."""
        from metrics import read_run
        from profiler.iterations.fit_iterations import crude_model
        from profiler.measurements.plan import make_plan, read_plan
        from profiler.measurements.region import Region

        file = self.out / "plan.json"
        if file.exists():
            return read_plan(file)
        self.ceilings()
        served = read_run(self.out / "capacity")
        wall = served.column("iterations", "wall_s")
        if self.settings.engine.is_sharded:  # the pipeline's pace, as if its stages took equally long
            wall = served.column("iterations", "device_s") / self.settings.engine.pp
        crude = crude_model(shapes_of_run(served), wall, device="this", model=self.live_side.loaded.spec.name)
        shapes = []
        for load in self.settings.loads:
            for policy in self.policies:
                for share in (load, load * DRY_LOAD):
                    shapes += shapes_of_run(self._simulate(self._at(capacity, share), policy, crude).tables)
        if self.settings.bounds is not None:
            chunk, decodes, context = self.settings.bounds
            context = min(context, self.live_side.max_model_len - 8)
            shapes += Region.of_bounds(chunk=min(chunk, context), decodes=decodes, context=context).shapes
        plan = make_plan(
            Region.of(shapes),
            budget_s=self.settings.budget_s,
            seed=self.settings.engine.seed,
            provenance={"dry_run": f"{self.trace.name} under {', '.join(self.settings.policies)}"},
        )
        plan.write(file)
        return plan

    def model(self, plan: MeasurementPlan) -> IterationModel:
        """The cost model: measured (or a given profile) and fitted."""
        from profiler.iterations.fit_iterations import fit_iterations
        from profiler.iterations.iteration_file import read_fit, write_fit
        from profiler.iterations.iteration_model import IterationModel
        from profiler.measurements.profile import read_profile

        if self.settings.engine.is_sharded:
            return self._staged_model(plan)
        file = self.out / "model.json"
        if file.exists():
            return IterationModel(read_fit(file))
        if self._given_profile is not None:
            profile = read_profile(self._given_profile)
        else:
            self.say(f"profile: {plan.budget_s:.0f} s of measuring, {len(plan.points)} batches planned")
            profile = self.live_side.measure(plan, self.out / "profile.parquet", self._progress(), self.say)
        fit = fit_iterations(profile, seed=self.settings.engine.seed)
        if fit.model != self.live_side.loaded.spec.name:
            raise ExperimentError(
                f"{self._given_profile}: was measured with {fit.model}, not {self.settings.engine.model}"
            )
        write_fit(fit, file)
        errors = fit.errors
        self.say(
            f"fit: {errors['shapes']:.0f} shapes, held-out structures {errors['held_out_median']:.1%} median, "
            f"{errors['held_out_p95']:.1%} P95"
        )
        return IterationModel(fit)

    def _staged_model(self, plan: MeasurementPlan) -> Any:
        """The cost model of a pipeline: its stages measured and fitted one by one."""
        from experiments.validation.comparing.pipeline_model import pipeline_model

        return pipeline_model(self.live_side, plan, self.out, self.say, self._progress(), self.settings.engine.seed)

    def predict(self, capacity: float, model: IterationModel) -> None:
        """Simulated runs, and the spread of an ensemble of cost models; before anything runs live."""
        for load in self.settings.loads:
            trace = self._at(capacity, load)
            for policy in self.policies:
                folder = self._folder(load) / "simulated" / self._places[policy.label]
                ensemble = folder.with_name(folder.name + ".ensemble.json")
                if ensemble.exists():
                    continue
                self.say(f"predict: {policy.label} at {load_name(load)} load")
                self._simulate(trace, policy, model).write(folder)
                later = self._later(capacity, load)
                draws = [
                    self._simulate(trace, policy, model.perturbed(seed, later)).summary
                    for seed in range(self.settings.ensemble)
                ]
                write_json(ensemble, {"summaries": draws})

    def serve(self, capacity: float, model: IterationModel, plan: MeasurementPlan) -> None:
        """Live runs, repeat by repeat through all policies: a slow hour hits them alike. A probe before each."""
        turns = [
            (repeat, load, policy)
            for repeat in range(self.settings.repeats)
            for load in self.settings.loads
            for policy in self.policies
        ]
        todo = [turn for turn in turns if not self._live_folder(*turn).exists()]
        blocks = int(read_json(self.out / "capacity.json")["num_blocks"])
        for number, (repeat, load, policy) in enumerate(todo):
            if not self.settings.engine.is_sharded:
                self._probe(model, plan, f"before {_turn(policy, load, repeat)}")
            trace = self._at(capacity, load)
            spans = float(trace.arrival_ns[-1]) / 1e9
            self.say(
                f"live: {policy.label} at {load_name(load)} load, repeat {repeat + 1} ({number + 1} of {len(todo)}, "
                f"at least {spans:.0f} s)"
            )
            gauge = self.live_side.new_gauge()
            run = self.live_side.serve(trace, policy, cost=model, num_blocks=blocks, gauge=gauge)
            if gauge is not None:
                write_gauge(self._gauge_file(repeat, load, policy), gauge)
            run.write(self._live_folder(repeat, load, policy))
        if todo and not self.settings.engine.is_sharded:
            self._probe(model, plan, "after the last run")

    def compared(self, capacity: float, model: IterationModel) -> Result:
        """Both worlds from their folders: nothing that is reported is kept in memory alone."""
        from metrics import read_run, summarise

        result = Result(
            self.settings,
            self.trace.name,
            len(self.trace),
            capacity,
            model,
            self._probes(),
            [],
            [],
            {},
            {},
            Iterations.none(),
            0,
            {},
        )
        residuals = []
        for load in self.settings.loads:
            trace = self._at(capacity, load)
            for policy in self.policies:
                folder = self._folder(load) / "simulated" / self._places[policy.label]
                predicted = read_run(folder)
                draws = read_json(folder.with_name(folder.name + ".ensemble.json"))["summaries"]
                runs, at_probed_speed, at_live_speed = [], [], []
                for repeat in range(self.settings.repeats):
                    run = read_run(self._live_folder(repeat, load, policy))
                    name = _turn(policy, load, repeat)
                    result.agreements[name] = agreement(run, trace, scheduler_of(run, model))
                    result.fed[name] = why_not_fed(run) or feed(run, trace, model, self._model())
                    residuals.append(Iterations.of(run, model))
                    own, gauge = residuals[-1].slowness, self._gauge_file(repeat, load, policy)
                    if (gauged := gauged_speed(gauge, model)) is not None:
                        result.gauged[name] = (gauged, own)
                    at_live_speed.append(self._at_speed(trace, policy, model, own))
                    wandering = slowness_over_time(gauge, model, int(run.column_ns("iterations", "end_s")[0]))
                    if wandering is not None:
                        config = self._replay_config(policy)
                        at_probed_speed.append(wandering_run(trace, config, model, *wandering))
                    elif gauged is not None or result.probes:
                        speed = gauged or speed_around(result.probes, name)
                        at_probed_speed.append(self._at_speed(trace, policy, model, speed))
                    result.lost += len(trace) - run.rows("requests")
                    for status in run.column("requests", "status").tolist():
                        result.ends[status] = result.ends.get(status, 0) + 1
                    runs.append(run)
                summaries = [run.summary or summarise(run) for run in runs]
                result.comparisons += compare(
                    policy.label, load, predicted.summary, draws, at_probed_speed, summaries, at_live_speed
                )
                result.simulated[load, policy.label], result.live[load, policy.label] = predicted, runs
                if self.settings.engine.pp > 1:
                    result.bubbles += compare_bubbles(policy.label, load, predicted, runs)
        result.iterations = Iterations.joined(residuals)
        result.rankings = rank(result.comparisons)
        result.took_s = time.monotonic() - self._began
        return result

    # Parts

    def _simulate(self, trace: Trace, policy: PolicyChoice, cost: Any) -> Any:
        from simulator import replay

        return replay(trace, self._replay_config(policy), cost=cost)

    def _at_speed(self, trace: Trace, policy: PolicyChoice, model: IterationModel, speed: float) -> Any:
        return self._simulate(trace, policy, type(model)(model.fit, speed=speed)).summary

    def _replay_config(self, policy: PolicyChoice) -> ReplayConfig:
        from simulator import ReplayConfig

        engine = self.settings.engine
        return ReplayConfig(
            policy=policy.name,
            knobs=policy.knobs,
            model=self._model(),
            gpu=str(self.out / "device.toml"),
            dtype=self._dtype(),
            token_budget=engine.token_budget,
            max_num_seqs=engine.max_num_seqs,
            max_model_len=int(read_json(self.out / "ceilings.json")["max_model_len"]),
            block_size=engine.block_size,
            num_blocks=int(read_json(self.out / "capacity.json")["num_blocks"]),
            seed=engine.seed,
            tp=engine.tp,
            pp=engine.pp,
        )

    def _model(self) -> str:
        """What the simulator takes for the model: its name, or the shape that was written down when it was loaded."""
        written = sorted((self.out / "model").glob("*.toml"))
        return str(written[0]) if written else self.settings.engine.model

    def _dtype(self) -> str:
        return str(read_json(self.out / "ceilings.json")["dtype"])

    def ceilings(self) -> None:
        """What the device can do at best: a hardware table, so that shares of its peak can be told."""
        file = self.out / "ceilings.json"
        if not file.exists():
            found, table = self.live_side.ceilings()
            write_text(self.out / "device.toml", table, ExperimentError)
            spec = self.live_side.loaded.spec
            if Path(self.settings.engine.model).exists():
                # A folder or a GGUF file: its own name may be another model's, and nobody else's readers know it.
                facts = {name: value for name, value in asdict(spec).items() if name != "name"}
                write_text(self.out / "model" / f"{spec.name}.toml", facts_as_toml(facts), ExperimentError)
            write_json(file, {**found.as_dict(), "max_model_len": self.live_side.max_model_len})

    def _later(self, capacity: float, load: float) -> Later:
        """When a live run at this load will be: in the middle of all of them."""
        spans = [float(self._at(capacity, each).arrival_ns[-1]) / 1e9 for each in self.settings.loads]
        whole = sum(spans) * len(self.policies) * self.settings.repeats
        lasting = spans[self.settings.loads.index(load)]
        return Later(max(0.0, (whole - lasting) / 2), lasting)

    def _at(self, capacity: float, load: float) -> Trace:
        """The slice at a share of capacity."""
        span = float(self.trace.arrival_ns[-1]) / 1e9
        if not span:
            raise ExperimentError(
                f"{self.trace.name}: found requests at one moment only, expected some time in between"
            )
        rate = (len(self.trace) - 1) / span
        return self.trace.scaled(load * capacity / rate)

    def _probe(self, model: IterationModel, plan: MeasurementPlan, when: str) -> None:
        found = self.live_side.probe(plan, model.fit, when, self._began)
        with (self.out / "probes.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(found.as_dict()) + "\n")
        self.say(f"probe {when}: speed {found.speed:.3f} of the profile's, with disturbances {found.mean_speed:.3f}")

    def _probes(self) -> list[Probe]:
        file = self.out / "probes.jsonl"
        if not file.exists():
            return []
        whole, _, _ = read_text(file, ExperimentError).rpartition("\n")  # a last line may be cut off in the middle
        try:
            return [Probe(**parse_json(line, str(file), ExperimentError)) for line in whole.splitlines()]
        except TypeError:
            raise ExperimentError(f"{file}: found other keys than a probe's; remove the file") from None

    def _progress(self) -> Any:
        said = time.monotonic()

        def progress(spent_s: float, budget_s: float, doing: str) -> None:
            nonlocal said
            if time.monotonic() - said > 15:
                said = time.monotonic()
                self.say(f"profile: {doing}, {max(0.0, budget_s - spent_s):.0f} s left")

        return progress

    def _folder(self, load: float) -> Path:
        return self.out / f"load-{load:g}"

    def _live_folder(self, repeat: int, load: float, policy: PolicyChoice) -> Path:
        return self._folder(load) / "live" / f"{self._places[policy.label]}-{repeat + 1}"

    def _gauge_file(self, repeat: int, load: float, policy: PolicyChoice) -> Path:
        folder = self._live_folder(repeat, load, policy)
        return folder.with_name(folder.name + ".gauge.json")


def _repeated(trace: Trace, count: int) -> Trace:
    return trace.rearranged(np.tile(np.arange(len(trace)), count), np.zeros(count * len(trace), np.int64))


def _turn(policy: PolicyChoice, load: float, repeat: int) -> str:
    """A live run's name in the report and in the probes."""
    return f"{policy.label}, {load_name(load)} load, repeat {repeat + 1}"
