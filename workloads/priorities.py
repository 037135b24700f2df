"""Whether a run follows the priorities that its trace has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.registry import priorities_unused
from workloads.trace import Trace


def notes_on_priorities(trace: Trace, policy: str, knobs: Mapping[str, Any]) -> list[str]:
    """A sentence where a policy does not use a trace's priorities, or asks for those that the trace does not have."""
    differ = trace.priority is not None and len(trace) > 0 and bool((trace.priority != trace.priority[0]).any())
    if differ:
        unused = priorities_unused(policy, knobs)
        return [f"column priority is not used: {unused}"] if unused else []
    if str(knobs.get("scheduling", "")) == "priority":
        return ["--scheduling priority: all requests of the trace have one priority, so arrivals alone order them"]
    return []
