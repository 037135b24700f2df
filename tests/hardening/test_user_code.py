"""A fault in a user's own policy or router: one line with its file and line; the whole traceback where it is asked for."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from experiments.running.tasks import perform
from policies.edges import user_code
from policies.edges.command_line import FAULT_OF_USER_CODE, one_line
from policies.edges.compiling import how_built
from tests.hardening.command_line import assert_refused, run

POLICY = """from dataclasses import dataclass
from policies import Policy, knob

@dataclass(frozen=True)
class Mine(Policy):
    \"\"\"Breaks.\"\"\"
    odd: int = knob(1, "An odd number.")

    def __post_init__(self):
        if self.odd % 2 == 0:
            raise ValueError(f"odd: found {self.odd}")

    def plan(self, queues, draft, kv, host, now_ns):
        return {}["now"]
"""
ROUTER = """from dataclasses import dataclass
from simulator.routers.router import Router

@dataclass
class Mine(Router):
    paper = "none"
    def choose(self, request, replicas, rng):
        raise KeyError("lost")
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{row},40,3\n" for row in range(4)))
    return file


@pytest.mark.parametrize("package", ["simulator", "executor"])
def test_an_exception_in_a_policy_is_one_line_with_its_place(package: str, trace: Path, tmp_path: Path) -> None:
    if package == "executor":
        pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(POLICY)
    more = ("--model", "nano") if package == "executor" else ()
    ended = run(package, "replay", trace, "--policy", f"{tmp_path / 'mine.py'}:Mine", *more)
    assert ended.code == FAULT_OF_USER_CODE == 1
    told = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert told == [
        f"error: {tmp_path / 'mine.py'}:14, in plan: KeyError: 'now' (CHARIOTEER_TRACEBACKS=1 shows the whole traceback)"
    ]
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("call", "ours"),
    [("draft.decode(None)", True), ("max([1, 'a'], key=lambda each: each + 1)", False)],
)
def test_a_fault_in_what_a_policy_called_is_told_from_one_of_its_own(
    call: str, ours: bool, trace: Path, tmp_path: Path
) -> None:
    """The frame where it was raised decides: a draft that breaks is ours, a sum of its own is not."""
    text = POLICY.replace('return {}["now"]', call)
    (tmp_path / "mine.py").write_text(text)
    policy = f"{tmp_path / 'mine.py'}:Mine"
    ended = run("simulator", "replay", trace, "--policy", policy)
    (told,) = (line for line in ended.err.splitlines() if line.startswith("error: "))
    assert ended.code == FAULT_OF_USER_CODE
    assert told.startswith(f"error: {tmp_path / 'mine.py'}:14, in ")
    assert told.endswith("(CHARIOTEER_TRACEBACKS=1 shows the whole traceback)")
    assert ("raised in policies/contract/draft.py:" in told) == ours
    assert ("its fault, unless it was called with a wrong argument" in told) == ours
    done = perform({"kind": "point", "trace": {"file": str(trace)}, "config": {"policy": policy}})
    assert ("raised in Charioteer's own policies/contract/draft.py:" in done["error"]) == ours


def test_a_callback_that_breaks_inside_of_our_code_is_its_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ModuleType("mine")
    exec(
        "class Odd:\n    def __str__(self):\n        raise KeyError\ndef plan(call):\n    call(Odd())\n", mine.__dict__
    )
    monkeypatch.setattr(user_code, "MODULES", {"mine"})
    with pytest.raises(KeyError) as caught:
        mine.plan(one_line)
    assert user_code.raised_in_ours(caught.value) is None
    with pytest.raises(AttributeError) as caught_ours:
        mine.plan(user_code.place_in_user_code)
    assert (user_code.raised_in_ours(caught_ours.value) or "").startswith("policies/edges/user_code.py:")


