"""Where a sweep's results lie: one file per finished point, renamed into place, then one table.

A point is either there whole or not at all, so a sweep that was killed goes on where it was; nothing is kept in memory
that could be lost. The table is made from the files alone and holds nothing that depends on who did the work when.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.errors import ExperimentError
from experiments.sweeps.axes import SweepSpec, task_of
from metrics.run_folder.folder import versions_of
from policies.edges.input_digests import changed_inputs, digests_of
from policies.edges.input_file import read_json
from policies.edges.output_file import whole_file, write_text

if TYPE_CHECKING:
    import pyarrow as pa

SWEEP_FILE = "sweep.json"
TABLE_FILE = "sweep.parquet"
_POINT = {"point", "values", "status", "error", "result"}


class SweepFolder:
    """The folder of one sweep. `results` holds every finished point: number -> its file's content."""

    def __init__(self, path: str | Path, spec: SweepSpec, *, retry_failed: bool = False) -> None:
        self.path = Path(path)
        self.spec = spec
        self.results: dict[int, dict[str, Any]] = {}
        self._points = self.path / "points"
        self._version = versions_of(("charioteer",))["charioteer"]
        self._claim()
        self._read(retry_failed)

    def _claim(self) -> None:
        """Take the folder for this sweep; one that holds something else is an error."""
        file = self.path / SWEEP_FILE
        wanted = self.spec.fingerprint()
        try:
            if file.exists():
                content = read_json(file, ExperimentError)
                found = content.get("fingerprint") if isinstance(content, dict) else None
                if found != wanted:
                    raise ExperimentError(
                        f"{self.path}: holds the results of another sweep; choose another --out, or remove it"
                    )
                before = content["sweep"]["points"]
                if before > self.spec.points:
                    raise ExperimentError(
                        f"{self.path}: holds a sweep of {before} points; ask for as many or more, or take another --out"
                    )
                if before < self.spec.points:
                    self._write_claim(file)
                return
            if self.path.exists() and (not self.path.is_dir() or any(map(_is_foreign, self.path.iterdir()))):
                raise ExperimentError(f"{self.path}: is no folder of a sweep; choose another --out, or remove it")
            self._points.mkdir(parents=True, exist_ok=True)
            self._write_claim(file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, ExperimentError):
                raise
            raise ExperimentError(f"{self.path}: cannot be used for a sweep: {error}") from None

    def _write_claim(self, file: Path) -> None:
        content = {"fingerprint": self.spec.fingerprint(), "sweep": asdict(self.spec)}
        write_text(file, json.dumps(content, indent=2), ExperimentError, sync=True)

    def _read(self, retry_failed: bool) -> None:
        for file in sorted(self._points.glob("[0-9]*.json")):
            try:
                content = read_json(file, ExperimentError)
                number = int(file.stem)
                if not (isinstance(content, dict) and set(content) >= _POINT and content["point"] == number):
                    raise ValueError("found something else, expected a point of a sweep")
            except ValueError as error:
                raise ExperimentError(f"{file}: cannot be read ({error}); remove it to run its point again") from None
            if not (retry_failed and content["status"] == "failed"):
                self.results[number] = content

    def refuse_other_inputs(self) -> None:
        """Raises ExperimentError where a finished point was made from other files than there are now, or by another
        version: its row would stand beside rows of other inputs."""
        version = self._version
        for number, content in sorted(self.results.items()):
            then = content.get("inputs")
            if not isinstance(then, dict):
                found = ["it does not say from which inputs"]
            else:
                now = digests_of({**task_of(self.spec, content["values"]), "inputs": None})
                found = changed_inputs(then, now)
                found += [f"{name} (is there no more)" for name in then if name not in now]
                if content.get("version") != version:
                    found.append(f"charioteer ({content.get('version')} then, {version} now)")
            if found:
                raise ExperimentError(
                    f"{self.path}: point {number} was made from other inputs: {', '.join(found)}; choose another "
                    "--out, or take --anyway to keep such points beside new ones"
                )

    def add(
        self, number: int, values: Mapping[str, Any], result: Mapping[str, Any], inputs: Mapping[str, str] | None = None
    ) -> None:
        """Keep one finished point; when this returns it is on the disk. inputs: digests of what it was made from."""
        content = {"point": number, "values": dict(values), **result}
        content |= {"inputs": dict(inputs or {}), "version": self._version}
        write_text(self._points / f"{number:06d}.json", json.dumps(content), ExperimentError, sync=True)
        self.results[number] = content

    def rows(self) -> list[dict[str, Any]]:
        """One flat row per finished point, in order: what it set, how it ended, what it came to."""
        axes = [axis.name for axis in self.spec.axes]
        keys: dict[str, None] = {}
        for content in self.results.values():
            keys.update(dict.fromkeys(content["result"]))
        rows = []
        for number, content in sorted(self.results.items()):
            values, result = content["values"], content["result"]
            # An axis that is also a key of the summary (policy, model, gpu) appears once, as what was set.
            row = {"point": number, **{name: values.get(name) for name in axes}}
            row |= {"status": content["status"], "error": content["error"]}
            row |= {key: result.get(key) for key in keys if key not in row}
            rows.append(row)
        return rows

    def write_table(self) -> Path:
        """All finished points as one Parquet table, whole or not at all."""
        import pyarrow.parquet as pq

        target = self.path / TABLE_FILE
        with whole_file(target, ExperimentError) as scratch:
            pq.write_table(table_of(self.rows()), scratch)
        return target


def _is_foreign(entry: Path) -> bool:
    """Whether something in a folder without sweep.json is not what a sweep killed at its start leaves."""
    if entry.name == "points" and entry.is_dir():
        return any(entry.iterdir())
    return not (entry.name.startswith(f".{SWEEP_FILE}.") and entry.is_file())


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as a table; a column whose values are of different kinds becomes text, one without values numbers."""
    import pyarrow as pa

    columns = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(name) for row in rows]
        try:
            column = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            column = pa.array([None if value is None else str(value) for value in values])
        columns[name] = column.cast(pa.float64()) if pa.types.is_null(column.type) else column
    return pa.table(columns)
