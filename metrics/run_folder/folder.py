"""A run folder on disk: written whole or not at all, read back with errors that name the file.

Everything is written into a sibling folder first and renamed into place, so a reader never sees half a run. Only a
folder with our own marker in its config.json is ever replaced, and only if nothing lies in it that a run did not write.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metrics.run_folder.columns import FIGURES, LATER, RUN_MARKER, RUN_VERSION, SERVED, TABLES, MetricsError, schema
from metrics.run_folder.config_check import AS_WRITTEN, check_config, digests
from policies.edges.compiling import how_built
from policies.edges.input_file import read_json, shown_path
from policies.edges.output_file import (
    check_place,
    clear_leftovers,
    followed,
    is_scratch,
    new_mode,
    put_folder,
    scratch_prefix,
)

if TYPE_CHECKING:
    import pyarrow.parquet as pq

    from metrics.run_folder.tables import RunTables


def write_run(
    path: str | Path, run: RunTables, config: Mapping[str, Any], summary: Mapping[str, Any] | None = None
) -> Path:
    """Write a run folder: config.json, the five tables and, if given, summary.json. Returns its path.

    A link is followed. Raises MetricsError if something that no run wrote is in the way, or if the disk refuses.
    """
    check_run_place(path)
    target = followed(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=scratch_prefix(target.name), suffix=".part", dir=target.parent))
    except OSError as error:
        raise MetricsError(f"{target}: cannot write a run folder there: {error.strerror}") from error
    try:
        scratch.chmod(new_mode(0o777))
        facts = json_ready(config)
        _write_json(scratch / "config.json", {RUN_MARKER: RUN_VERSION, **facts, AS_WRITTEN: digests(facts)})
        for name in TABLES:
            _write_table(scratch / f"{name}.parquet", run, name)
        if summary is not None:
            _write_json(scratch / "summary.json", summary)
        put_folder(scratch, target, _refuse_to_replace)
    except OSError as error:
        raise MetricsError(f"{path}: cannot write the run folder: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Path(path)


def read_run(path: str | Path) -> RunTables:
    """Read a run folder. Tables stay on disk until a column is asked for; .config and .summary are dictionaries.

    A folder that is replaced while it is read is read again. Where it is replaced later, the next column that is asked
    for raises MetricsError.
    """
    from metrics.run_folder.tables import identity

    while True:
        there = identity(followed(path))
        try:
            run = _read_whole(Path(path))
        except (MetricsError, OSError):
            if identity(followed(path)) == there:
                raise
            continue
        if identity(followed(path)) == there:
            return run


def _read_whole(folder: Path) -> RunTables:
    from metrics.run_folder.tables import RunTables, identity

    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise MetricsError(f"{folder}: found {found}, expected a run folder")
    if not (folder / "config.json").exists():
        runs = sorted(inner.name for inner in folder.iterdir() if (inner / "config.json").exists())
        if runs:
            raise MetricsError(
                f"{folder}: is no run folder but holds some: {', '.join(runs[:9])}{', ...' * (len(runs) > 9)}; "
                f"name one, as {folder / runs[0]}"
            )
    config = _read_json(folder / "config.json")
    if RUN_MARKER not in config:
        raise MetricsError(
            f"{folder / 'config.json'}: found no key {RUN_MARKER!r}, expected the config of a run folder"
        )
    if config[RUN_MARKER] != RUN_VERSION:
        raise MetricsError(
            f"{folder / 'config.json'}: found layout {config[RUN_MARKER]!r}, expected {RUN_VERSION}; run it again"
        )
    check_config(config, folder / "config.json")
    tables = {name: folder / f"{name}.parquet" for name in TABLES}
    for name, file in tables.items():
        _check_table(file, name)
    summary_file = folder / "summary.json"
    summary = _read_json(summary_file) if summary_file.exists() else {}
    facts = {key: value for key, value in config.items() if key not in (RUN_MARKER, AS_WRITTEN)}
    return RunTables(tables, facts, summary, {name: identity(file) for name, file in tables.items()})


def is_run_folder(path: str | Path) -> bool:
    """Whether the folder carries our marker, whatever else is the matter with it."""
    try:
        return RUN_MARKER in _read_json(Path(path) / "config.json")
    except MetricsError:
        return False


def replaced(path: str | Path, config: Mapping[str, Any]) -> str | None:
    """A sentence where a run of something else lies at `path`, which a run with this config will replace."""
    try:
        there = _read_json(Path(path) / "config.json")
    except MetricsError:
        return None
    if RUN_MARKER not in there:
        return None

    def what(of: Mapping[str, Any]) -> list[str]:
        trace = of.get("trace")
        named = [of.get(key) for key in ("world", "policy", "model", "gpu")]
        return [str(value) for value in (*named, trace.get("name") if isinstance(trace, Mapping) else None) if value]

    if what(there) == what(config):
        return None
    return f"{path}: the run there ({', '.join(what(there))}) is replaced by this one"


def parquet_writer(file: Path, table: str) -> pq.ParquetWriter:
    """A writer for one table of a run folder; only strings are dictionary-encoded."""
    import pyarrow.parquet as pq

    columns = schema(table)
    strings = [field.name for field in columns if str(field.type) == "string"]
    return pq.ParquetWriter(file, columns, compression="snappy", use_dictionary=strings or False)


def _write_table(file: Path, run: RunTables, name: str) -> None:
    on_disk = run.path(name)
    if on_disk is not None and run.has_all_columns(name):
        shutil.copyfile(on_disk, file)
        return
    with parquet_writer(file, name) as writer:
        writer.write_table(run.table(name))


def _check_table(file: Path, name: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        raise MetricsError(f"{file}: found nothing, expected the table {name} of a run folder")
    try:
        found = pq.read_schema(file)
    except (pa.ArrowException, OSError) as error:
        raise MetricsError(f"{file}: found something unreadable, expected a parquet file ({_line(error)})") from error
    for field in schema(name):
        position = found.get_field_index(field.name)
        if position < 0 and field.name in LATER:
            continue
        if position < 0:
            raise MetricsError(f"{file}: found no column {field.name!r}, expected {name} to have it")
        if found.field(position).type != field.type:
            raise MetricsError(
                f"{file}: column {field.name!r}: found type {found.field(position).type}, expected {field.type}"
            )


def check_run_place(path: str | Path) -> None:
    """Raises MetricsError where a run could not be written, so that it shows before the run and not after it."""
    from metrics.run_folder.tables import identity

    check_place(path, MetricsError)
    target = followed(path)
    clear_leftovers(target.parent)
    while (there := identity(target)) is not None:
        try:
            _check_what_is_there(path, target)
        except (MetricsError, OSError):
            if identity(target) == there:
                raise
            continue  # another run was put there while we looked
        return


def _check_what_is_there(path: str | Path, target: Path) -> None:
    if not target.is_dir():
        raise MetricsError(f"{shown_path(path)}: found a file, expected a run folder or nothing; choose another place")
    if target in (here := Path.cwd(), *here.parents):
        raise MetricsError(
            f"{shown_path(path)}: found the current folder or one around it, expected a folder for this run alone; "
            f"name one in it, such as {Path(path) / 'run'}"
        )
    _refuse_to_replace(target, target)


def _refuse_to_replace(folder: Path, target: Path) -> None:
    """Raises MetricsError where not everything in a folder was written by a run. target: what messages call it."""
    if not any(folder.iterdir()):
        return
    if not is_run_folder(folder):
        raise MetricsError(f"{target}: found a folder that is not a run folder; choose another place or remove it")
    if foreign := _not_of_a_run(folder):
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise MetricsError(
            f"{target}: found {', '.join(foreign[:3])}{more} beside the run there, expected nothing but files of a "
            "run, which would be replaced; choose another place, or move what you want to keep"
        )


def _not_of_a_run(folder: Path) -> list[str]:
    """What lies in a run folder and was written by none of our commands, relative to it, sorted."""
    ours = {"config.json", "summary.json", "timeline.json", *(f"{name}.parquet" for name in (*TABLES, *SERVED))}
    found: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "figures" and entry.is_dir(follow_symlinks=False):
                with os.scandir(entry.path) as drawn:
                    found += [f"figures/{inner.name}" for inner in drawn if not _is_figure(inner)]
            elif not (entry.name in ours or is_scratch(entry.name)) or not entry.is_file(follow_symlinks=False):
                found.append(entry.name)
    return sorted(found)


def _is_figure(entry: os.DirEntry[str]) -> bool:
    stem, _, suffix = entry.name.rpartition(".")
    ours = (stem in FIGURES and suffix in ("pdf", "png")) or is_scratch(entry.name)
    return ours and entry.is_file(follow_symlinks=False)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(json_ready(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists() and not file.is_symlink():
        raise MetricsError(f"{file}: found nothing, expected the file of a run folder")
    content = read_json(file, MetricsError)
    if not isinstance(content, dict):
        raise MetricsError(f"{file}: found a JSON {type(content).__name__}, expected an object")
    return content


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of libraries that a result depends on, for config.json; whether the core is compiled."""
    found = {"python": platform.python_version(), "core": how_built()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "source"
    return found


def json_ready(value: Any) -> Any:
    """The same value in what JSON can hold: NaN and infinity become null, numpy scalars and paths plain values."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    if hasattr(value, "tolist"):
        return json_ready(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
