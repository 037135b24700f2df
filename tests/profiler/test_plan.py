"""Plans of what to measure: every point can be set up, any beginning covers the region, files read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.work.batch import BatchShape
from profiler.errors import ProfileError
from profiler.measurements.plan import Point, make_plan, read_plan, unsure_points
from profiler.measurements.region import Region, coordinates, distance


@st.composite
def batches(draw: st.DrawFn) -> BatchShape:
    chunks = draw(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 3000)), max_size=3))
    contexts = draw(st.lists(st.integers(1, 3000), min_size=0 if chunks else 1, max_size=40))
    return BatchShape(
        tuple(chunks), len(contexts), sum(contexts), max(contexts, default=0), 0, len(contexts) + len(chunks)
    )


@given(batches())
def test_contexts_of_a_point_add_up_to_its_total_and_reach_its_largest(shape: BatchShape) -> None:
    contexts = Point(shape, "visited").contexts
    assert len(contexts) == shape.decodes
    assert sum(contexts) == shape.decode_context_total
    assert max(contexts, default=0) == shape.decode_context_max
    assert min(contexts, default=1) >= 1


@settings(max_examples=20)
@given(st.lists(batches(), min_size=1, max_size=60), st.integers(0, 3))
def test_a_plan_and_its_region_read_back_as_they_were(shapes: list[BatchShape], seed: int) -> None:
    import tempfile

    region = Region.of(shapes)
    plan = make_plan(region, points=30, seed=seed, budget_s=7.0)
    with tempfile.TemporaryDirectory() as folder:
        plan.write(Path(folder) / "plan.json")
        assert read_plan(Path(folder) / "plan.json") == plan
    assert sum(region.counts) == len(shapes)
    assert len(plan.points) <= max(30, len(plan.points[:1]) + 60)
    flat = [point for points in plan.rounds() for point in points]
    assert {point.shape for point in flat} == {point.shape for point in (*plan.points, *plan.noise)}


def test_every_beginning_of_a_plan_covers_the_region_better_than_chance() -> None:
    region = Region.of_bounds(chunk=512, decodes=64, context=2048)
    plan = make_plan(region, points=80)
    visited = coordinates(region.shapes)

    def reach(shapes: list[BatchShape]) -> float:
        return float(np.max(np.min([distance(visited, place) for place in coordinates(shapes)], axis=0)))

    rng = np.random.default_rng(0)
    for count in (20, 40, 80):
        planned = reach([point.shape for point in plan.points[:count]])
        rows = [rng.choice(len(region.shapes), count, replace=False) for _ in range(5)]
        assert planned < np.mean([reach([region.shapes[row] for row in some]) for some in rows])


def test_corners_come_first_and_hold_the_extremes() -> None:
    shapes = [BatchShape((), n, n * c, c, 0, n) for n in (1, 5, 17) for c in (30, 700)]
    shapes += [BatchShape(((t, p),), 3, 300, 120, 0, 4) for t in (9, 512) for p in (0, 1500)]
    plan = make_plan(Region.of(shapes))
    corners = [point.shape for point in plan.points if point.why == "corner"]
    assert plan.points[0].why == "corner"
    assert BatchShape((), 17, 17 * 700, 700, 0, 17) in corners
    assert BatchShape((), 1, 30, 30, 0, 1) in corners
    assert max(shape.prefill_tokens for shape in corners) == 512
    assert max(prefix for shape in corners for _, prefix in shape.chunks) == 1500


def test_what_is_unsure_is_measured_next_and_not_twice_in_one_place() -> None:
    shapes = [BatchShape((), n, n * 100, 100, 0, n) for n in (1, 2, 4, 8, 16, 32, 64)]
    plan = make_plan(Region.of(shapes), points=4)
    points = unsure_points(
        plan, shapes[:2], lambda some: np.array([1.0 if shape.decodes >= 32 else 0.001 for shape in some]), 2, 5
    )
    assert [point.why for point in points] == ["unsure", "unsure"]
    assert {point.shape.decodes for point in points} == {32, 64}


def test_alike_shapes_become_one_and_the_rest_are_kept() -> None:
    shapes = [BatchShape((), 8, 8000 + step * 8, 1000 + step, 0, 8) for step in range(20)]
    region = Region.of([*shapes, BatchShape((), 1, 5, 5, 0, 1)])
    assert len(region.shapes) <= 4
    assert sum(region.counts) == 21


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "expected 'charioteer measurement plan' version 2"),
        ({"points": [["corner", [[0, 5]], 0, 0, 0, 0, 1]]}, "points: found .*at least 1 token"),
        ({"points": [["corner", [], 3, 2, 1, 0, 3]]}, "points: found .*a context of 1 or more each"),
        ({"points": [["why", [], 1, 2, 2, 0, 1]]}, "found reason 'why'"),
        ({"budget_s": 0}, "budget: found 0 s"),
        ({"region": {"shapes": [[1, 2]]}}, r"region: shapes\[0\]"),
        ({"region": {}}, "shapes: found NoneType, expected a list"),
    ],
)
def test_a_bad_plan_is_refused_with_its_place(tmp_path: Path, change: dict[str, object], message: str) -> None:
    plan = make_plan(Region.of([BatchShape((), 2, 20, 12, 0, 2)]))
    file = tmp_path / "plan.json"
    plan.write(file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ProfileError, match=message):
        read_plan(file)


def test_no_shape_no_plan() -> None:
    with pytest.raises(ProfileError, match="no batch with tokens"):
        Region.of([BatchShape()])
