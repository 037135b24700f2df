"""The profiler's commands as a user meets them: tables, JSON, and one clear line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from policies.work.batch import BatchShape
from profiler.errors import ProfileError
from profiler.measurements.published_steps import predicted_ms, published_steps


def profiler(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "profiler", *arguments], capture_output=True, text=True, check=False)


def test_capacity_prints_only_json_when_asked() -> None:
    done = profiler("capacity", "--model", "llama-13b", "--gpu", "a6000", "--max-model-len", "1024", "--json")
    plan = json.loads(done.stdout)
    assert done.returncode == 0
    assert plan["lengths"][0]["slots"] == 18
    assert plan["lengths"][0]["paging_gain"] > 1.9
    assert plan["weight_bytes"] == 2 * 13_015_864_320


def test_predict_adds_up_and_says_that_it_is_uncalibrated() -> None:
    arguments = ("predict", "--model", "tiny", "--gpu", "a100", "--chunk", "100@28", "--decodes", "3")
    arguments += ("--cost-model", "roofline")
    found = json.loads(profiler(*arguments, "--json").stdout)
    assert found["total_ns"] == sum(found["parts_ns"].values())
    told = profiler(*arguments).stdout
    assert "(uncalibrated: specifications alone)" in told
    assert found["words"] == "uncalibrated: specifications alone"
    assert set(found["parts_rest_on"].values()) == {"by roofline"}


def test_predict_marks_every_part_as_measured_or_by_what_it_rests_on() -> None:
    # The H100's kernel table has GEMMs and prompts, but no norms and nothing of decodes beside a chunk.
    arguments = ("predict", "--model", "llama-3.1-8b", "--gpu", "h100", "--chunk", "512", "--json")
    alone = json.loads(profiler(*arguments).stdout)
    mixed = json.loads(profiler(*arguments, "--decodes", "64").stdout)
    for found in (alone, mixed):
        assert found["parts_rest_on"].keys() == found["parts_ns"].keys()
        assert found["parts_rest_on"]["ffn_up"] == "measured"
        assert found["parts_rest_on"]["norm"] == "by roofline"
        assert found["parts_rest_on"]["host_before"] == "assumed"
    assert alone["parts_rest_on"]["attention"] == "measured"
    assert mixed["parts_rest_on"]["mixed_attention"] == "by law"
    assert mixed["measured_share"] < alone["measured_share"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("capacity", "--model", "lama-13b", "--gpu", "a6000"), "error: model 'lama-13b'"),
        (("capacity", "--model", "llama-3-70b", "--gpu", "h100"), "error: llama-3-70b does not fit on h100"),
        (("predict", "--model", "tiny", "--gpu", "h100", "--chunk", "1@-5"), "error: --chunk: found '1@-5'"),
        (("predict", "--model", "tiny", "--gpu", "h100"), "error: predict: give at least one"),
        (("published", "--data", "nowhere"), "error: nowhere: no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], says: str) -> None:
    done = profiler(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1


def test_constants_lie_near_what_kernels_reach_on_three_gpus() -> None:
    from profiler.measurements.kernel_rates import gemm_errors, kernel_profiles, kernel_rates

    profiles = kernel_profiles()
    for row in kernel_rates(profiles):
        assert 0.65 < row["constant"] / row["p50"] < 1.3, row
    assert all(row["median_abs"] < 0.25 for row in gemm_errors(profiles))


def test_the_roofline_stays_near_kernels_and_below_systems_that_wait_for_their_host() -> None:
    """Linear layers alone are within 20 % at the median; eager serving systems of 2023 take longer, never shorter."""
    from statistics import median

    from profiler.load import load_cost_model

    errors: dict[str, list[float]] = {}
    for step in published_steps():
        cost = load_cost_model(step.model, step.gpu, cost_model="roofline", dtype="float16", tp=step.tp)
        ms = predicted_ms(cost, step)
        assert ms is not None
        errors.setdefault(step.source, []).append(ms / step.measured_ms - 1)
    assert len(errors["Vidur"]) == 351
    assert median(map(abs, errors["Vidur"])) < 0.2
    assert median(map(abs, errors["SARATHI Table 2"])) < 0.2
    assert median(errors["Splitwise"]) < 0
    assert median(errors["Sarathi-Serve artifact"]) < 0


def test_published_steps_are_read_from_a_table_of_ones_own(tmp_path: Path) -> None:
    row = "me,mine,two chunks,llama-3.1-8b,h100,1,iteration,512:0 128:1024,3,3000,1200,5,12.5"
    columns = "source,group,what,model,gpu,tp,part,chunks,decodes,context_total,context_max,sampled,measured_ms"
    table = tmp_path / "steps.csv"
    table.write_text(f"{columns}\n{row}\n")
    (step,) = published_steps(table)
    assert step.shape == BatchShape(((512, 0), (128, 1024)), 3, 3000, 1200, sampled=5)
    assert (step.measured_ms, step.part) == (12.5, "iteration")
    table.write_text(f"{columns}\n{row.replace('12.5', '-1')}\n")
    with pytest.raises(ProfileError, match=r"steps.csv, line 2: expected measured_ms above 0"):
        published_steps(table)
