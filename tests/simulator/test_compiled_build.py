"""The optional compiled build, made from this very source: the five tables of its runs are those of pure Python, and so
are the costs that it predicts."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RUNS = """
import hashlib
from random import Random

from metrics import Recorder
from metrics.run_folder.columns import TABLES
from policies import BatchShape
from policies.edges.compiling import how_built
from profiler import load_cost_model
from simulator.config import ReplayConfig
from simulator.simulation import make_cluster_plan, simulate
from workloads import generate

trace = generate(requests=120, arrivals="poisson:8", prompt="lognormal:700,1", output="lognormal:90,1", seed=5)
crowd = trace.scaled(3.0)
runs = {
    "chunked": (trace, {}),
    "short of memory": (crowd, {"num_blocks": 900}),
    "clients that give up": (crowd.with_timeout(4.0), {}),
    "vllm_v1": (trace, {"policy": "vllm_v1", "prefix_caching": True}),
    "planning ahead": (trace, {"policy": "vllm_v1", "knobs": {"async_scheduling": True}}),
    "padded decodes": (trace, {"policy": "request_level", "knobs": {"keep_finished": True}}),
    "slo_aware": (crowd.head(60), {"policy": "slo_aware"}),
    "fitted costs": (trace.head(60), {"cost_model": "auto"}),
    "pipeline": (crowd, {"pp": 4}),
    "replicas": (crowd, {"replicas": 3, "router": "least_outstanding_tokens"}),
    "forty replicas": (crowd.scaled(9.0), {"replicas": 40, "router": "least_kv"}),
    "forty replicas counted": (crowd.scaled(9.0), {"replicas": 40, "router": "least_outstanding_requests"}),
    "replicas in turn": (crowd, {"replicas": 3, "router": "round_robin"}),
    "pools": (crowd, {"pools": ({"role": "prefill"}, {"role": "decode"})}),
    "ranks": (crowd, {"dp": 2, "rank_router": "least_kv"}),
    "ranks that step together": (crowd, {"dp": 2, "ranks_step": "together", "failures": ("0@2+3",)}),
    "ranks of replicas": (crowd, {"dp": 2, "ranks_step": "together", "replicas": 2, "preemption": "swap"}),
    "plain path": (trace.head(40), {"leaps": False}),
}
print(how_built())
for name, (requests, options) in runs.items():
    plan = make_cluster_plan(ReplayConfig(**{"cost_model": "roofline", **options}), requests)
    recorder = Recorder(part_rows=500)
    simulate(requests, plan, recorder)
    tables = recorder.tables()
    text = repr([tables.table(table).to_pydict() for table in TABLES])
    print(name, tables.rows("iterations"), hashlib.sha256(text.encode()).hexdigest())

draw = Random(0)
for pp in (1, 2):
    cost = load_cost_model("llama-3.1-8b", "h100", pp=pp)
    for chunks in (0, 1, 2, 8):
        for decodes in (0, 1, 200, 2000):
            # Now and then beyond the tables.
            parts = tuple((draw.choice([1, 77, 2048, 20_000]), draw.randint(0, 150_000)) for _ in range(chunks))
            shape = BatchShape(parts, decodes, 700 * decodes, 900 if decodes else 0, 0, decodes)
            print(shape, cost.iteration_ns(shape), cost.stages_ns(shape), cost.stage_ns(shape), cost.inside(shape))
"""


def _runs(folder: Path) -> list[str]:
    """What the runs say when `folder` is where the packages are found."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", RUNS], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_compiled_build_makes_the_same_tables(tmp_path):
    for package, least in (("mypy", (2, 4)), ("setuptools", (77,))):
        pytest.importorskip(package)
        found = tuple(int(part) for part in version(package).split(".")[: len(least)])
        if found < least:
            pytest.skip(
                f"{package} {version(package)} is too old to compile with: {'.'.join(map(str, least))} is needed"
            )
    if importlib.util.find_spec("mypyc") is None:
        pytest.skip("this mypy has no compiler: pip install 'mypy[mypyc]'")
    if shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is None:
        pytest.skip("no C compiler here")
    source, library = tmp_path / "source", tmp_path / "library"
    # What compiling writes beside the source is not to lie about in a checkout.
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "runs", "calib", "docs", "tests", "*.so")
    )
    build = [sys.executable, "setup.py", "build", "--build-base", str(tmp_path / "work"), "--build-lib", str(library)]
    subprocess.run(build, cwd=source, env={**os.environ, "CHARIOTEER_COMPILE": "1"}, check=True, capture_output=True)
    kind, *compiled = _runs(library)
    assert kind == "compiled"
    kind, *pure = _runs(source)
    assert kind == "pure Python"
    assert compiled == pure
