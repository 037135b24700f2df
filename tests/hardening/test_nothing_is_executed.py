"""Data is never code: no pickle, no eval, no shell; policy files run only when named; dependencies have lower bounds."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hardening.command_line import assert_refused, run

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("policies", "workloads", "metrics", "profiler", "simulator", "executor", "experiments")
SOURCES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
NEVER_IMPORTED = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "imp", "pty"}
NEVER_CALLED = {
    "eval",
    "exec",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "torch.jit.load",
    "pd.read_pickle",
    "pandas.read_pickle",
    "to_pickle",
    "extractall",
    "extract",
    "tempfile.mktemp",
    "subprocess.getoutput",
    "yaml.load",
    "numpy.save",
    "np.save",
}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def faults(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        found += [f"imports {name}" for name in names if name.partition(".")[0] in NEVER_IMPORTED]
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        how = given.get("filter")
        stays_inside = isinstance(how, ast.Constant) and how.value == "data"  # no paths out, no devices, no owners
        if name in NEVER_CALLED or name.rpartition(".")[2] in ("extractall", "to_pickle"):
            if not (name.endswith("extractall") and stays_inside):
                found.append(f"line {node.lineno} calls {name}")
        if "shell" in given:
            found.append(f"line {node.lineno} says shell=")
        if name in ("np.load", "numpy.load"):
            allowed = given.get("allow_pickle")
            if not (isinstance(allowed, ast.Constant) and allowed.value is False):
                found.append(f"line {node.lineno}: np.load without allow_pickle=False")
    return found


def test_no_source_can_run_what_it_reads() -> None:
    assert {str(file.relative_to(ROOT)): found for file in SOURCES if (found := faults(file))} == {}


def test_policies_need_the_standard_library_alone() -> None:
    import sys

    for file in (ROOT / "policies").glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):  # what only a type checker reads is no need
            if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING":
                node.body = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                roots = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                roots = [(node.module or "").partition(".")[0]]
            else:
                continue
            assert [root for root in roots if root not in sys.stdlib_module_names and root != "policies"] == [], file


def test_every_dependency_has_a_lower_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(one for group in project["optional-dependencies"].values() for one in group)]
    assert [one for one in wanted if not re.match(r"[\w\[\]-]+>=\d", one)] == []


def test_a_policy_file_runs_only_when_it_is_named(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = tmp_path / "run.toml"
    for names in (
        'policy = "mine"',
        f'policy = "{mine}"',
        'policy = "../mine.py"',
        'model = "mine"',
        'router = "mine"',
    ):
        config.write_text(names + "\n")
        assert_refused(run("simulator", "replay", "examples/trace.csv", "--limit", 2, "--config", config))
    run("simulator", "policies")
    run("simulator", "routers")
    assert not (tmp_path / "ran").exists()
    config.write_text(f'policy = "{mine}:Mine"\n')
    assert "found no class 'Mine'" in assert_refused(
        run("simulator", "replay", "examples/trace.csv", "--config", config)
    )
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "..", "a/b", "chunked/../../x"])
def test_a_name_is_never_a_way_out_of_a_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for command in (
        (
            "simulator",
            "compare",
            "examples/trace.csv",
            "--limit",
            2,
            "--policies",
            name,
            "--out",
            tmp_path / "out" / "in",
        ),
        ("experiments", "run", name, "--quick", "--workers", 0, "--out", tmp_path / "out" / "in"),
        ("experiments", "claims", name, "--out", tmp_path / "out" / "in.json"),
    ):
        assert_refused(run(*command))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_report_shows_names_and_does_not_run_them(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    bad = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    trace = tmp_path / "a.csv"
    trace.write_text(
        f'arrival_s,prompt_tokens,output_tokens,slo,session\n0,9,9,"{bad}","{bad}"\n1,9,9,"{bad}","{bad}"\n'
    )
    assert run("simulator", "replay", trace, "--out", tmp_path / "run").code == 0
    done = run("metrics", "report", tmp_path / "run", "--out", tmp_path / "r.html", "--question", bad)
    assert done.code == 0, done.err
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "<img src=x" not in page


def _answer(*packages: dict[str, object], stderr: str = "") -> Any:
    return lambda *words, **options: SimpleNamespace(
        stdout=json.dumps({"dependencies": packages}) if packages else "", stderr=stderr
    )


FAULT = {"name": "jinja2", "version": "2.10", "vulns": [{"id": "CVE-2019-10906", "fix_versions": ["2.10.1"]}]}


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (_answer({"name": "jinja2", "skip_reason": "not found and could not be audited"}), 2),
        (_answer({"name": "jinja2", "version": "2.10", "vulns": []}), 2),
        (_answer(stderr="Traceback\nConnectionError: no route"), 2),
        (_answer(FAULT), 1),
    ],
)
def test_an_audit_that_looked_nothing_up_is_none(answer: Any, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "docs" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    monkeypatch.setattr(audit.subprocess, "run", answer)
    monkeypatch.setattr(audit, "installed", lambda: ["jinja2==2.10"])
    with pytest.raises(SystemExit) as ended:
        audit.main()
    assert ended.value.code == code


def test_files_for_workers_lie_where_nobody_else_can_put_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies are among them, and the temporary folder is everybody's."""
    from experiments.errors import ExperimentError
    from experiments.running.task_runners import placed

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = Path(placed("../../x/my_policy.py", b"pass"))
    assert file.parent.parent.parent == tmp_path
    assert file.parent.parent.stat().st_mode & 0o077 == 0
    assert placed("../../x/my_policy.py", b"pass") == str(file)
    ours = file.parent.parent
    ours.chmod(0o777)
    with pytest.raises(ExperimentError, match="others own or can write"):
        placed("other.py", b"pass")
    shutil.rmtree(ours)
    (tmp_path / "theirs").mkdir()
    ours.symlink_to(tmp_path / "theirs")
    with pytest.raises(ExperimentError, match="others own or can write"):
        placed("other.py", b"pass")


