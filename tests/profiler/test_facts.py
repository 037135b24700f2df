"""Measurements that travel with the project: each says where it comes from, and nothing is larger than it may be."""

from __future__ import annotations

import csv
import re
import tomllib
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from profiler.measurements.facts import FACTS

ROOT = Path(__file__).parents[2]
SOURCES = tomllib.loads((FACTS / "sources.toml").read_text(encoding="utf-8"))
TABLES = sorted(path for path in FACTS.rglob("*") if path.suffix in (".parquet", ".csv"))


def rows_of(path: Path) -> int:
    if path.suffix == ".parquet":
        return int(pq.read_metadata(path).num_rows)
    with path.open(encoding="utf-8", newline="") as lines:
        return sum(1 for _ in csv.reader(lines)) - 1


def test_every_table_has_a_source_and_every_source_a_table() -> None:
    assert {path.relative_to(FACTS).with_suffix("").as_posix() for path in TABLES} == set(SOURCES)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_has_the_rows_licence_and_words_that_its_source_says(path: Path) -> None:
    source = SOURCES[path.relative_to(FACTS).with_suffix("").as_posix()]
    assert rows_of(path) == source["rows"]
    assert source["licence"] in ("MIT", "Apache-2.0", "CC-BY 4.0", "facts")
    assert source["what"]


def test_the_notice_names_every_project_that_is_a_source() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8").lower()
    owners = {
        found
        for source in SOURCES.values()
        if not source["source"].startswith(("measured", "examples"))
        for found in re.findall(r"\b[\w-]+/[\w-]+\b", source["source"])
    }
    assert owners
    for project in owners:
        assert f"github.com/{project}".lower() in notice, project
    for name in ("aiconfigurator", "azure public dataset", "splitwise", "vidur", "distserve", "servegen"):
        assert name in notice


def test_facts_take_fifteen_megabytes_at_most() -> None:
    assert sum(path.stat().st_size for path in FACTS.rglob("*")) < 15e6


def test_nothing_that_is_read_lies_outside_the_project() -> None:
    """A folder beside the checkout may hold whole originals; tests alone look there, through tests/shared_data.py."""
    outside = "../" + "shared"
    files = [path for room in ROOT.iterdir() if room.is_dir() and not room.name.startswith(".") and room.name not in ("runs", "build")
             for path in room.rglob("*") if path.suffix in (".py", ".md", ".toml")]  # fmt: skip
    files += [ROOT / "Makefile", ROOT / "README.md", ROOT / "pyproject.toml"]
    assert len(files) > 500
    assert [str(path) for path in files if outside in path.read_text(encoding="utf-8")] == []
