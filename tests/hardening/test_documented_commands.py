"""Every command that README and docs/ show is parsed by the command line itself, so that no flag there can rot, and run
on small files where it can be: one that takes minutes, a GPU or a cluster stands in `NOT_HERE` with the test that runs
it, or what it needs. Commands of the README are run by tests/test_readme.py.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from policies import knobs_of, policy_class, policy_names
from tests.hardening.command_line import PACKAGES, at_most, group_of, needs_posix, run

ROOT = Path(__file__).resolve().parents[2]
ANY = "|".join(PACKAGES)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown(page: Path) -> list[str]:
    """Commands in code blocks and in code spans; a span may stop early, with an ellipsis."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ")
    spans = re.findall(r"`([^`\n]*python -m [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line for line in blocks.splitlines() if re.search(rf"python3? -m ({ANY})\b", line)]
    return [line.partition("  #")[0].strip() for line in lines] + [" ".join(span.split()) for span in spans]


COMMANDS = sorted({(page.name, line) for page in PAGES for line in shown(page)})


def test_there_are_many() -> None:
    assert len(COMMANDS) > 60


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_documented_command_is_one(page: str, line: str) -> None:
    words = shlex.split(line.replace("...", " ").replace("…", " ").split(" | ")[0].split(" > ")[0].rstrip("&"))
    start = words.index("-m")
    package, rest = words[start + 1], words[start + 2 :]
    if package not in PACKAGES:
        return
    group = group_of(package)
    if not rest or rest[0].startswith("-") or "|" in rest:
        return
    name, arguments = rest[0], rest[1:]
    assert name in group.commands, f"{page}: {package} has no command {name!r}"
    command = group.commands[name]
    takes_knobs = command.context_settings.get("ignore_unknown_options", False)
    known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
    named = [word for word in arguments if re.match(r"examples/\w+\.py:\w+$", word)]
    knobs = {"--" + knob.replace("_", "-") for policy in (*policy_names(), *named) for knob in knobs_of(policy_class(policy))}
    for word in arguments:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            assert flag in known or (takes_knobs and flag in knobs), f"{page}: {package} {name} has no {flag}"


NOT_HERE = {
    r"experiments run": "tests/experiments/test_figures.py, --quick",
    r"experiments (claims|gallery)": "tests/experiments/test_figures.py",
    r"experiments (validate|validate-full) (?!--against)": "tests/experiments/test_validate.py, on less",
    r"--cost-model runs/x/model.json": "tests/experiments/test_validate_pipeline.py",
    r"experiments (fidelity|coverage)": "tests/experiments/test_fidelity.py",
    r"profiler published --cost-model auto": "every table against every fitted model: minutes",
    r"experiments (calibrate|host-time)": "tests/experiments/test_device_aims.py",
    r"experiments (sarathi-pipeline|attention-ffn)": "tests/experiments/test_sarathi_pipeline.py and tests/simulator/test_afd.py",
    r"--engine ray": "a Ray cluster; tests/experiments/test_sweep.py starts one",
    r"profiler (fit|import|refine|compare)": "tests/profiler/test_fit.py and test_compare.py",
    r"report my.json|--cost-model my.json": "what `profiler fit` makes: tests/profiler/test_fit.py",
    r"executor replay .*--(pp|tp)": "tests/executor/test_distributed.py",
    r"executor (generate|compression)": "tests/executor/test_against_transformers.py and test_compressed_kv.py",
    r"--device cuda|--nvtx|flash_attn|executor.kernel_build": "a GPU, or its compiler",
    r"-m pytest|benchmarks\.": "by hand, for minutes",
    r"\.\.\.": "one flag of a command that stands on the page in full",
}
"""What is not run on small files: pattern -> where it is run, or what it takes."""

LESS = {
    ("executor", "replay"): ("--limit", "3", "--as-fast-as-possible"),
    ("executor", "bench"): ("--model", "nano", "--chunk", "16", "--decodes", "2", "--context", "16", "--repeats", "1"),
    ("experiments", "capacity"): ("--requests", "100", "--draws", "2", "--tolerance", "0.5", "--workers", "0", "--gpus", "a100", "--policies", "chunked", "--chunk-sizes", "256"),
    ("experiments", "sweep"): ("--workers", "0"),
    ("simulator", "compare"): ("--limit", "20"),
    ("simulator", "replay"): ("--limit", "20"),
    ("workloads", "generate"): ("--requests", "20"),
}
"""The same command on less, by flags at its end."""

NAMES = {"GPU": "h100", "G": "h100", "M": "nano", "N": "0", "FROM:TO": "0:10"}
LOG_LINE = '{"input_toks": 20, "output_toks": 5, "arrival_time": 1.5, "queued_ts": 2.5, "first_token_ts": 3, "last_token_ts": 5}\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the pages' commands name."""
    folder = tmp_path_factory.mktemp("pages")
    work = folder / "work"
    work.mkdir()
    for name in ("examples", "docs"):
        (work / name).symlink_to(ROOT / name)
    if (ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
    rows = "".join(f"{row * 0.05:.2f},{40 + row % 7 * 30},{3 + row % 5}\n" for row in range(60))
    for name in ("trace.csv", "t.csv", "pipeline.csv", "TRACE"):
        (work / name).write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    (work / "trace.jsonl").write_text('{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 3}\n')
    (work / "requests.jsonl").write_text(LOG_LINE)
    (work / "sweep.toml").write_text('[trace]\nfile = "t.csv"\n[base]\nmodel = "nano"\n[space]\nchunk_size = [64, 128]\n')
    assert run("simulator", "replay", work / "t.csv", "--limit", 20, "--out", work / "RUN").code == 0
    for name in ("run", "simulated"):
        shutil.copytree(work / "RUN", work / name)
    return work


@needs_posix
@pytest.mark.parametrize(("page", "line"), [pair for pair in COMMANDS if pair[0] != "README.md"])
def test_a_documented_command_runs(page: str, line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = next((why for pattern, why in NOT_HERE.items() if re.search(pattern, re.sub(r"RUN\.\.\.", "RUN", line))), None)
    if reason:
        pytest.skip(f"not here: {reason}")
    words = [NAMES.get(word, word) for word in shlex.split(re.sub(r"RUN\.\.\.", "RUN", line).replace("[", "").replace("]", ""))]
    package, *rest = words[words.index("-m") + 1 :]
    if package == "executor":
        pytest.importorskip("torch")
    if any(word.startswith("../shared") and not (place / word).exists() for word in rest):
        pytest.skip("../shared is not part of the project")
    monkeypatch.chdir(place)
    less = () if "--preset" in rest else LESS.get((package, rest[0] if rest else ""), ())
    with at_most(90):
        ended = run(package, *rest, *less)
    if not rest:
        assert "Usage:" in ended.out
    elif ended.code == 2 and re.search(r"Missing (argument|option)|name a trace file", ended.err):
        return  # the page only names it
    else:
        assert ended.code == 0, f"{page}: {line}\n{ended.err[-800:]}"
