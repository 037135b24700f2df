"""Labels that are keys: no two alike, whatever they are called, and none that leads out of a folder."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.edges.distinct_names import distinct_names, file_forms, folder_name, folder_names


def test_a_name_is_as_long_as_it_has_to_be() -> None:
    assert distinct_names(["chunked", "lab/my.py:Mine"]) == ["chunked", "Mine"]
    assert distinct_names(["v1/my.py:Mine", "v2/my.py:Mine"]) == ["v1/my.py:Mine", "v2/my.py:Mine"]
    assert distinct_names(["a/one.py:Mine", "a/two.py:Mine", "orca"]) == ["one.py:Mine", "two.py:Mine", "orca"]
    assert distinct_names(["/runs/a/x", "/runs/b/x", "/runs/a/y"]) == ["a/x", "b/x", "y"]
    assert distinct_names(["x", "x", "x"]) == ["x", "x (2)", "x (3)"]
    assert distinct_names(["d/day.one.csv", "d/day.two.csv"], file_forms) == ["day.one.csv", "day.two.csv"]
    assert distinct_names(["one/day.csv", "two/day.csv", "azure.csv"], file_forms) == [
        "one/day.csv", "two/day.csv", "azure",
    ]  # fmt: skip


def test_folder_names_lead_nowhere_else() -> None:
    assert folder_names(["v1/my.py:Mine", "v1-my.py-Mine"]) == ["v1-my.py-Mine", "v1-my.py-Mine-2"]
    assert [folder_name(name) for name in ("..", ".", "/etc/passwd", ".bashrc")] == ["-", "-", "-etc-passwd", "-bashrc"]
    assert len(folder_name("ä" * 300).encode()) <= 120


NAMES = st.lists(st.text("ab/.:- ()2py", min_size=1, max_size=12), min_size=1, max_size=6)


@given(NAMES)
def test_no_two_are_alike(names: list[str]) -> None:
    for found in (distinct_names(names), distinct_names(names, file_forms), folder_names(names)):
        assert len(set(found)) == len(names)
    assert not any("/" in name or name in ("", ".", "..") or name.startswith(".") for name in folder_names(names))