def test_kernels_that_others_could_have_put_there_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executor.native import library

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_run", lambda command: Path(command[-1]).write_bytes(b"built here"))
    target = library._build()
    assert target.stat().st_mode & 0o077 == 0
    assert library._build() == target
    target.chmod(0o777)
    with pytest.raises(library.NativeError, match="others own or can write"):
        library._build()
    target.unlink()
    target.symlink_to(tmp_path / "theirs.so")
    with pytest.raises(library.NativeError, match="found a link"):
        library._build()


@pytest.mark.parametrize("name", ["metrics", "profiler", "workloads"])
def test_a_module_of_the_users_in_place_of_ours_is_noticed(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("print('the wrong one')\n")
    done = subprocess.run(
        [sys.executable, "-m", "simulator", "policies"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {tmp_path}/{name}.py stands in front of Charioteer's own {name}")


ENTRY_POINTS = """[charioteer.policies]
[/] = evil_good:NotAPolicy
../../up = evil_good:X
bye = evil_exit:P
boom = evil_raise:P
gone = nowhere:P
none = evil_anything:P
twice = evil_good:NotAPolicy
twice = evil_good:X
chunked = evil_exit:P
[charioteer.routers]
random = evil_exit:R
bad = evil_exit:R
"""


def test_entry_points_of_a_hostile_package_end_nothing_and_take_no_place_of_ours(tmp_path: Path) -> None:
    folder = tmp_path / "evil-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    for name, text in {
        "good": "class NotAPolicy: pass\nX = 3\n",
        "exit": "import sys; sys.exit(0)\n",
        "raise": "raise ValueError('boom')\n",
        "anything": "def __getattr__(name): return None\n",
    }.items():
        (tmp_path / f"evil_{name}.py").write_text(text)

    def simulator(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "simulator", *map(str, words)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    listed = simulator("policies", "--json")
    assert listed.returncode == 0
    assert "chunked" in {row["policy"] for row in json.loads(listed.stdout)}
    for name in ("[/]", "../../up", "bye", "boom", "gone", "none"):
        assert f"policy {name}" in listed.stderr
    assert "in two packages" in listed.stderr
    # A module that leaves with exit code 0 is no success.
    for words in (("--policy", "bye"), ("--replicas", 2, "--router", "bad")):
        refused = simulator("replay", "examples/trace.csv", "--limit", 3, *words)
        assert refused.returncode == 2, words
        assert "SystemExit: 0" in refused.stderr
