"""The example of docs/how-to/write-a-policy.md: by hand, under the invariants, and through the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

from policies import CountingLedger, Host, Scheduler, make_policy
from tests.policies.test_invariants import check_conservation
from tests.policies.worked import asked, batches, drive, work_through

ROOT = Path(__file__).resolve().parents[2]
NAME = f"{ROOT / 'examples/my_policy.py'}:GatheredPrefills"
A, B, C, D = 0, 1, 2, 3


def scheduler_with(**knobs) -> Scheduler:
    return Scheduler(make_policy(NAME, knobs), CountingLedger(40, 4), Host(), token_budget=16)


def test_prompts_gather_until_enough_or_out_of_patience():
    requests = [asked(A, 0, 10, 4), asked(B, 1.5, 4, 2), asked(C, 2.5, 5, 1), asked(D, 20, 3, 1)]
    log = work_through(scheduler_with(enough=8, patience_s=3), requests)
    assert batches(log) == [
        (0, [(A, 10, 0)], 0),
        (1, [(A, 1, 10)], 0),
        (2, [(A, 1, 11)], 0),  # B's 4 tokens are not worth a batch
        (3, [(B, 4, 0), (C, 5, 0)], 0),
        (4, [(A, 1, 12), (B, 1, 4)], 0),
        (23, [(D, 3, 0)], 0),  # nobody joins D: 3 s are its patience
    ]


def test_a_prompt_beyond_the_budget_goes_on_in_the_next_batch():
    log = work_through(scheduler_with(enough=8), [asked(A, 0, 20, 1), asked(B, 0, 6, 1)])
    assert [rows for _, rows, _ in batches(log)] == [[(A, 16, 0)], [(A, 4, 16), (B, 6, 0)]]


def test_leaps_change_nothing_and_nothing_is_lost():
    requests = [asked(row, row * 3e-6, 3 + 7 * row % 11, 1 + 5 * row % 17) for row in range(30)]
    knobs = {"enough": 12, "patience_s": 1e-5}
    plain, leaping = scheduler_with(**knobs), scheduler_with(**knobs)
    one, other = drive(plain, requests), drive(leaping, requests, leaping=True)
    check_conservation(other, requests, leaping)
    assert other.leaps
    assert (one.batches, one.token_times) == (other.batches, other.token_times)


def test_it_runs_from_the_command_line(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt,output\n0,100,5\n0.5,200,7\n9,50,3\n")
    done = subprocess.run(
        [sys.executable, "-m", "simulator", "replay", trace, "--policy", NAME, "--patience-s", "2", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["finished"] == 3
    # The first waits 2 s, the second 1.5 s, the third 2 s; an H100 prefills them in milliseconds.
    assert 1.83 < summary["ttft_s_mean"] < 1.9
