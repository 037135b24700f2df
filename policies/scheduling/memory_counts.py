"""What the memory measures of one or several schedulers did, as plain data: for run folders and summaries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from policies.scheduling.scheduler import Scheduler


def memory_counts(schedulers: Iterable[tuple[Scheduler, int]]) -> dict[str, Any]:
    """Preemptions by kind, bytes swapped, and what each rung of the ladder did, summed over the schedulers.

    Each with the KV bytes of one of its blocks, on all devices together. Keys of a measure that none has are left out.
    """
    found: dict[str, Any] = {"preemptions_by_swap": 0, "preemptions_by_recompute": 0}
    for scheduler, block_bytes in schedulers:
        swap, admission = scheduler.swap, scheduler.admission
        by_swap = 0
        if swap is not None:
            counts = swap.counts
            by_swap = counts.by_swap
            for key, value in (
                ("swap_out_bytes", counts.blocks_out * block_bytes),
                ("swap_in_bytes", counts.blocks_in * block_bytes),
                ("swap_pages", swap.memory.pages),
                ("swap_pages_peak", counts.peak_pages),
                ("swap_pages_lost", counts.lost_pages),
            ):
                found[key] = found.get(key, 0) + value
        found["preemptions_by_swap"] += by_swap
        found["preemptions_by_recompute"] += scheduler.preemptions - by_swap
        if admission is not None:
            rungs = admission.counts
            for name, value in (
                ("plain_plans", rungs.plain_plans),
                ("held_back", rungs.held_back),
                ("beyond_longest", rungs.beyond_longest),
                ("rejected_overloaded", rungs.rejected),
            ):
                found[name] = found.get(name, 0) + value
    return found
