"""The pages about policies say what the code says."""

import re
from pathlib import Path

from policies import Draft, knobs_of, policy_class
from policies.registry import BUILT_IN

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_policy_has_its_row_with_every_knob():
    page = (DOCS / "concepts" / "policies.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", page.split("\n\n")[2], re.MULTILINE))
    assert list(table) == list(BUILT_IN)
    for name, knobs in table.items():
        assert set(re.findall(r"`(\w+)`", knobs)) == set(knobs_of(policy_class(name))), name


def test_every_policy_says_its_rule_its_paper_and_its_knobs():
    for name in BUILT_IN:
        cls = policy_class(name)
        assert cls.paper
        assert cls.__doc__
        assert cls.__dataclass_params__.frozen
        for knob in knobs_of(cls).values():
            assert knob.type in (int, float, bool, str)
            assert knob.help


def test_the_page_on_writing_one_shows_the_example_and_all_that_a_draft_grants():
    page = (DOCS / "how-to" / "write-a-policy.md").read_text()
    assert (DOCS.parent / "examples/my_policy.py").read_text().strip() in page
    for name in vars(Draft):
        if not name.startswith("_") and callable(getattr(Draft, name)):
            assert f"{name}(" in page, name
