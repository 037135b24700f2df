"""Run a sweep: whatever points its folder lacks, on any engine, then the table.

Results depend on the sweep alone: not on the engine, the number of workers, the order in which points finish, or how
often the sweep was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.errors import ExperimentError
from experiments.running.task_runners import Engine, ThisProcess
from experiments.running.tasks import with_inputs
from experiments.sweeps.axes import Axis, SweepSpec, Values, applicable, enumerate_points, task_of
from experiments.sweeps.folder import SweepFolder

Report = Callable[[int, int, int], None]
"""Called with (points done, points in all, points failed)."""


def run_sweep(
    spec: SweepSpec,
    out: str | Path,
    *,
    engine: Engine | None = None,
    retry_failed: bool = False,
    anyway: bool = False,
    report: Report | None = None,
) -> SweepFolder:
    """Run every point that `out` does not hold yet and write out/sweep.parquet. engine: this process by default.

    anyway: keep points whose trace, policy, costs or other files, or whose version of Charioteer, were others.

    Raises ExperimentError for a folder that holds something else, or points of other inputs; a point that fails is a
    row with its error.
    """
    folder = SweepFolder(out, spec, retry_failed=retry_failed)
    if not anyway:
        folder.refuse_other_inputs()
    engine = engine or ThisProcess()
    try:
        if spec.method == "optuna":
            _search(spec, folder, engine, report)
        else:
            points = enumerate_points(spec)
            _run_missing(spec, folder, engine, dict(enumerate(points)), len(points), report)
    finally:
        engine.close()
        if folder.results:
            folder.write_table()
    return folder


def _run_missing(
    spec: SweepSpec, folder: SweepFolder, engine: Engine, points: dict[int, Values], total: int, report: Report | None
) -> None:
    def tell() -> None:
        if report is not None:
            failed = sum(result["status"] == "failed" for result in folder.results.values())
            report(len(folder.results), total, failed)

    missing = {
        number: with_inputs(task_of(spec, values)) for number, values in points.items() if number not in folder.results
    }
    tell()
    for number, result in engine.run(missing) if missing else ():
        folder.add(number, points[number], result, missing[number]["inputs"])
        tell()


def _search(spec: SweepSpec, folder: SweepFolder, engine: Engine, report: Report | None) -> None:
    """Batches that Optuna proposes. A search that is taken up again proposes the same batches again, from the seed
    and the results, and finds their points finished."""
    for batch in _proposals(spec, folder):
        for number, values in batch.items():
            if number in folder.results and folder.results[number]["values"] != values:
                del folder.results[number]  # of a search that went another way, before a failed point was tried again
        _run_missing(spec, folder, engine, batch, spec.points, report)


def _proposals(spec: SweepSpec, folder: SweepFolder) -> Iterator[dict[int, Values]]:
    try:
        import optuna
    except ImportError:
        raise ExperimentError("method optuna: Optuna is not installed: pip install optuna") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=spec.seed, n_startup_trials=max(10, spec.batch))
    study = optuna.create_study(direction=spec.direction, sampler=sampler)
    distributions = {axis.name: _distribution(optuna, axis) for axis in spec.axes}
    names = {axis.name: axis for axis in spec.axes}
    for first in range(0, spec.points, spec.batch):
        trials = [study.ask(distributions) for _ in range(first, min(first + spec.batch, spec.points))]
        batch = {}
        for number, trial in enumerate(trials, first):
            chosen = {name: _chosen(names[name], value) for name, value in trial.params.items()}
            batch[number] = applicable(spec, chosen)
        yield batch
        for number, trial in enumerate(trials, first):
            content = folder.results[number]
            value = content["result"].get(spec.objective)
            if content["status"] == "ok" and value is not None:
                study.tell(trial, float(value))
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)


def _distribution(optuna: Any, axis: Axis) -> Any:
    if axis.values:
        # By position, since a value may be of a kind that Optuna does not take.
        return optuna.distributions.CategoricalDistribution(tuple(range(len(axis.values))))
    if axis.whole:
        step = int(axis.step or 1)
        high = axis.low + (axis.high - axis.low) // step * step
        return optuna.distributions.IntDistribution(axis.low, int(high), log=axis.log, step=step)
    return optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.log, step=axis.step)


def _chosen(axis: Axis, value: Any) -> Any:
    return axis.values[value] if axis.values else value
