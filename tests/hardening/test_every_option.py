"""Every option of every command meets values that no one can mean: refused in one line, or a sound run; never more.

The commands are asked for their own options, so a new one is met without being listed here. What a command needs to be
quick is in `QUICK`. `OPTION_VALUES=all` tries every value with every option of all of them (an hour), otherwise each
option of a few commands meets one value in turn, and one bent form.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.hardening.command_line import TooLong, assert_sound, at_most, group_of, needs_posix, run

pytestmark = needs_posix
ROOT = Path(__file__).resolve().parents[2]
ALL = os.environ.get("OPTION_VALUES") == "all"

VALUES = (
    "",
    " ",
    "-1",
    "0",
    "nan",
    "inf",
    "1e400",
    "-0.5",
    "1" + "0" * 18,
    "9" * 5_000,
    "²",
    "١",
    "1:2:3",
    "=",
    ",,",
    ":",
    "a" * 100_000,
    "é\udcff",
    "../..",
    "/dev/null",
    "/dev/zero",
    "[1]",
    "{}",
    "x\ny",
    "%s%n",
    "\x1b[31m",
    "none",
    "true",
)
TELLTALES = ("9" * 5_000, "nan", "²", "1" + "0" * 18, "", "é\udcff", "-1", ":")
SECONDS = 20

QUICK: dict[tuple[str, str], tuple[str, ...]] = {
    ("workloads", "describe"): ("t.csv",),
    ("workloads", "convert"): ("t.csv", "c.csv"),
    ("workloads", "generate"): ("g.csv", "--requests", "3"),
    ("simulator", "replay"): ("t.csv",),
    ("simulator", "compare"): ("t.csv", "--policies", "chunked,orca"),
    ("simulator", "advise"): ("t.csv", "--limit", "1"),
    ("simulator", "check"): ("chunked", "--seconds", "1"),
    ("simulator", "policies"): (),
    ("simulator", "routers"): (),
    ("metrics", "show"): ("run",),
    ("metrics", "diff"): ("run", "run"),
    ("metrics", "token-times"): ("run", "--request", "0"),
    ("metrics", "bubbles"): ("run",),
    ("metrics", "timeline"): ("run",),
    ("metrics", "report"): ("run",),
    ("profiler", "models"): (),
    ("profiler", "hardware"): (),
    ("profiler", "capacity"): ("--model", "llama-3.1-8b", "--gpu", "a100"),
    ("profiler", "predict"): ("--model", "llama-3.1-8b", "--gpu", "a100"),
    ("profiler", "report"): ("h100",),
    ("experiments", "list"): (),
    ("experiments", "capacity"): (
        "--prompt",
        "fixed:50",
        "--output",
        "fixed:5",
        "--requests",
        "100",
        "--draws",
        "2",
        "--tolerance",
        "0.9",
        "--workers",
        "0",
        "--slo",
        "ttft_p90=0.2,tbt_p99=0.05",
        "--gpus",
        "a100",
        "--set",
        "cost_model=roofline",
    ),
    ("executor", "replay"): ("t.csv", "--model", "nano", "--as-fast-as-possible"),
    ("executor", "bench"): ("--model", "nano", "--chunk", "8", "--decodes", "2", "--context", "8", "--repeats", "1"),
}


FORMS: dict[str, tuple[str, ...]] = {
    "--arrivals": ("poisson:1", "gamma:1,2", "uniform:1", "closed:2,1"),
    "--autoscale": ("1:4",),
    "--bits": ("4,2",),
    "--budget": ("120s",),
    "--chunk": ("5@3",),
    "--classes": ("chat:ttft=1,tbt=0.1",),
    "--chunk-sizes": ("64,128",),
    "--fail": ("0@1+2",),
    "--kv-compression": ("kivi4",),
    "--ladder": ("preempt,reject",),
    "--layer-split": ("16,16",),
    "--load": ("0.6,0.9",),
    "--output": ("uniform:1,9", "quantiles:50=1,90=2"),
    "--price": ("2.5 EUR", "amount=2,currency=EUR,date=2026-01-31"),
    "--profile": ("step:1,2", "spike:1,2,3", "diurnal:9,0.5"),
    "--prompt": ("fixed:9", "zipf:0.4,1,9", "geometric:5", "lognormal:9,1,1,99", "quantiles:50=1,90=2"),
    "--set": ("max_num_seqs=64", "chunk_size=64", "seed=[[1]]"),
    "--slo": ("ttft_p99=2,tbt_p99=0.2", "chat:ttft_mean=1;batch:e2e_p99.9=60"),
    "--think": ("exponential:10", "lognormal:5,1"),
    "--timeline": ("0:10",),
    "--timeout": ("5", "fixed:5"),
    "--turns": ("geometric:3",),
    "--warmup": ("3", "3s"),
    "--window": ("0:10",),
}
"""Options with a form of their own: every number in it becomes one that nobody can mean."""


def bent(form: str) -> list[str]:
    spans = [match.span() for match in re.finditer(r"\d+(\.\d+)?", form)]
    odd = ("0", "-1", "nan", "1e400", "1" + "0" * 18, "9" * 5_000, "²") if ALL else ("9" * 5_000, "1" + "0" * 18, "²")
    return [form, *(form[:start] + value + form[end:] for start, end in spans for value in odd)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("options")
    (place / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,3\n")
    assert run("simulator", "replay", place / "t.csv", "--out", place / "run").code == 0
    return place


def options_of(package: str, command: str) -> list[Any]:
    return [each for each in group_of(package).commands[command].params if each.param_type_name == "option"]


USUAL = (
    ("workloads", "describe"),
    ("workloads", "generate"),
    ("simulator", "replay"),
    ("metrics", "timeline"),
    ("profiler", "capacity"),
    ("profiler", "predict"),
)


@pytest.mark.parametrize(("package", "command"), QUICK if ALL else USUAL)
def test_every_option_may_be_given_anything(
    package: str, command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package == "executor":
        pytest.importorskip("torch")
    monkeypatch.chdir(folder)
    base = QUICK[package, command]
    faults = []
    for turn, option in enumerate(options_of(package, command)):
        forms = [one for form in FORMS.get(option.opts[0], ()) for one in bent(form)]
        values = (*VALUES, *forms) if ALL else (TELLTALES[turn % len(TELLTALES)], *forms[1:2])
        for value in ("",) if option.is_flag else values:
            words = (option.opts[0],) if option.is_flag else (option.opts[0], value)
            try:
                with at_most(SECONDS):
                    assert_sound(run(package, command, *base, *words))
            except (Exception, TooLong) as error:
                faults.append(f"{option.opts[0]} {value[:40]!r}: {type(error).__name__}: {str(error)[-400:]}")
                print(faults[-1], flush=True)
    assert faults == [], "\n".join(faults)


@pytest.mark.parametrize("package", ["workloads", "simulator", "experiments", "executor"])
def test_a_seed_below_nothing_is_refused_wherever_a_seed_is_taken(package: str) -> None:
    """numpy refuses one with an exception of its own, deep inside a run."""
    found = 0
    for command in group_of(package).commands.values():
        for option in command.params:
            if "--seed" in option.opts:
                found += 1
                context = command.make_context(command.name, [], resilient_parsing=True)
                with pytest.raises(Exception, match="0"):
                    option.process_value(context, "-1")
    assert found