def test_the_whole_traceback_is_there_for_the_asking(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHARIOTEER_TRACEBACKS", "1")
    (tmp_path / "mine.py").write_text(POLICY)
    with pytest.raises(KeyError):
        run("simulator", "replay", trace, "--policy", f"{tmp_path / 'mine.py'}:Mine")


def test_a_router_of_ones_own_that_breaks_is_told_alike(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ROUTER)
    ended = run("simulator", "replay", trace, "--replicas", 2, "--router", f"{tmp_path / 'mine.py'}:Mine")
    assert ended.code == 1
    assert f"error: {tmp_path / 'mine.py'}:8, in " in ended.err
    assert "KeyError: 'lost'" in ended.err


def test_a_check_of_its_own_knobs_is_a_refusal(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(POLICY)
    ended = run("simulator", "replay", trace, "--policy", f"{tmp_path / 'mine.py'}:Mine", "--odd", "4")
    assert "odd: found 4" in assert_refused(ended)


@pytest.mark.parametrize(
    ("text", "line"), [("x = 1\nx = = 2\n", 2), ("import os\n\n1 / 0\n", 3), ("import nothing_such\n", 1)]
)
def test_a_file_that_cannot_be_loaded_names_its_line(trace: Path, tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "mine.py").write_text(text)
    refused = assert_refused(run("simulator", "replay", trace, "--policy", f"{tmp_path / 'mine.py'}:Mine"))
    assert f"policy file {tmp_path / 'mine.py'}:{line}: " in refused


def test_a_point_of_a_sweep_names_the_place_too(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(POLICY)
    task = {"kind": "point", "trace": {"file": str(trace)}, "config": {"policy": f"{tmp_path / 'mine.py'}:Mine"}}
    done = perform(task)
    assert done["error"] == f"KeyError: 'now' ({tmp_path / 'mine.py'}:14, in plan)"
    assert "Traceback" in done["traceback"]


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ("def plan(", "def plann(", "Mine has no plan(): a policy defines one"),
        ("host, now_ns)", "host)", "plan() has to take self, queues, draft, kv, host, now_ns (too many"),
        ("host, now_ns)", "host, now_ns, more)", "plan() has to take self, queues, draft, kv, host, now_ns (missing"),
        ('knob(1, "An odd number.")', "None", "odd has no default; a knob is made with knob(default, help)"),
        ("class Mine(Policy)", "class Other(Policy)", "policy file mine.py: found no class 'Mine' in it, but Other"),
        ("class Mine(Policy)", "class Mine(Polcy)", "policy file mine.py:5: NameError: name 'Polcy' is not defined"),
        ("from policies", "from policy", "policy file mine.py:2: ModuleNotFoundError"),
        ("def __post_init__(self):", "def __post_init__(self:", "policy file mine.py:9: SyntaxError"),
    ],
    ids=lambda value: value[:30],
)
def test_what_is_wrong_with_a_policy_file_is_told_before_anything_runs(
    was: str, now: str, told: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # lines are found by a relative name too
    assert POLICY.count(was) == 1
    wrong = POLICY.replace(": int = " + was, ": int") if now == "None" else POLICY.replace(was, now)
    (tmp_path / "mine.py").write_text(wrong)
    assert told in assert_refused(run("simulator", "replay", trace, "--policy", "mine.py:Mine"))


def test_a_policy_file_without_a_class_is_told_how_to_name_one(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(POLICY)
    refused = assert_refused(run("simulator", "replay", trace, "--policy", "mine.py"))
    assert "found the file mine.py, expected one of its classes, as mine.py:ClassName" in refused


@pytest.mark.parametrize("ask", ["chunk(track, 5 / 2)", "admit(track, 5 / 2)"])
def test_a_part_of_a_token_is_refused(ask: str, trace: Path, tmp_path: Path) -> None:
    started = "queues.partial" if ask.startswith("chunk") else "queues.waiting"
    plan = f"""        draft.decode_all()
        for track in list({started}):
            draft.{ask}
        if queues.waiting:
            draft.admit(queues.waiting[0], 3)
"""
    (tmp_path / "mine.py").write_text(POLICY.replace('        return {}["now"]\n', plan))
    ended = run("simulator", "replay", trace, "--policy", f"{tmp_path / 'mine.py'}:Mine")
    if how_built() == "compiled":
        # Its door is the type of the argument, which is the policy's fault by another name.
        assert ended.code == 1
        assert "mine.py" in ended.err
        assert "TypeError: int object expected" in ended.err
        return
    assert "policy Mine: asked for a part of a token; counts are whole: use // or int()" in assert_refused(ended)
