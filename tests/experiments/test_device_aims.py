"""Judging batches and host time as stages of a calibration: on a CPU, with stand-ins for what only a GPU has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from executor.machine.ceilings import Ceilings
from executor.model.cuda_graphs import Buckets, GraphedModel
from executor.model.loading import load_model
from experiments.__main__ import build
from experiments.calibration import device_aims
from experiments.calibration.device_aims import aim_line, aims_blocks, aims_stage, host_time_figure, host_time_stage
from tests.executor.recorded_graph import RecordedGraph

STAND_IN = [
    {"batch": "chunk of 128", "rows": 128, "graphs": False, "host_s": 9e-3, "device_s": 3e-3, "wall_s": 12e-3},
    {"batch": "chunk of 128", "rows": 128, "graphs": True, "host_s": 1e-3, "device_s": 3e-3, "wall_s": 4e-3},
    {"batch": "chunk of 512", "rows": 512, "graphs": False, "host_s": 4e-3, "device_s": 10e-3, "wall_s": 14e-3},
]


def test_batches_are_judged_once_and_told_with_their_bounds(tmp_path: Path) -> None:
    loaded = load_model("nano", device="cpu", max_tokens=512)
    said: list[str] = []
    ceilings = Ceilings("paper", "float32", 1e11, 1e12, 0, 0, 0.0)
    rows = aims_stage(loaded, ceilings, tmp_path, said.append)
    assert [row["batch"] for row in rows] == ["decode", "prefill", "mixed", "decode, long contexts", "short chunk"]
    assert all(row["variant"] == "plain" for row in rows)
    assert said[0].startswith("aims: decode, plain: ")
    assert "wanted 80%" in said[0]
    assert rows[3]["wanted_s"] == 0, "7.3 ms were set for another model"
    assert aims_stage(loaded, ceilings, tmp_path, said.append) == json.loads(json.dumps(rows))
    assert len(said) == 5
    assert "wanted under 7.3 ms" in aim_line({**rows[3], "wanted_s": 7.3e-3})


def test_host_time_is_measured_with_graphs_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from executor.serving import runner

    buckets = Buckets(blocks=40, decodes=(1, 2, 4), chunk_rows=32, tile=16, chunks=3)
    monkeypatch.setattr(
        runner,
        "graphs_for",
        lambda model, cache, longest: GraphedModel(model.model, cache, buckets, new_capture=RecordedGraph),
    )
    monkeypatch.setattr(device_aims, "CHUNKS", (128, 1024))
    monkeypatch.setattr(device_aims, "REPEATS", 1)
    loaded = load_model("nano", device="cpu", kernels="plain_device", attention="paged", max_tokens=512)
    rows = host_time_stage(loaded, 16, tmp_path, lambda text: None)
    # A chunk of 64 is beyond these buckets.
    assert [(row["batch"], row["graphs"]) for row in rows] == [
        ("chunk of 8", True),
        ("1 decode", True),
        ("4 decodes", True),
        ("chunk of 8", False),
        ("chunk of 64", False),
        ("1 decode", False),
        ("4 decodes", False),
    ]
    assert rows[0]["executed_rows"] == 16
    assert all(row["wall_s"] >= row["device_s"] > 0 for row in rows)


def test_requests_shorter_than_every_batch_are_no_failure(tmp_path: Path) -> None:
    loaded = load_model("nano", device="cpu", max_tokens=16)
    said: list[str] = []
    assert aims_stage(loaded, Ceilings("paper", "float32", 1e11, 1e12, 0, 0, 0.0), tmp_path, said.append) == []
    assert host_time_stage(loaded, 16, tmp_path, said.append) == []
    assert [text.partition(":")[0] for text in said] == ["aims", "host time"]
    assert all("none of these batches fits into 16 tokens" in text for text in said)
    assert [json.loads((tmp_path / name).read_text()) for name in ("aims.json", "host_time.json")] == [[], []]


def test_the_figure_of_host_time_comes_from_a_calibrations_folder(tmp_path: Path) -> None:
    (tmp_path / "host_time.json").write_text(json.dumps(STAND_IN), encoding="utf-8")
    result = CliRunner().invoke(build(), ["host-time", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "chunk of 128" in result.output
    assert "93.75" in result.output
    assert (tmp_path / "figures" / "host_time.png").stat().st_size > 1000
    panel = host_time_figure(STAND_IN).axes[0]
    heights = sorted(bar.get_height() for bar in panel.patches)
    assert heights[-1] == pytest.approx(9e-3 / 128 * 1e6), "what the host adds to a chunk of 128 without graphs"
    assert "not used" in str(aims_blocks([], STAND_IN[:1])[-1])
    assert "not used" not in str(aims_blocks([], STAND_IN)[-1])
