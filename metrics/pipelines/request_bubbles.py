"""Bubble time per request: what the stages waited for the micro-batches that a request was in.

The metric of SARATHI (Sec. 5.3), whose distribution tells whom the bubbles hit. Decodes are not looked at one by one:
a cohort's steps carry the bubbles of their batches, and a request's share is a difference of running sums.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from metrics.measures.token_times import TokenTimes, cohort_rows
from metrics.pipelines.bubbles import Bubbles
from metrics.run_folder.tables import RunTables

Ints = NDArray[np.int64]


def request_bubble_ns(run: RunTables, bubbles: Bubbles) -> Ints:
    """Bubble time per request (rows of the requests table): what stages waited for the micro-batches that it was in.

    SARATHI's metric: summed over all micro-batches and iterations of the request, prefill and decode, and all stages.
    """
    tokens = TokenTimes(run)
    total = np.zeros(tokens.num_requests, dtype=np.int64)
    chunks = run.chunks()
    ids = run.column("requests", "request")
    order = np.argsort(ids, kind="stable")
    # A batch holds at most one chunk of a request unless chunks chase each other, and then in other batches.
    in_table = np.isin(chunks["request"], ids)
    chunk_rows = chunks["row"][in_table]
    owner = order[np.searchsorted(ids, chunks["request"][in_table], sorter=order)]
    np.add.at(total, owner, bubbles.batch_ns[chunk_rows])
    batch_of_token = _batch_of_token(run, tokens.times_ns)
    # One more batch that nobody waited for stands for the tokens that no decode delivered.
    waited_ns = np.append(bubbles.batch_ns, 0)
    of_token = waited_ns[batch_of_token]
    upto = np.concatenate([[0], np.cumsum(of_token)])
    decoded = upto[tokens.last] - upto[tokens.first]
    # The first token of a segment may come from the request's own chunk in that batch: it has been counted there.
    batches = len(waited_ns)
    own_chunk = np.isin(tokens.request_row * batches + batch_of_token[tokens.first], owner * batches + chunk_rows)
    decoded -= np.where(own_chunk, of_token[tokens.first], 0)
    np.add.at(total, tokens.request_row, decoded)
    return total


def _batch_of_token(run: RunTables, times_ns: Ints) -> Ints:
    """For each row of the table of tokens, the row of the iteration that decoded it; the number of iterations
    if no decode delivered it: then a chunk alone sampled it."""
    cohorts = run.cohorts()
    batch = np.full(len(times_ns), run.rows("iterations"), dtype=np.int64)
    replica = run.column("iterations", "replica")[cohorts["row"]]
    start, length = cohort_rows(run, replica, cohorts["cohort"])
    known = cohorts["step"] < length  # a batch in flight at the end of the run has delivered nothing
    batch[(start + cohorts["step"])[known]] = cohorts["row"][known]
    return batch
