"""The HTML report: its data against the run's own tables, and the page in a real browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metrics import MetricsError, RunTables, summarise
from metrics.html_report import RowTable, write_report
from metrics.html_report.plots import run_plots
from metrics.html_report.requests import inspected_requests
from metrics.html_report.timeline import Slice, timeline_of
from metrics.html_report.verdict import verdict_of
from metrics.pipelines.stage_schedule import schedules
from metrics.run_folder.columns import TABLES
from simulator import replay
from workloads import Trace, generate

pytest.importorskip("plotly")


def run_of(policy: str, trace: Trace, **options: Any) -> RunTables:
    run = replay(trace, policy=policy, model="llama-3.1-8b", gpu="a100", cost_model="roofline", **options)
    run.tables.summary = run.summary
    return run.tables


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(requests=40, arrivals="poisson:4", prompt="uniform:200,3000", output="uniform:5,60", seed=1)


@pytest.fixture(scope="module")
def runs(trace: Trace) -> dict[str, RunTables]:
    return {"prefill_priority": run_of("prefill_priority", trace), "chunked": run_of("chunked", trace, pp=2)}


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def test_the_page_is_one_file_that_asks_nobody_for_anything(runs: dict[str, RunTables], tmp_path: Path) -> None:
    page = write_report(tmp_path / "deep/report.html", runs, question="Which one?")
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", text)
    assert "default-src 'none'" in text
    assert "<h1>Which one?</h1>" in text
    assert [file.name for file in page.parent.iterdir()] == ["report.html"]


def test_names_that_look_like_markup_stay_text(trace: Trace, tmp_path: Path) -> None:
    run = run_of("chunked", trace)
    run.config["model"] = "</script><script>alert(1)</script>"
    page = write_report(tmp_path / "report.html", {"<b>run</b>": run}, question="<i>?</i>")
    text = page.read_text(encoding="utf-8")
    assert "<b>run</b>" not in text
    assert "<i>?</i>" not in text
    assert "alert(1)</script>" not in text
    assert data_of(page)["runs"][0]["label"] == "<b>run</b>"


def test_the_timeline_holds_every_batch_and_bubble_of_a_short_run(runs: dict[str, RunTables]) -> None:
    found = timeline_of(runs["chunked"], None)
    (schedule,) = schedules(runs["chunked"])
    assert found["whole"]
    assert len(found["lanes"]) == 2
    assert len(found["batches"]) == schedule.num_batches
    for stage, lane in enumerate(found["lanes"]):
        starts = np.cumsum(lane["at"])
        expected = (schedule.start[:, stage] - schedule.start.min()) // 1000
        assert starts.tolist() == expected.tolist()
        busy_us = (schedule.end[:, stage] - schedule.start[:, stage]).sum() / 1000
        assert sum(lane["lasts"]) == pytest.approx(busy_us, abs=2 * len(starts))
        assert set(lane["bubble_cause"]) <= set(range(len(found["causes"])))
    assert found["batches"][0][1] == int(schedule.chunk_tokens[0])


def test_a_window_keeps_what_overlaps_it(runs: dict[str, RunTables]) -> None:
    found = timeline_of(runs["prefill_priority"], Slice(2.0, 3.0))
    lane = found["lanes"][0]
    starts = np.cumsum(lane["at"]) / 1e6 + 2.0
    ends = starts + np.array(lane["lasts"]) / 1e6
    assert not found["whole"]
    assert (ends > 2.0 - 1e-5).all()
    assert (starts < 3.0).all()


def test_the_inspector_tells_who_stalled_a_request() -> None:
    """Request 0 decodes; at 1 s request 1 comes with a prompt of 6000 tokens, and under prefill priority goes first."""
    trace = Trace("two", np.array([0, 1_000_000_000]), np.array([100, 6000]), np.array([400, 5]), np.array([400, 5]))
    run = run_of("prefill_priority", trace)
    first, second = inspected_requests(run)["requests"]
    stalled = next(line for line in first["story"] if "prefilling" in line)
    assert "1 iterations ran without it, prefilling 6,000 tokens of request 1" in stalled
    assert first["longest_gap_s"] == pytest.approx(max(first["gaps_us"]) / 1e6, abs=2e-6)
    assert len(first["gaps_us"]) == 399
    assert second["chunks"][0][3:] == [6000, 0]
    assert "never" not in " ".join(second["story"])
    chunked = inspected_requests(run_of("chunked", trace))["requests"][0]
    assert chunked["longest_gap_s"] < first["longest_gap_s"] / 3


def test_a_request_that_never_ran_says_so() -> None:
    trace = Trace("late", np.array([0, 0]), np.array([100, 5000]), np.array([2, 2]), np.array([2, 2]))
    run = run_of("chunked", trace, num_blocks=20, max_model_len=10_000)
    run.summary = summarise(run)
    rejected = inspected_requests(run)["requests"][1]
    assert rejected["story"][0].endswith("was never scheduled.")
    assert "rejected" in rejected["story"][-1]
    assert rejected["first_us"] is None


def test_nothing_to_show_is_an_error_and_rows_alone_are_enough(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="neither runs nor tables"):
        write_report(tmp_path / "report.html", question="?")
    table = RowTable("points", [{"x": 1, "y": 2.0}, {"x": 2, "y": None}], ["x"])
    page = write_report(tmp_path / "report.html", question="What?", tables=[table], notes=["made <here>"])
    (data,) = data_of(page)["tables"]
    assert (data["length"], data["columns"]) == (2, {"x": [1, 2], "y": [2.0, None]})
    assert "made &lt;here&gt;" in page.read_text(encoding="utf-8")


def test_the_page_holds_its_tables_without_a_script(tmp_path: Path) -> None:
    rows = [{"chunk_size": 1234, "note": "<b>", "tbt_s_p99": 0.0123456, "none": None}, {"chunk_size": 5, "ok": True}]
    table = RowTable("two points", rows, ["chunk_size"], "what they are")
    page = write_report(tmp_path / "report.html", question="What?", tables=[table])
    before_scripts = page.read_text(encoding="utf-8").partition("<script")[0]
    cells = re.findall(r"<t[dh](?: [^>]*)?>(.*?)</t[dh]>", before_scripts)
    assert cells[:4] == ["chunk size", "note", "tbt ms p99", "ok"]
    assert cells[4:] == ["1,234", "&lt;b&gt;", "12.35", "-", "5", "-", "-", "true"]
    assert "what they are" in before_scripts


def test_a_table_of_very_many_rows_is_shown_in_part_and_drawn_whole(tmp_path: Path) -> None:
    """1,500 rows of 40 columns: the page says how many it shows; each name and each number of the rest stands there once."""
    names = [f"a_statistic_with_a_long_name_{number}" for number in range(40)]
    rows = [dict.fromkeys(names, row + 1 / 3) for row in range(1500)]
    page = write_report(tmp_path / "report.html", question="?", tables=[RowTable("points", rows, [names[0]])])
    before, _, _ = page.read_text(encoding="utf-8").partition("<script")
    assert before.count("<tr>") == 1 + 1000
    assert "The first 1,000 of 1,500 rows; the plot is of all of them." in before
    (data,) = data_of(page)["tables"]
    assert data["columns"][names[3]][1499] == 1499.333
    assert len(json.dumps(data)) < 1500 * 40 * 12


def test_best_is_said_only_among_runs_that_can_be_compared(trace: Trace, tmp_path: Path) -> None:
    def marks(named: dict[str, RunTables]) -> tuple[list[str], str]:
        text = write_report(tmp_path / "report.html", named, question="?").read_text(encoding="utf-8")
        (caption,) = re.findall("<caption><span>(.*?)</span></caption>", text)
        rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', text.partition('id="plots"')[0])
        return [name.removesuffix(" *") for name, cells in rows if "<small>best" in cells], caption

    chunked, other = run_of("chunked", trace), run_of("prefill_priority", trace)
    bigger, live = run_of("chunked", trace, replicas=2), run_of("request_level", trace)
    live.config["world"] = "live"
    assert set(marks({"a": chunked, "b": other})[0]) == {"a", "b"}
    named, caption = marks({"a": chunked, "b": other, "two": bigger, "live": live})
    assert set(named) == {"a", "b"}
    assert "Best is said only among runs of the same world" in caption
    named, caption = marks({"a": chunked, "live": live})
    assert not named
    assert "No run is called best" in caption


def test_a_run_of_which_nothing_finished_has_a_page(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    late = Trace("late", np.array([0, 0]), np.array([100, 100]), np.array([2, 2]), np.array([2, 2]))
    run = run_of("chunked", late, max_model_len=16)
    page = write_report(tmp_path / "report.html", {"none": run}, question="?")
    assert not any(plot["traces"] for plot in data_of(page)["plots"] if plot["id"] in ("ttft", "tbt", "e2e"))
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium with chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=driver)
    started = webdriver.Chrome(options=options, service=service)
    yield started
    started.quit()


def open_at(browser: Any, page: Path, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


@pytest.mark.slow
def test_the_page_opens_without_errors_on_a_phone_and_on_a_desk(
    browser: Any, runs: dict[str, RunTables], tmp_path: Path
) -> None:
    rows = RowTable("points", [{"chunk": c, "rate": r, "policy": "a"} for c in (1, 2) for r in (3.0, 4.0)], ["chunk"])
    page = write_report(tmp_path / "report.html", runs, question="Which one?", tables=[rows])
    for width, height in ((390, 844), (1280, 900)):
        open_at(browser, page, width, height)
        assert browser.get_log("browser") == []
        # Nothing sticks out: the page itself never scrolls sideways.
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        drawn = browser.execute_script("return document.querySelectorAll('.plot .main-svg').length")
        assert drawn >= 2 * len(data_of(page)["plots"])
        painted = browser.execute_script(
            "const c = document.getElementById('timeline-canvas');"
            "const p = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            "const seen = new Set(); for (let i = 0; i < p.length; i += 4) seen.add((p[i] << 16) | (p[i+1] << 8) | p[i+2]);"
            "return seen.size"
        )
        assert painted > 5


@pytest.mark.slow
def test_a_run_of_which_nothing_finished_opens_and_says_so(browser: Any, tmp_path: Path) -> None:
    late = Trace("late", np.array([0, 0]), np.array([100, 100]), np.array([2, 2]), np.array([2, 2]))
    run = run_of("chunked", late, max_model_len=16)
    open_at(browser, write_report(tmp_path / "report.html", {"none": run}, question="?"), 1280, 900)
    assert browser.get_log("browser") == []
    words = browser.execute_script("return document.querySelector('main').innerText")
    assert words.count("no request finished") == 3
    assert words.count("No batch ran") == 1
    assert "NaN" not in words


@pytest.mark.slow
def test_a_point_without_a_value_is_not_left_out_in_silence(browser: Any, tmp_path: Path) -> None:
    rows = [{"chunk": None, "rate": r, "y": 1.0} for r in (1, 2)] + [{"chunk": 5, "rate": r, "y": 2.0} for r in (1, 2)]
    rows += [{"chunk": 6, "rate": 3, "y": 2.0}]
    table = RowTable("points", rows, ["chunk", "rate"])
    open_at(browser, write_report(tmp_path / "report.html", question="?", tables=[table]), 1280, 900)
    across = browser.execute_script("return document.querySelector('#table-plot-0 select').value")
    assert across == "rate"  # every point has it
    browser.execute_script(
        "const s = document.querySelector('#table-plot-0 select'); s.value = 'chunk'; s.dispatchEvent(new Event('change'))"
    )
    assert "2 of 5 rows are not drawn" in browser.execute_script(
        "return document.querySelector('.left-out').textContent"
    )


@pytest.mark.slow
def test_everything_can_be_done_with_the_keyboard(browser: Any, runs: dict[str, RunTables], tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    open_at(browser, write_report(tmp_path / "report.html", runs, question="Which one?"), 1280, 900)
    reached: list[str] = []
    for _ in range(150):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        active = browser.switch_to.active_element
        reached.append(active.get_attribute("id") or active.tag_name)
    for wanted in (
        "timeline-run",
        "zoom-in",
        "timeline-canvas",
        "request-run",
        "request-chosen",
        "request-show",
        "summary",
    ):
        assert wanted in reached
    canvas = browser.find_element(By.ID, "timeline-canvas")
    told = browser.find_element(By.ID, "timeline-told")
    canvas.send_keys("w")
    assert "prefill tokens" in told.text
    before = told.text
    canvas.send_keys("n")
    assert told.text != before
    for key in ("+", Keys.ARROW_RIGHT, "-", Keys.HOME):
        canvas.send_keys(key)
    chosen = browser.find_element(By.ID, "request-chosen")
    first = browser.find_element(By.ID, "request-told").text
    chosen.send_keys(Keys.ARROW_DOWN)
    assert browser.find_element(By.ID, "request-told").text != first
    browser.find_element(By.ID, "request-show").send_keys(Keys.ENTER)
    assert browser.switch_to.active_element.get_attribute("id") == "timeline-canvas"
    canvas.send_keys("w", "n")
    assert "Request" in told.text
    assert browser.get_log("browser") == []


def two_summaries(first: dict[str, Any], second: dict[str, Any]) -> dict[str, RunTables]:
    """Two runs of one setting with these summaries."""
    config = {"world": "simulated", "model": "m", "gpu": "g", "cost_kind": "roofline"}
    empty = dict.fromkeys(TABLES, Path())
    return {name: RunTables(empty, dict(config), summary=own) for name, own in (("a", first), ("b", second))}


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            (1.0, 0.1),
            (2.0, 0.05),
            "No run leads in both tails: a has the shortest TTFT P99 (1 s), b the shortest TBT P99 (50 ms).",
        ),
        ((1.0, 0.1), (2.0, 0.2), "a leads in both tails: TTFT P99 1 s, TBT P99 100 ms."),
        (
            (1.0, 0.1),
            (1.005, 0.1),
            "This load does not separate the runs: TTFT P99 1 s and TBT P99 100 ms in all of them.",
        ),
    ],
)
def test_the_first_sentence_says_who_leads(first: tuple[float, float], second: tuple[float, float], said: str) -> None:
    runs = two_summaries(*({"ttft_s_p99": ttft, "tbt_s_p99": tbt} for ttft, tbt in (first, second)))
    assert verdict_of(runs) == said


def test_goodput_decides_where_an_objective_was_set_and_strangers_are_not_ranked() -> None:
    runs = two_summaries(
        {"goodput_requests_per_s": 3.0, "overloaded": True}, {"goodput_requests_per_s": 4.0, "ttft_s_p99": 9.0}
    )
    assert verdict_of(runs).startswith("b serves most within the objective: 4 requests/s. a is overloaded")
    runs["b"].config["gpu"] = "other"
    assert verdict_of(runs).startswith("These runs cannot be ranked")


def test_curves_that_coincide_are_one_and_say_so(trace: Trace) -> None:
    same = run_of("chunked", trace)
    plots = run_plots({"one": same, "two": same})
    assert [one["name"] for one in plots[0]["traces"]] == ["one = two"]
    assert plots[0]["layout"]["xaxis"]["title"]["text"] == "ms"
