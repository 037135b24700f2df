"""Does speculation pay on this machine? Predicted from a profile and one run's acceptance, and measured, load by load.

A load is the number of requests that run at once; all requests are there from the beginning. For each load the same
requests are served with and without speculation, and the speed-up is the ratio of the times that this takes. The
prediction knows the costs of plain batches, measured one by one, and what the model accepted at each place of each
answer in a run of its own, which also tells what drafting takes on the host; it never sees the runs that it is held
against.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import ExperimentError
from experiments.running.stage_files import read_json, write_json
from experiments.sweeps.point import facts_as_toml
from experiments.validation.comparing.live_side import LiveSide, PolicyChoice
from experiments.validation.comparing.settings import Settings, claim_folder, slice_of
from experiments.validation.comparing.statistics import shapes_of_run
from policies import Speculation
from policies.edges.output_file import write_text
from profiler.speculation_cost import DraftingPrices, SpeculatingCost

if TYPE_CHECKING:
    from profiler.iterations.iteration_model import IterationModel
    from simulator import ReplayConfig
    from workloads import Trace

ROOM = 16
"""Tokens of the longest sequence beyond the longest request, so that no draft is cut by it."""
PLENTY = 100_000
"""KV blocks of the simulated engine: nobody is preempted, as in a live run whose pool holds all of its requests."""


@dataclass(frozen=True)
class SpeedUp:
    """Of one load. measured: of every repeat; predicted: None where this load was measured alone."""

    batch: int
    predicted: float
    measured: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        return float(np.mean(self.measured)) if self.measured else float("nan")

    @property
    def spread(self) -> float:
        """Half of the range of the repeats, as a share of their mean."""
        return (max(self.measured) - min(self.measured)) / 2 / self.mean if self.measured else float("nan")

    @property
    def error(self) -> float:
        return self.predicted / self.mean - 1

    @property
    def holds(self) -> bool:
        """Within 5 %, or the repeats' own spread where that is larger."""
        return abs(self.error) <= max(0.05, self.spread)


