"""Service, gaps and shares of tenants by hand: every iteration lasts a second, one request at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from metrics import summarise, write_run
from metrics.drawing.tenant_figures import draw_tenants
from metrics.measures.tenants import Tenants, vtc_bound
from simulator import ReplayConfig, replay
from tests.hardening.command_line import run
from tests.simulator.constant_cost import ConstantCost, trace_of

S = 1_000_000_000


def one_at_a_time(policy: str = "chunked", **knobs: object):
    """x asks for three requests of 4 + 2, y for one, all at 0: each takes two seconds."""
    trace = replace(trace_of([(0, 4, 2)] * 4), tenant=["x", "x", "x", "y"])
    config = ReplayConfig(policy=policy, knobs=knobs, max_num_seqs=1, num_blocks=20, block_size=4)
    return replay(trace, config, cost=ConstantCost(S))


def test_service_is_counted_when_it_is_given() -> None:
    """x is admitted at 0, 2 and 4 (4 each), and gets a token (2 each) every second up to 6; y after it."""
    tenants = Tenants(one_at_a_time().tables)
    assert tenants.names == ["x", "y"]
    assert tenants.asked.tolist() == [24, 8]
    rates = tenants.over_time(np.array([0.0, 1.9, 3.9, 5.9, 8.1]))
    assert np.allclose(rates * np.diff([0.0, 1.9, 3.9, 5.9, 8.1]), [[6, 8, 8, 2], [0, 0, 0, 8]])
    assert tenants.jain == pytest.approx(32**2 / (2 * (24**2 + 8**2)))


def test_the_gap_is_that_while_both_wait() -> None:
    """Both wait from 0, until x has its last request admitted at 4: by then x was given 4 + 4 + 8 (the tokens up to
    4), less the 4 of the first moment, which x had when they began to wait."""
    assert Tenants(one_at_a_time().tables).largest_gap() == 4 + 2 * 3
    # Under vtc y is served second: both wait from 0 to 2 alone, in which x gets its first token.
    assert Tenants(one_at_a_time("vtc").tables).largest_gap() == 2


def test_who_waits_alone_has_no_gap() -> None:
    trace = replace(trace_of([(0, 4, 2), (9, 4, 2)]), tenant=["x", "y"])
    done = replay(trace, ReplayConfig(max_num_seqs=1, num_blocks=20), cost=ConstantCost(S))
    assert Tenants(done.tables).largest_gap() == 0


def test_the_bound_is_that_of_the_run() -> None:
    done = one_at_a_time("vtc")
    assert vtc_bound(done.tables) == 2 * 2 * 20 * 4
    assert vtc_bound(one_at_a_time("vtc", input_weight=100.0).tables) == 2 * 100 * 4
    assert vtc_bound(one_at_a_time("vtc", weights="x=2").tables) is None
    assert vtc_bound(one_at_a_time().tables) is None


def test_a_summary_says_what_light_tenants_waited() -> None:
    fair, plain = (summarise(one_at_a_time(policy).tables) for policy in ("vtc", "chunked"))
    assert (fair["tenants"], plain["tenants"]) == (2, 2)
    assert (fair["light_tenants_ttft_s_p99"], plain["light_tenants_ttft_s_p99"]) == (3, 7)
    nobody = replay(trace_of([(0, 4, 2)]), ReplayConfig(num_blocks=20), cost=ConstantCost(S))
    assert (nobody.summary["tenants"], nobody.summary["fairness_jain_tenants"]) == (None, None)


def test_a_table_json_and_a_figure(tmp_path: Path) -> None:
    done = one_at_a_time("vtc")
    write_run(tmp_path / "run", done.tables, done.config, done.summary)
    shown = run("metrics", "tenants", tmp_path / "run")
    assert shown.code == 0
    assert "VTC's bound: 320" in " ".join(shown.out.split())
    found = json.loads(run("metrics", "tenants", tmp_path / "run", "--json").out)["run"]
    assert found["largest_gap_tokens"] == 2
    assert [row["tenant"] for row in found["tenants"]] == ["x", "y"]
    assert found["tenants"][1]["ttft_s_p50"] == 3
    drawn = draw_tenants(
        {"vtc": Tenants(done.tables), "chunked": Tenants(one_at_a_time().tables)}, tmp_path / "figures"
    )
    assert [path.name for path in drawn] == ["service_by_tenant.pdf", "service_by_tenant.png"]
    assert all(path.stat().st_size > 1000 for path in drawn)
