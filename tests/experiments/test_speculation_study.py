"""Whether speculation pays, predicted and measured: the loop on a small model, and what is read off its numbers."""

from __future__ import annotations

import json

import pytest

from experiments.__main__ import build
from experiments.errors import ExperimentError
from experiments.validation.comparing.settings import Settings
from experiments.validation.speculation import SpeculationStudy, SpeedUp, crossover, in_short
from policies import Speculation


def test_where_it_stops_paying_lies_between_two_loads():
    # Half way between 1.2 and 0.8, over the logarithm: between 4 and 16 that is 8.
    assert crossover([(1, 1.6), (4, 1.2), (16, 0.8)]) == pytest.approx(8)
    assert crossover([(1, 1.6), (4, 1.2)]) is None
    assert crossover([(1, 0.9), (4, 1.2)]) == 0


def test_a_prediction_holds_within_five_percent_or_the_repeats_spread():
    assert SpeedUp(1, 1.04, (1.0, 1.0)).holds
    assert not SpeedUp(1, 1.07, (1.0, 1.0)).holds
    assert SpeedUp(1, 1.07, (0.9, 1.1)).holds
    lines = in_short([SpeedUp(1, 1.5, (1.5, 1.5)), SpeedUp(4, 0.75, (0.8, 0.8))], Speculation.parse("ngram:4"))
    assert lines[0] == "1 at once: ngram:4 makes it 1.50 times as fast (repeats 0.0% apart), predicted 1.50 (+0.0%)"
    assert lines[1].endswith("(-6.2%, too far)")
    assert lines[2] == "it stops paying at 2.5 requests at once as predicted, at 2.7 requests at once as measured"


def test_the_loop_goes_round_on_a_small_model(tmp_path, capsys):
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at / 10},16,24\n" for at in range(4)))
    out = tmp_path / "out"
    arguments = ["--speculation", "ngram:4", "--batches", "1,2", "--policies", "vllm_v1", "--model", "nano"]
    more = ["--budget", "2s", "--repeats", "1", "--limit", "4", "--out", str(out), "--json"]
    build()(["validate", str(trace), *arguments, *more], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert [load["batch"] for load in found["loads"]] == [1, 2]
    assert all(load["predicted"] > 0 and len(load["measured"]) == 1 for load in found["loads"])
    assert (out / "figures" / "speculation.png").exists()


def test_what_is_not_measured_here_is_one_line(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n")
    settings = Settings(str(trace), ("vllm_v1",))
    with pytest.raises(ExperimentError, match="expected ngram:K"):
        SpeculationStudy(settings, tmp_path / "a", speculation=Speculation("draft", 2), batches=[1])
    with pytest.raises(ExperimentError, match="expected rising numbers"):
        SpeculationStudy(settings, tmp_path / "b", speculation=Speculation("ngram", 2), batches=[4, 1])
