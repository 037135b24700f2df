"""Whether a run follows what its trace says of its requests: priorities, tenants, programs, predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.registry import policy_class, priorities_unused
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


WITHOUT = {
    "tenant": "so all requests are one tenant's",
    "program": "and no session, so every request is a program of its own",
    "predicted_tokens": "so it goes by declared limits; --predict oracle:0.5 makes one",
}
"""Column that a policy decides by -> what it does where the trace has none."""


def notes_on_turns(trace: Trace, policy: str) -> list[str]:
    """A sentence where a policy decides by a column that no request of the trace has."""
    column = policy_class(policy).decides_by
    if not column:
        return []
    held = [getattr(trace, column)] + ([trace.session] if column == "program" else [])
    if any(values is not None and any(values) for values in held):
        return []
    return [f"policy {policy}: the trace has no column {column}, {WITHOUT.get(column, 'by which it decides')}"]
