"""The same run under two versions of Python has the same five tables, byte for byte.

Another Python with the packages of the simulator is looked for on the path, or named: OTHER_PYTHON=path/to/python
(for instance that of a second clone: `make test PYTHON=python3.13` there makes one).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS = "import sys, json, numpy, pandas, pyarrow, simpy, typer, rich; print(json.dumps([sys.version_info[:2], pyarrow.__version__, numpy.__version__]))"
RUNS = {
    "chunked": ("--policy", "chunked", "--chunk-size", "256"),
    "slo_aware, short of memory": ("--policy", "slo_aware", "--num-blocks", "700", "--max-model-len", "8192"),
    "a pipeline": ("--policy", "decode_maximal", "--pp", "4"),
    "a cluster that fails": ("--policy", "vllm_v1", "--replicas", "3", "--fail", "1@5+5", "--arrivals", "gamma:8,3"),
    "a roofline": ("--policy", "prefill_priority", "--gpu", "a100-pcie", "--rate-scale", "2"),
}


def facts(python: str) -> list[object] | None:
    try:
        done = subprocess.run([python, "-c", NEEDS], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return json.loads(done.stdout) if done.returncode == 0 else None


def other_python() -> tuple[str, list[object]]:
    named = os.environ.get("OTHER_PYTHON")
    candidates = [named] if named else [path for minor in range(11, 16) if (path := shutil.which(f"python3.{minor}"))]
    for python in candidates:
        found = facts(python)
        if found is not None and found[0] != list(sys.version_info[:2]):
            return python, found
    pytest.skip("found no second version of Python with the simulator's packages; name one: OTHER_PYTHON=...")


@pytest.mark.slow
def test_two_versions_of_python_make_the_same_tables(tmp_path: Path) -> None:
    python, found = other_python()
    same_writers = found[1] == facts(sys.executable)[1]  # type: ignore[index]
    for name, options in RUNS.items():
        for place, runs in (("here", sys.executable), ("there", python)):
            out = tmp_path / place / name
            words = [runs, "-m", "simulator", "replay", "examples/trace.csv", *options, "--out", str(out)]
            done = subprocess.run(
                words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
            )
            assert done.returncode == 0, done.stderr[-800:]
        for table in ("requests", "iterations", "stages", "tokens", "segments"):
            one, other = (tmp_path / place / name / f"{table}.parquet" for place in ("here", "there"))
            if same_writers:
                assert one.read_bytes() == other.read_bytes(), f"{name}: {table}"
            else:
                import pyarrow.parquet as pq

                assert pq.read_table(one).equals(pq.read_table(other)), f"{name}: {table}"
        one, other = (json.loads((tmp_path / place / name / "summary.json").read_text()) for place in ("here", "there"))
        assert one == other
    print(
        f"{sys.version.split()[0]} and {found}: {len(RUNS)} runs alike{'' if same_writers else ' (as tables; pyarrow differs)'}"
    )