class SpeculationStudy:
    """The stages of the comparison, each left in the folder as soon as it is there."""

    def __init__(
        self,
        settings: Settings,
        out: Path,
        *,
        speculation: Speculation,
        batches: Sequence[int],
        prompts: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
        anyway: bool = False,
    ) -> None:
        if list(batches) != sorted(set(batches)) or not batches or batches[0] < 1:
            raise ExperimentError(f"--batches: found {list(batches)}, expected rising numbers of requests, as 1,4,16")
        self.settings, self.out, self.say = settings, Path(out), say
        if speculation.method != "ngram":
            raise ExperimentError(
                f"--speculation {speculation}: a drafting model is not measured here; expected ngram:K"
            )
        self.speculation, self.batches, self.prompts = speculation, batches, prompts
        self.policy = PolicyChoice.parse(settings.policies[0])
        self.trace = slice_of(settings)
        self.trace = self.trace.rearranged(np.arange(len(self.trace)), np.zeros(len(self.trace), np.int64))
        self.live_side = LiveSide(settings.engine, self.trace.longest + ROOM)
        claim_folder(self.out, settings, None, anyway)

    def run(self) -> list[SpeedUp]:
        """Every stage that is not done yet; the speed-ups of all loads, predicted, and measured where asked for."""
        began = time.monotonic()
        try:
            self.ceilings()
            self.accept()
            model = self.model()
            predicted = self.predict(model)
            measured = self.serve()
        finally:
            self.live_side.close()
        rows = [SpeedUp(batch, speed, tuple(measured.get(batch, ()))) for batch, speed in sorted(predicted.items())]
        write_json(
            self.out / "speculation.json",
            {
                "speculation": str(self.speculation),
                "policy": self.policy.label,
                "model": self.live_side.choice.model,
                "loads": [{**asdict(row), "mean": row.mean, "error": row.error} for row in rows],
                "crossover_predicted": crossover([(row.batch, row.predicted) for row in rows]),
                "crossover_measured": crossover([(row.batch, row.mean) for row in rows if row.measured]),
                "took_s": time.monotonic() - began,
            },
        )
        return rows

    # Stages

    def ceilings(self) -> None:
        """The device as a hardware table, and the model's shape, as the simulator takes them."""
        if (self.out / "model.toml").exists():
            return
        _, table = self.live_side.ceilings()
        write_text(self.out / "device.toml", table, ExperimentError)
        facts = {name: value for name, value in asdict(self.live_side.loaded.spec).items() if name != "name"}
        write_text(self.out / "model.toml", facts_as_toml(facts), ExperimentError)

    def accept(self) -> None:
        """A run of all requests that says what is accepted, and what a speculating decode takes on the host."""
        folder = self.out / "acceptance"
        if not folder.exists():
            self.say(f"acceptance: {len(self.trace)} requests with {self.speculation}")
            self._live(self.trace, max(self.batches), speculating=True).write(folder)

    def model(self) -> IterationModel:
        """Costs of plain batches, where simulated runs with and without drafts go."""
        from profiler.iterations.fit_iterations import fit_iterations
        from profiler.iterations.iteration_file import read_fit, write_fit
        from profiler.iterations.iteration_model import IterationModel
        from profiler.measurements.plan import make_plan
        from profiler.measurements.region import Region

        file = self.out / "model.json"
        if file.exists():
            return IterationModel(read_fit(file))
        shapes = []
        for batch in self.batches:
            for speculating in (False, True):
                run = self._simulate(self._part(batch), batch, speculating, None)
                shapes += [self._plain(shape) for shape in shapes_of_run(run.tables)]
        plan = make_plan(Region.of(shapes), budget_s=self.settings.budget_s, seed=self.settings.engine.seed)
        self.say(f"profile: {plan.budget_s:.0f} s of measuring, {len(plan.points)} batches planned")
        profile = self.live_side.measure(plan, self.out / "profile.parquet", None, self.say)
        fit = fit_iterations(profile, seed=self.settings.engine.seed)
        write_fit(fit, file)
        self.say(f"fit: held-out structures {fit.errors['held_out_median']:.1%} median")
        return IterationModel(fit)

    def prices(self, model: IterationModel) -> DraftingPrices:
        """What looking up, verifying and handing over takes on the host, per request that samples: the host time of the
        acceptance run beyond that of plain batches."""
        from metrics import read_run

        run = read_run(self.out / "acceptance")
        bare = SpeculatingCost(model, None, DraftingPrices(0.0, 0.0, 0.0), (0.0,), (0.0,), self.speculation.method)
        host_ns = run.column_ns("iterations", "host_before_s") + run.column_ns("iterations", "host_after_s")
        extra = []
        for shape, measured in zip(shapes_of_run(run), host_ns.tolist()):
            if shape.requests_sampled and not shape.chunks:
                extra.append((measured - sum(bare.host_ns(shape))) / shape.requests_sampled)
        return DraftingPrices(0.0, max(0.0, float(np.median(extra)) / 1e3) if extra else 0.0, 0.0)

    def predict(self, model: IterationModel) -> dict[int, float]:
        """Speed-up of every load asked for, and of the powers of two between, before anything is measured."""
        file = self.out / "predicted.json"
        if not file.exists():
            doubled = [1 << power for power in range(max(self.batches).bit_length()) if 1 << power <= max(self.batches)]
            found = {}
            method = self.speculation.method
            drafting = SpeculatingCost(model, None, self.prices(model), (0.0,), (0.0,), method)
            for batch in sorted({*self.batches, *(one for one in doubled if one >= self.batches[0])}):
                part = self._part(batch)
                times = [
                    self._simulate(part, batch, speculating, cost).tables.column("requests", "finished_s").max()
                    for speculating, cost in ((False, model), (True, drafting))
                ]
                found[str(batch)] = float(times[0] / times[1])
            write_json(file, found)
        return {int(batch): speed for batch, speed in read_json(file).items()}

    def serve(self) -> dict[int, list[float]]:
        """Both engines at every load asked for, by turns."""
        measured: dict[int, list[float]] = {}
        for repeat in range(self.settings.repeats):
            for batch in self.batches:
                times = []
                for speculating in (False, True):
                    name = f"batch-{batch}-{'with' if speculating else 'without'}-{repeat}"
                    file = self.out / "measured" / f"{name}.json"
                    if not file.exists():
                        self.say(f"live: {name}")
                        run = self._live(self._part(batch), batch, speculating=speculating)
                        ends = run.tables.column("requests", "finished_s")
                        if run.summary["finished"] != len(ends):
                            raise ExperimentError(
                                f"{name}: {len(ends) - run.summary['finished']} requests did not finish"
                            )
                        if repeat == 0:
                            run.write(self.out / "live" / name)
                        write_json(file, {"makespan_s": float(ends.max())})
                    times.append(float(read_json(file)["makespan_s"]))
                measured.setdefault(batch, []).append(times[0] / times[1])
        return measured

    # One run

    def _part(self, batch: int) -> Trace:
        """The requests of a load: as many as run at once, twice, and at least four."""
        return self.trace.head(min(len(self.trace), max(4, 2 * batch)))

    def _live(self, trace: Trace, batch: int, *, speculating: bool) -> Any:
        more: dict[str, Any] = {"max_num_seqs": batch, "prompts": None if self.prompts is None else str(self.prompts)}
        if speculating:
            more["speculation"] = str(self.speculation)
        return self.live_side.serve(trace, self.policy, at_once=True, more=more)

    def _simulate(self, trace: Trace, batch: int, speculating: bool, cost: Any) -> Any:
        from simulator import replay

        return replay(trace, self._config(batch, speculating, cost is None), cost=cost)

    def _config(self, batch: int, speculating: bool, crude: bool) -> ReplayConfig:
        from simulator import ReplayConfig

        engine = self.settings.engine
        config = ReplayConfig(
            policy=self.policy.name,
            knobs=self.policy.knobs,
            model=str(self.out / "model.toml"),
            gpu=str(self.out / "device.toml"),
            cost_model="roofline" if crude else "auto",
            dtype=str(self.live_side.loaded.dtype).removeprefix("torch."),
            token_budget=engine.token_budget,
            max_num_seqs=batch,
            max_model_len=self.trace.longest + ROOM,
            block_size=engine.block_size,
            num_blocks=PLENTY,
            seed=engine.seed,
        )
        if not speculating:
            return config
        return replace(
            config,
            speculation=str(self.speculation),
            acceptance=f"requests={self.out / 'acceptance'}",
        )

    def _plain(self, shape: Any) -> Any:
        """The batch that the executor runs for one with drafts."""
        inner = type("Executor", (), {"drafts_are_decodes": True, "kind": "", "calibrated": True, "stages": 1})()
        inner.tile, inner.name = 128, ""
        return SpeculatingCost(inner, None, DraftingPrices(), (0.0,), (0.0,), self.speculation.method).plain(shape)


