"""A run folder is written whole or not at all, and read back as it was."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metrics import MetricsError, Recorder, read_run, write_run
from metrics.run_folder.columns import FIGURES, TABLES
from policies.edges import output_file
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


BESIDE = {
    "compare's run": "vllm_v1/config.json",
    "compare's report": "report.html",
    "notes": "thesis/notes.md",
    "a figure of the user's": "figures/for_the_paper.pdf",
    "a hidden file": ".gitignore",
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_a_run_folder_with_anything_else_in_it_is_not_replaced(tmp_path, beside) -> None:
    place = write_run(tmp_path / "study", small_run(), {"seed": 1})
    (place / beside).parent.mkdir(exist_ok=True)
    (place / beside).write_text("mine")
    with pytest.raises(MetricsError, match=f"study: found .*{beside.split('/')[0]}.* move what you want to keep"):
        write_run(place, small_run(), {"seed": 2})
    assert (place / beside).read_text() == "mine"
    assert read_run(place).config["seed"] == 1
    assert os.listdir(tmp_path) == ["study"]


def test_what_commands_draw_into_a_run_goes_with_it(tmp_path) -> None:
    place = write_run(tmp_path / "run", small_run(), {"seed": 1})
    (place / "figures").mkdir()
    for name in ("timeline.json", "summary.json", *(f"figures/{name}.pdf" for name in FIGURES)):
        (place / name).write_text("{}")
    write_run(place, small_run(), {"seed": 2})
    assert sorted(os.listdir(place)) == sorted(["config.json", *(f"{name}.parquet" for name in TABLES)])


def test_what_comes_into_the_folder_while_it_is_replaced_is_not_lost(tmp_path, monkeypatch) -> None:
    """The check before the work saw nothing; the one behind the exchange does, and brings the old folder back."""
    place = write_run(tmp_path / "run", small_run(), {"seed": 1})
    exchange = output_file._exchange
    for possible in (True, False):  # also where two folders cannot change places in one step

        def late(one, other, possible=possible):
            (place / "notes.md").write_text("mine")
            return exchange(one, other) if possible else False

        with monkeypatch.context() as patch:
            patch.setattr(output_file, "_exchange", late if not possible else _once(late, exchange))
            with pytest.raises(MetricsError, match=r"found notes\.md beside the run there"):
                write_run(place, small_run(), {"seed": 2})
        assert (place / "notes.md").read_text() == "mine"
        assert read_run(place).config["seed"] == 1
        assert os.listdir(tmp_path) == ["run"]
        (place / "notes.md").unlink()


def _once(first, then):
    calls = iter([first])
    return lambda one, other: next(calls, then)(one, other)


def test_an_open_run_that_is_replaced_does_not_mix_with_the_new_one(tmp_path) -> None:
    place = write_run(tmp_path / "run", small_run(), {"seed": 1})
    opened = read_run(place)
    kept = opened.column("requests", "arrival_s")
    write_run(place, small_run(), {"seed": 2})
    for ask in (lambda: opened.column("iterations", "end_s"), lambda: opened.rows("tokens"), opened.chunks):
        with pytest.raises(MetricsError, match="run: found another run there than the one that was opened"):
            ask()
    assert opened.config["seed"] == 1
    assert kept.tolist() == read_run(place).column("requests", "arrival_s").tolist()
    shutil.rmtree(place)
    with pytest.raises(MetricsError, match="found another run"):
        opened.rows("tokens")


def _seeds_read(place, tries: int, found) -> None:
    for _ in range(tries):
        run = read_run(place)
        found.put((run.config["seed"], run.summary["seed"]))


def test_a_run_that_is_read_while_it_is_replaced_is_one_or_the_other(tmp_path) -> None:
    place = write_run(tmp_path / "run", small_run(), {"seed": 0}, {"seed": 0})
    fork = multiprocessing.get_context("fork")
    found = fork.Queue()
    reader = fork.Process(target=_seeds_read, args=(place, 60, found))
    reader.start()
    for seed in range(1, 40):
        write_run(place, small_run(), {"seed": seed}, {"seed": seed})
    reader.join(60)
    assert reader.exitcode == 0
    pairs = [found.get(timeout=5) for _ in range(60)]
    assert all(of_config == of_summary for of_config, of_summary in pairs)


def test_a_link_is_followed_and_stays(tmp_path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "run")
    for seed in (1, 2):  # the first time it leads nowhere yet
        assert write_run(link, small_run(), {"seed": seed}) == link
        assert link.is_symlink()
        assert read_run(tmp_path / "disk" / "run").config["seed"] == seed
    assert os.listdir(tmp_path / "disk") == ["run"]
    text = tmp_path / "text"
    text.symlink_to(tmp_path / "disk" / "text.md")
    output_file.write_text(text, "new", MetricsError)
    assert text.is_symlink()
    assert (tmp_path / "disk" / "text.md").read_text() == "new"
    (tmp_path / "itself").symlink_to("itself")
    with pytest.raises(MetricsError, match="a link to itself"):
        output_file.write_text(tmp_path / "itself", "new", MetricsError)
    with pytest.raises(MetricsError, match="itself"):
        write_run(tmp_path / "itself", small_run(), {})


def test_the_current_folder_is_not_replaced_under_the_shell(tmp_path, monkeypatch) -> None:
    place = tmp_path / "empty" / "deep"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    for name in (".", "..", str(place)):
        with pytest.raises(MetricsError, match="found the current folder or one around it"):
            write_run(name, small_run(), {})


def test_a_run_folder_keeps_the_rights_that_the_umask_leaves(tmp_path) -> None:
    before = os.umask(0o077)
    try:
        place = write_run(tmp_path / "run", small_run(), {})
    finally:
        os.umask(before)
    assert place.stat().st_mode & 0o777 == 0o700


def _write_again_and_again(place, seed: int, exchange: bool) -> None:
    if not exchange:
        output_file._exchange = lambda one, other: False
    for _ in range(15):
        write_run(place, small_run(), {"seed": seed})


@pytest.mark.parametrize("exchange", [True, False])
def test_writers_that_race_leave_one_whole_run_and_nothing_else(tmp_path, exchange) -> None:
    fork = multiprocessing.get_context("fork")
    racers = [fork.Process(target=_write_again_and_again, args=(tmp_path / "run", n, exchange)) for n in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert os.listdir(tmp_path) == ["run"]
    assert_same_tables(read_run(tmp_path / "run"), small_run(), TABLES)


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
