"""A cost model is used as its protocol says: whatever it overrides is asked, whatever faster forms it inherits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies import BatchShape
from profiler.load import load_cost_model
from profiler.operators.fitted_model import FittedModel
from profiler.roofline.roofline import Roofline
from profiler.specs.hardware import load_hardware
from profiler.specs.model_config import load_model_spec
from simulator import replay
from simulator.errors import SimulationError
from simulator.replica.fast_costs import FastCosts
from tests.simulator.constant_cost import trace_of

ROOT = Path(__file__).resolve().parents[2]
MODEL, GPU = "llama-3.1-8b", "h100"
TRACE = trace_of([(0.0, 700, 40), (0.001, 300, 60), (0.4, 900, 30), (3.0, 50, 200)])


class Delegating:
    """Hands out what it lacks, fast forms too."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class TwiceAsSlow(Delegating):
    def stage_ns(self, shape: BatchShape, stage: int = 0) -> int:
        return int(2 * self.inner.stage_ns(shape, stage))


class LaterHost(Delegating):
    def host_ns(self, shape: BatchShape) -> tuple[int, int]:
        before, after = self.inner.host_ns(shape)
        return before + 1_000_000, after


class SlowRoofline(Roofline):
    def stage_ns(self, shape: BatchShape, stage: int = 0) -> int:
        return 2 * super().stage_ns(shape, stage)


class SlowFit(FittedModel):
    def stage_ns(self, shape: BatchShape, stage: int = 0) -> int:
        return 2 * super().stage_ns(shape, stage)


def roofline(pp: int = 1) -> Any:
    return load_cost_model(MODEL, GPU, cost_model="roofline", pp=pp)


def iterations(cost: Any, leaps: bool, pp: int = 1) -> tuple[Any, ...]:
    run = replay(TRACE, policy="chunked", model=MODEL, gpu=GPU, cost=cost, leaps=leaps, pp=pp)
    return tuple(run.tables.column("iterations", name) for name in ("end_s", "device_s", "host_before_s"))


def doubled(pp: int = 1) -> list[Any]:
    spec, hardware = load_model_spec(MODEL), load_hardware(GPU)
    on_object = roofline(pp)
    plain = on_object.stage_ns
    on_object.stage_ns = lambda shape, stage=0: 2 * plain(shape, stage)
    return [TwiceAsSlow(roofline(pp)), SlowRoofline(spec, hardware, pp=pp), on_object]


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("leaps", [True, False])
def test_an_overridden_time_is_what_every_replica_spends(pp: int, leaps: bool) -> None:
    each = [iterations(cost, leaps, pp) for cost in doubled(pp)]
    for end, device, _ in each:
        # By the class itself: a run of a model whose every method says the same.
        assert np.array_equal(end, each[0][0])
        assert np.array_equal(device, each[0][1])
    single = iterations(roofline(pp), leaps, pp)
    first = slice(0, 1)
    assert each[0][1][first] == pytest.approx(2 * single[1][first])


@pytest.mark.parametrize("leaps", [True, False])
def test_an_overridden_host_time_is_spent_too(leaps: bool) -> None:
    later, plain = iterations(LaterHost(roofline()), leaps), iterations(roofline(), leaps)
    assert later[2][0] == pytest.approx(plain[2][0] + 1e-3)
    assert np.array_equal(iterations(LaterHost(roofline()), True)[0], iterations(LaterHost(roofline()), False)[0])


def test_fast_forms_of_our_own_models_are_used() -> None:
    fast = FastCosts(roofline())
    assert fast.iteration_ns == fast.cost.iteration_ns  # type: ignore[attr-defined]
    assert fast.repeat_terms is not None
    assert FastCosts(TwiceAsSlow(roofline())).repeat_terms is None


def test_draws_of_a_wrapper_are_not_those_of_the_model_inside() -> None:
    engine = load_cost_model(MODEL, GPU).engine  # type: ignore[attr-defined]
    for cost in (TwiceAsSlow(load_cost_model(MODEL, GPU)), SlowFit(engine)):
        run = replay(TRACE, policy="chunked", model=MODEL, gpu=GPU, cost=cost)
        # Nor is what the operators inside were measured for.
        assert run.config["cost_evidence"]["assumed"][0]["operator"] == "iteration"
        from simulator.cluster.pools import make_cluster_plan
        from simulator.config import ReplayConfig

        plan = make_cluster_plan(ReplayConfig(policy="chunked", model=MODEL, gpu=GPU), TRACE, cost)
        with pytest.raises(SimulationError, match="knows no error"):
            plan.drawn(0)


MINE = """
import numpy as np


class Flat:
    kind, calibrated, name, stages, tile = "mine", False, "flat", 1, 128

    def __init__(self, gpu):
        self.ns = 10_000_000 if gpu.name == "h100" else 20_000_000

    def host_ns(self, shape):
        return 0, 0

    def stage_ns(self, shape, stage=0):
        return self.ns

    def send_ns(self, shape, stage):
        return 0

    def repeat_ns(self, shape, steps, stage=0):
        return np.full(steps, self.ns)

    def predict_ns(self, shapes, stage=0):
        return np.full(len(shapes), self.ns)

    def breakdown(self, shape):
        return {"all": self.ns}

    def inside(self, shape):
        return False

    def provenance(self):
        return {"kind": "mine"}


class Fraction(Flat):
    def stage_ns(self, shape, stage=0):
        return 0.5


class Lacking:
    stages = 1


class Asking(Flat):
    def __init__(self, weather):
        pass
"""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(MINE)
    (folder / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,11\n")
    words = [sys.executable, "-m", "simulator", "replay", "trace.csv", "--gpu", "h100", "--cost-model", *arguments]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "HOME": "/"})


def test_a_cost_model_of_ones_own_is_named_by_file_and_class(tmp_path: Path) -> None:
    # A prompt and ten decodes of 10 ms each.
    done = command(tmp_path, "mine.py:Flat", "--json")
    assert '"e2e_s_p50": 0.11,' in done.stdout, done.stderr
    assert '"cost_basis": "uncalibrated: nothing of it measured; iteration 100 % assumed"' in done.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mine.py:Fraction", "error: cost model flat: stage_ns: found 0.5, expected whole nanoseconds above 0"),
        ("mine.py:Lacking", "error: cost model mine.py:Lacking: found no kind, calibrated, name, tile, host_ns"),
        (
            "mine.py:Asking",
            "error: cost model mine.py:Asking: found the parameter weather, expected some of model, gpu",
        ),
        ("mine.py:Nothing", "Nothing"),
        ("other.py:Flat", "error: cost model file other.py: no such file"),
    ],
)
def test_what_a_cost_model_of_ones_own_lacks_is_one_line(tmp_path: Path, name: str, says: str) -> None:
    done = command(tmp_path, name)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
