"""What a run says of its KV memory beyond use: the prefix cache, swapping and the trouble ladder, for the summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEMORY_KEYS = {
    "prefix_hit_requests": "measured requests that found at least a part of their prompt in a prefix cache",
    "preemptions_by_recompute": "preemptions of the whole run whose KV was computed again",
    "preemptions_by_swap": "preemptions of the whole run whose KV went to host memory",
    "swap_out_bytes": "KV moved to host memory (null without swapping)",
    "swap_in_bytes": "KV brought back from there",
    "swap_pages_peak": "most pages of host memory in use, all replicas together",
    "swap_pages_lost": "pages taken from swapped requests because host memory was full",
    "swap_link_busy_s": "time that links to host memory were moving KV, both directions added up",
    "swap_link_wait_s": "time that such transfers waited for each other",
    "plain_plans": "batches planned without mixing because memory was short (null without a ladder)",
    "held_back": "requests that had to wait, once a stay in the queue, for what running ones may still grow to",
    "beyond_longest": "admissions that the longest allowed answers would not have let in",
    "rejected_overloaded": "requests rejected with a time after which to retry",
    "store_hit_tokens": "prompt tokens fetched from the KV store that replicas share (null without one)",
    "store_bytes_in": "KV written to that store",
    "store_bytes_out": "KV fetched from it",
    "store_fetch_s_mean": "mean time of a fetch",
}
"""Key -> meaning, in the order of summary.json."""


def memory_summary(
    config: Mapping[str, Any], cached_tokens: NDArray[Any], measured: NDArray[np.bool_]
) -> dict[str, Any]:
    """Values of MEMORY_KEYS; what the run's config does not say is left out."""
    counts = config.get("memory")
    found: dict[str, Any] = {"prefix_hit_requests": int((cached_tokens[measured] > 0).sum())}
    if isinstance(counts, Mapping):
        found.update({key: counts[key] for key in MEMORY_KEYS if key in counts})
    return found
