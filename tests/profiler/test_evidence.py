"""What a prediction rests on: cells of measured grids, shares of the time, and the words that say so."""

from __future__ import annotations

import numpy as np
import pytest

from policies.work.batch import BatchShape
from profiler.evidence import Evidence, evidence_of, parts_of
from profiler.load import load_cost_model
from profiler.operators.laws.measured_grid import MeasuredGrid

DECODES = BatchShape((), 64, 64 * 1000, 1500, 0, 64)
CHUNK_BESIDE = BatchShape(((512, 1024),), 32, 32 * 800, 1000, 0, 33)
TWO_CHUNKS = BatchShape(((300, 0), (212, 0)), 32, 32 * 800, 1000, 0, 34)
FAR = BatchShape(((512, 100_000),), 0, 0, 0, 0, 1)


def test_a_point_is_measured_inside_a_cell_whose_corners_were() -> None:
    # 1 x {10, 20}, 2 x {10, 20}, 4 x {10}: the corner (4, 20) is a hole in the bounding box.
    grid = MeasuredGrid.of([1, 1, 2, 2, 4], [10, 20, 10, 20, 10])
    points = [(1, 10), (1, 15), (2, 20), (1.5, 12), (3, 10), (3, 12), (4, 20), (5, 10), (1, 9)]
    expected = [True, True, True, True, True, False, False, False, False]
    assert grid.holds(*np.array(points, float).T).tolist() == expected


def test_two_grids_in_one_profile_are_told_apart() -> None:
    # Knots 1, 3 of one grid lie between 2, 4 of the other: no cell of all four is whole, but each grid's own are.
    first = [(x, y) for x in (1, 3) for y in (10, 30)]
    other = [(x, y) for x in (2, 4) for y in (20, 40)]
    grid = MeasuredGrid.of(*np.array(first + other, float).T)
    assert grid.holds([2.5, 2.5, 3.5, 3.5], [25, 15, 35, 15]).tolist() == [True, True, True, False]


@pytest.mark.parametrize("gpu", ["rtx4090", "h100", "a6000"])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("engine", ["none", "vllm:0.19"])
def test_parts_sum_to_the_iterations(gpu: str, pp: int, engine: str) -> None:
    cost = load_cost_model("llama-3.1-8b", gpu, pp=pp, engine=engine)
    shapes = [DECODES, CHUNK_BESIDE, TWO_CHUNKS, FAR, BatchShape(dummy_tokens=8)]
    whole = [
        sum(cost.host_ns(shape)) + sum(cost.stage_ns(shape, s) + cost.send_ns(shape, s) for s in range(pp))
        for shape in shapes
    ]
    assert sum(part.ns for part in parts_of(cost, shapes)).tolist() == whole


def test_what_was_measured_is_told_operator_by_operator() -> None:
    # The RTX 4090's profile has a grid of one chunk beside decodes up to 128; of two chunks it has nothing.
    cost = load_cost_model("llama-3.1-8b", "rtx4090")
    parts = {part.name: part for part in parts_of(cost, [CHUNK_BESIDE, TWO_CHUNKS, FAR])}
    assert np.broadcast_to(parts["attention"].measured, 3).tolist() == [True, False, False]
    assert np.broadcast_to(parts["ffn_up"].measured, 3).all()
    assert (parts["host"].measured, parts["host"].otherwise) == (False, "assumed")
    # The H100's kernel table has no norms; its prompts have no prefix.
    table = {part.name: part for part in parts_of(load_cost_model("llama-3.1-8b", "h100"), [DECODES, CHUNK_BESIDE])}
    assert table["norm"].otherwise == "by roofline"
    assert not np.any(table["norm"].measured)
    assert np.broadcast_to(table["attention"].measured, 2).tolist() == [True, False]


def test_words_say_calibrated_from_nine_tenths_on() -> None:
    law = {("attention", "by law"): 0.09, ("head", "by law"): 0.004, ("host", "assumed"): 0.006}
    assert Evidence(0.9, law).words == "calibrated: 90 % of the time measured; attention 9 % by law, host 1 % assumed"
    assert Evidence(0.8999, {("attention", "by law"): 0.1001}).words == "partly measured: 89 %; attention 10 % by law"
    many = {(name, "by law"): 0.1 for name in "abcde"}
    assert (
        Evidence(0.5, many).words == "partly measured: 50 %; a 10 % by law, b 10 % by law, c 10 % by law, 2 more 20 %"
    )
    assert Evidence(0.0, {}, True).words == "uncalibrated: specifications alone"


def test_shares_are_weighed_by_time() -> None:
    cost = load_cost_model("llama-3.1-8b", "rtx4090")
    measured, assumed = evidence_of([(cost, [DECODES], [1])]), evidence_of([(cost, [FAR], [1])])
    ns = [sum(int(part.ns[0]) for part in parts_of(cost, [shape])) for shape in (DECODES, FAR)]
    both = evidence_of([(cost, [DECODES, FAR], [3, 1])])
    expected = (3 * ns[0] * measured.measured_share + ns[1] * assumed.measured_share) / (3 * ns[0] + ns[1])
    assert both.measured_share == pytest.approx(expected)
    assert measured.calibrated
    assert not assumed.calibrated
    roofline = load_cost_model("llama-3.1-8b", "h100", cost_model="roofline")
    assert evidence_of([(roofline, [DECODES], [1])]).words == "uncalibrated: specifications alone"
    assert (
        evidence_of([(cost, [DECODES], [1]), (roofline, [DECODES], [1])]).assumed[(roofline.name, "by roofline")] > 0.2
    )
