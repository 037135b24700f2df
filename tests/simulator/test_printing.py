"""What is printed below a table of runs: how far costs can be trusted, and who did not finish."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from simulator.commands.printing import _reasons, trust
from tests.hardening.command_line import run


def _run(basis="calibrated: 95 % of the time measured", share=0.95, reasons=()):
    columns = {"status": np.array(["rejected"] * len(reasons)), "reason": np.array(reasons)}
    return SimpleNamespace(
        summary={"cost_basis": basis, "measured_share": share},
        tables=SimpleNamespace(column=lambda table, name: columns[name]),
    )


def test_costs_say_what_they_rest_on_and_of_several_runs_the_least_measured_speaks():
    def told(*runs):
        return trust([run.summary for run in runs])

    assert told(_run(), _run()) == "calibrated: 95 % of the time measured"
    partly = _run("partly measured: 25 %; attention 75 % by law", 0.25)
    assert told(_run(), partly) == "the least measured of 2 runs: partly measured: 25 %; attention 75 % by law"
    assert told(_run("uncalibrated: specifications alone", 0.0)) == "uncalibrated: specifications alone"


def test_reasons_that_are_not_told_are_counted():
    reasons = [f"{letter} tokens" for letter in "aabbcde"]
    assert _reasons(_run(reasons=reasons)) == (
        "2 rejected (a tokens); 2 rejected (b tokens); 1 rejected (c tokens); 2 more"
    )
    assert _reasons(_run()) == ""


def test_reasons_that_differ_in_numbers_alone_are_one():
    reasons = [f"{tokens} tokens, more than 1,000" for tokens in ("1,594", 1301, 4353, 1301)] + ["gone"]
    assert _reasons(_run(reasons=reasons)) == "4 rejected (such as: 1301 tokens, more than 1,000); 1 rejected (gone)"
    assert _reasons(_run(reasons=["3 tokens"] * 2)) == "2 rejected (3 tokens)"


@pytest.mark.parametrize(
    ("package", "content", "message"),
    [
        ("simulator", {"world": "live", "live": {}}, "is the config of a live run; python -m executor replay"),
        (
            "executor",
            {"world": "simulated", "replay": {}},
            "is the config of a simulated run; python -m simulator replay",
        ),
    ],
)
def test_a_config_of_the_other_world_names_the_command_that_takes_it(tmp_path, package, content, message):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    ended = run(package, "replay", "--config", file)
    assert ended.code == 2
    assert message in ended.err.replace("\n", " ")
