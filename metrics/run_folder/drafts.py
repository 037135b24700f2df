"""What drafts did in a run: how many were verified, how many accepted, by position too, for the summary and for the
simulation of the next run.

A draft is accepted only if all before it are, so position j of a step counts as accepted where j drafts or more were.
Placeholders that only fill a width are no drafts and count nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrics.run_folder.tables import RunTables

Ints = NDArray[np.int64]

SPECULATION_KEYS = {
    "draft_tokens": "drafts verified in the window (null without speculation)",
    "accepted_tokens": "those of them that were accepted",
    "acceptance_rate": "accepted_tokens / draft_tokens",
    "acceptance_length": "tokens of a step that verified drafts, its own token among them: 1 + accepted / such steps",
    "tokens_per_decode": "output tokens delivered per decode of a request, whether it had drafts or not",
    "drafted_share": "share of decodes that had drafts to verify",
    "acceptance_by_position": "share of the drafts at position 1, 2, ... that were accepted",
}
"""Key -> meaning, in the order of summary.json."""


class Drafts(NamedTuple):
    """One entry per speculating decode of a run, in the order in which they were recorded.

    row: of its iteration. request: its id. verified, accepted: drafts. delivered: tokens. position: output tokens that
    the request had before.
    """

    row: Ints
    request: Ints
    verified: Ints
    accepted: Ints
    delivered: Ints
    position: Ints


def drafts_of_run(run: RunTables) -> Drafts:
    """All speculating decodes of a run; what a request delivered otherwise (its first token, after a preemption one
    more) counts before each."""
    flat = {name: column.astype(np.int64) for name, column in run.drafts().items()}
    samples = run.chunks()
    rows = np.concatenate([flat["row"], samples["row"][samples["samples"]]])
    requests = np.concatenate([flat["request"], samples["request"][samples["samples"]]])
    tokens = np.concatenate([flat["delivered"], np.ones(int(samples["samples"].sum()), np.int64)])
    # Rows of iterations stand in the order of their ends, replica by replica as they happened.
    ends = run.column_ns("iterations", "end_s")[rows]
    order = np.lexsort((ends, requests))
    before = np.cumsum(tokens[order]) - tokens[order]
    begins = np.flatnonzero(np.diff(requests[order], prepend=-1))
    before -= np.repeat(before[begins], np.diff(np.append(begins, len(order))))
    position = np.empty(len(order), np.int64)
    position[order] = before
    count = len(flat["row"])
    of = ("row", "request", "verified", "accepted", "delivered")
    return Drafts(**{name: flat[name] for name in of}, position=position[:count])


def at_least(counts: Ints, of: Ints, most: int) -> list[float]:
    """Share of the entries with `of` >= j whose count is j or more, for j = 1 to `most`; nan where there is none."""
    shares = []
    for j in range(1, most + 1):
        asked = of >= j
        shares.append(float((counts[asked] >= j).mean()) if asked.any() else float("nan"))
    return shares


def acceptance_curve(verified: Ints, accepted: Ints) -> list[float]:
    """Share of the drafts at position 1, 2, ... that were accepted, those before them included: never rising.

    Positions that fewer steps reached are of those steps alone; the curve ends with the longest draft.
    """
    most = int(verified.max(initial=0))
    return np.minimum.accumulate(at_least(accepted, verified, most)).tolist() if most else []


def speculation_summary(run: RunTables, inside: NDArray[np.bool_]) -> dict[str, Any]:
    """Values of SPECULATION_KEYS over the iterations of the window (one flag per row of the table)."""
    if not run.column("iterations", "drafting").any():
        return {}
    flat = run.drafts()
    wanted = inside[flat["row"]]
    verified, accepted = (flat[name][wanted].astype(np.int64) for name in ("verified", "accepted"))
    delivered = flat["delivered"][wanted].astype(np.int64)
    drafted = verified > 0
    total, steps = int(verified.sum()), int(drafted.sum())
    return {
        "draft_tokens": total,
        "accepted_tokens": int(accepted.sum()),
        "acceptance_rate": _ratio(int(accepted.sum()), total),
        "acceptance_length": 1 + _ratio(int(accepted.sum()), steps),
        "tokens_per_decode": _ratio(int(delivered.sum()), len(delivered)),
        "drafted_share": _ratio(steps, len(delivered)),
        "acceptance_by_position": in_words(acceptance_curve(verified, accepted)),
    }


def in_words(shares: Sequence[float]) -> str:
    return " ".join([f"{share:.3f}" for share in shares])


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")
