"""A run folder is written whole or not at all, and read back as it was."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metrics import MetricsError, Recorder, read_run, write_run
from metrics.run_folder.columns import TABLES
from tests.metrics.sample_runs import assert_same_tables, record_small_run


def small_run():
    recorder = Recorder()
    record_small_run(recorder)
    return recorder.tables()


def test_a_run_comes_back_as_it_was_written(tmp_path) -> None:
    run = small_run()
    path = write_run(tmp_path / "deep" / "run", run, {"seed": 3, "world": "simulated"}, {"ttft_s_mean": float("nan")})
    back = read_run(path)
    assert_same_tables(back, run, TABLES)
    assert [back.rows(name) for name in TABLES] == [run.rows(name) for name in TABLES]
    assert back.config == {"seed": 3, "world": "simulated"}
    assert back.summary == {"ttft_s_mean": None}
    assert [p.name for p in path.parent.iterdir()] == ["run"]


def test_a_streamed_run_is_written_from_its_scratch_folder(tmp_path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    recorder = Recorder(stream_to=scratch)
    record_small_run(recorder)
    back = read_run(write_run(tmp_path / "run", recorder.tables(), {}))
    assert_same_tables(back, small_run(), TABLES)


def test_an_own_run_folder_is_replaced_and_anything_else_is_not(tmp_path) -> None:
    write_run(tmp_path / "run", small_run(), {"seed": 1})
    write_run(tmp_path / "run", small_run(), {"seed": 2})
    assert read_run(tmp_path / "run").config["seed"] == 2
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work")
    with pytest.raises(MetricsError, match="not a run folder"):
        write_run(precious, small_run(), {})
    assert (precious / "thesis.tex").read_text() == "years of work"
    with pytest.raises(MetricsError, match="found a file"):
        write_run(precious / "thesis.tex", small_run(), {})


def test_a_failed_write_leaves_the_old_run_and_no_scraps(tmp_path) -> None:
    write_run(tmp_path / "run", small_run(), {"seed": 1})
    broken = small_run()
    broken._tables["stages"] = tmp_path / "gone.parquet"
    with pytest.raises(MetricsError, match="cannot write the run folder"):
        write_run(tmp_path / "run", broken, {"seed": 2})
    assert read_run(tmp_path / "run").config["seed"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_what_is_wrong_with_a_folder_is_said_in_one_line(tmp_path) -> None:
    with pytest.raises(MetricsError, match="found nothing, expected a run folder"):
        read_run(tmp_path / "missing")
    path = write_run(tmp_path / "run", small_run(), {})
    (path / "config.json").write_text("{")
    with pytest.raises(MetricsError, match=r"config\.json: cannot be read as JSON"):
        read_run(path)
    (path / "config.json").write_text(json.dumps({"model": "x"}))
    with pytest.raises(MetricsError, match="found no key 'charioteer_run'"):
        read_run(path)
    (path / "config.json").write_text(json.dumps({"charioteer_run": 99}))
    with pytest.raises(MetricsError, match="found layout 99"):
        read_run(path)
    (path / "config.json").write_text(json.dumps({"charioteer_run": 1}))
    pq.write_table(pa.table({"replica": pa.array([1], pa.int32())}), path / "stages.parquet")
    with pytest.raises(MetricsError, match=r"stages\.parquet: found no column 'stage'"):
        read_run(path)
    (path / "stages.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(MetricsError, match=r"stages\.parquet: found something unreadable"):
        read_run(path)
