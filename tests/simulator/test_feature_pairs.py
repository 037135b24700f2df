"""Every pair of features serves every request, alike with and without leaps, or is refused by name (docs/reference/features.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from simulator.simulation import replay
from simulator.studies.feature_pairs import FEATURES, config_of, page, pairs, try_together, workload_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "features.md"


@pytest.mark.parametrize("one", FEATURES, ids=lambda feature: feature.name)
def test_a_pair_serves_every_request_alike_with_and_without_leaps(one):
    for first, other in pairs():
        if first is not one:
            continue
        run = try_together(first, other)
        if isinstance(run, str):
            continue
        trace, config = workload_of(first, other), config_of(first, other)
        requests = run.tables.requests.to_pandas()
        assert sorted(requests["request"]) == list(range(len(trace))), other.name
        ended = requests[requests["status"] == "finished"].set_index("request")["output_tokens"]
        assert (ended == pd.Series(trace.output_tokens)[ended.index]).all(), other.name
        if not config.reference:
            plain = replay(trace, replace(config, leaps=False)).tables.requests.to_pandas()
            pd.testing.assert_frame_equal(requests, plain, obj=other.name)


def test_the_page_says_of_every_pair_what_it_does():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m simulator.studies.feature_pairs"
