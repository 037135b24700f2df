"""docs/concepts/architecture.md's picture of the house is the code's: floors, rooms, doors."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
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
MODULES_A_ROOM = 15
GROUND = ("errors", "config")
"""Modules of a package's own floor that every room may stand on, as on the package itself."""


def imported(file: Path) -> set[str]:
    """First names of every module that the file imports, at the top or within a function."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def modules() -> dict[str, Path]:
    files = (file for folder in FLOORS for file in (ROOT / folder).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports_at_load(body: Iterable[ast.stmt], known: dict[str, Path]) -> Iterator[str]:
    """Modules of the house that are imported when a module loads; imports for types alone are not."""
    for node in body:
        if isinstance(node, ast.If):
            checked = "TYPE_CHECKING" in ast.unparse(node.test)
            yield from imports_at_load([*([] if checked else node.body), *node.orelse], known)
        elif isinstance(node, ast.Try):
            handlers = [line for handler in node.handlers for line in handler.body]
            yield from imports_at_load([*node.body, *handlers, *node.orelse, *node.finalbody], known)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if (name := whole if whole in known else node.module) in known:
                    yield name
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


@pytest.mark.parametrize("folder", FLOORS)
def test_imports_point_down_only(folder):
    wrong = []
    for file in (ROOT / folder).rglob("*.py"):
        for name in imported(file) - {folder}:
            if FLOORS.get(name, 0) >= FLOORS[folder] or folder in NEVER.get(name, ()):
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_rooms_import_each_other_in_one_direction():
    known = modules()
    needs: dict[Path, set[Path]] = {}
    for file in known.values():
        if file.name in ("__init__.py", "__main__.py"):
            continue
        for name in imports_at_load(ast.parse(file.read_text()).body, known):
            target = known[name]
            if target.name != "__init__.py" and target.stem not in GROUND and target.parent != file.parent:
                needs.setdefault(file.parent, set()).add(target.parent)
    try:
        tuple(TopologicalSorter(needs).static_order())
    except CycleError as error:
        circle = " -> ".join(str(room.relative_to(ROOT)) for room in error.args[1])
        pytest.fail(f"rooms import each other in a circle: {circle}")


def test_a_room_has_at_most_fifteen_modules():
    sizes = Counter(file.parent.relative_to(ROOT) for file in modules().values())
    assert {str(room): size for room, size in sizes.items() if size > MODULES_A_ROOM} == {}


def test_a_room_says_over_its_door_what_it_is_for():
    silent = []
    for file in modules().values():
        if file.name == "__init__.py":
            words = ast.get_docstring(ast.parse(file.read_text())) or ""
            if not words:
                silent.append(str(file.relative_to(ROOT)))
    assert silent == []


@pytest.mark.parametrize("package", FLOORS)
def test_every_public_name_is_behind_its_door(package):
    door = importlib.import_module(package)
    assert [name for name in getattr(door, "__all__", ()) if not hasattr(door, name)] == []


def test_the_table_of_policies_is_the_folder_of_policies():
    from policies import policy_names

    files = {file.stem for file in (ROOT / "policies").glob("*.py")}
    fair = {file.stem for file in (ROOT / "policies/fair").glob("*.py")}
    assert set(policy_names()) <= files | fair
    assert len(files - set(policy_names())) <= 4, "policies/ shows policies; anything else has a room below it"


def test_preconditions_of_state_machines_have_names():
    """Hypothesis 6.100, the lowest that pyproject.toml allows, parses the source of a lambda at every step."""
    files = (ROOT / "tests").rglob("*.py")
    assert [
        str(file) for file in files if re.search(r"^ *@precondition\(lambda", file.read_text(), flags=re.MULTILINE)
    ] == []
