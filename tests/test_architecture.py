"""docs/architecture.md's picture of the folders is the code's: imports point down only."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = {"policies": 1, "workloads": 2, "metrics": 2, "profiler": 2, "simulator": 3, "executor": 3, "experiments": 4}
NEVER = {
    "torch": ("policies", "workloads", "metrics", "profiler", "simulator"),
    "triton": ("policies", "workloads", "metrics", "profiler", "simulator", "experiments"),
    "simpy": ("policies", "workloads", "metrics", "profiler", "executor"),
    "numpy": ("policies",),
    "pandas": ("policies",),
}


def imported(file: Path) -> set[str]:
    """First names of every module that the file imports, at the top or within a function."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("folder", FLOORS)
def test_imports_point_down_only(folder):
    wrong = []
    for file in (ROOT / folder).rglob("*.py"):
        for name in imported(file) - {folder}:
            if FLOORS.get(name, 0) >= FLOORS[folder] or folder in NEVER.get(name, ()):
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_preconditions_of_state_machines_have_names():
    """Hypothesis 6.100, the lowest that pyproject.toml allows, parses the source of a lambda at every step."""
    files = (ROOT / "tests").rglob("*.py")
    assert [
        str(file) for file in files if re.search(r"^ *@precondition\(lambda", file.read_text(), flags=re.MULTILINE)
    ] == []