def crossover(points: Sequence[tuple[int, float]]) -> float | None:
    """The load from which on speculation no longer pays: where the line between the last load that pays and the next
    one crosses 1, over the logarithm of the load. None where it pays at every load; 0 where at none."""
    if not points or points[0][1] < 1:
        return 0.0 if points else None
    for (low, before), (high, after) in zip(points, points[1:]):
        if after < 1:
            share = (before - 1) / (before - after)
            return float(low * (high / low) ** share)
    return None


def in_short(rows: Sequence[SpeedUp], speculation: Speculation) -> list[str]:
    """What the study found, a sentence each."""
    lines = []
    for row in rows:
        if row.measured:
            lines.append(
                f"{row.batch} at once: {speculation} makes it {row.mean:.2f} times as fast (repeats {row.spread:.1%} "
                f"apart), predicted {row.predicted:.2f} ({row.error:+.1%}{'' if row.holds else ', too far'})"
            )
    predicted = crossover([(row.batch, row.predicted) for row in rows])
    measured = crossover([(row.batch, row.mean) for row in rows if row.measured])
    words = [_where(found) for found in (predicted, measured)]
    lines.append(f"it stops paying {words[0]} as predicted, {words[1]} as measured")
    return lines


def _where(load: float | None) -> str:
    if load is None:
        return "at none of these loads"
    return f"at {load:.1f} requests at once" if load else "from the first load on"


def draw(rows: Sequence[SpeedUp], speculation: Speculation, folder: Path, title: str) -> list[Path]:
    """Speed-up over load, predicted and measured: FOLDER/speculation.pdf and .png."""
    from metrics.drawing.figure_style import SINGLE_COLUMN_IN, house_style, new_figure, save

    with house_style():
        figure, axes = new_figure(SINGLE_COLUMN_IN, 2.3)
        ax = axes[0, 0]
        ax.plot([row.batch for row in rows], [row.predicted for row in rows], label="predicted", color="#0072b2")
        seen = [row for row in rows if row.measured]
        low = [row.mean - min(row.measured) for row in seen]
        high = [max(row.measured) - row.mean for row in seen]
        ax.errorbar(
            [row.batch for row in seen],
            [row.mean for row in seen],
            yerr=[low, high],
            fmt="s",
            color="#d55e00",
            capsize=2,
            markersize=4,
            label="measured, with the range of repeats",
        )
        ax.axhline(1.0, color="#595959", linewidth=0.8, linestyle="--")
        ax.set_xscale("log", base=2)
        ax.set_xticks([row.batch for row in rows], [str(row.batch) for row in rows])
        ax.set_xlabel("requests at once")
        ax.set_ylabel(f"speed-up by {speculation}")
        ax.set_title(title)
        ax.legend()
        return save(figure, folder, "speculation")
