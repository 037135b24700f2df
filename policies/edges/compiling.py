"""Whether the hot modules run compiled. They are ordinary Python either way (`CHARIOTEER_COMPILE=1 pip install .`).

Compiled or not, they give the same results; what differs is speed, and that a compiled class can be neither patched
nor, unless it says so with `mypyc_attr`, subclassed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

__all__ = ["compiled_modules", "how_built", "mypyc_attr"]

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_):
        """What mypyc reads where it compiles; nothing otherwise, so that nobody has to install its library."""
        return lambda decorated: decorated


HOT = (
    "policies.work.track",
    "policies.work.batch",
    "policies.work.cohort",
    "policies.work.speculator",
    "policies.kv_memory.ledger",
    "policies.kv_memory.block_names",
    "policies.kv_memory.block_ledger",
    "policies.kv_memory.extent_ledger",
    "policies.contract.queues",
    "policies.contract.draft",
    "policies.scheduling.lockstep",
    "policies.scheduling.lifecycle",
    "policies.scheduling.scheduler",
    "simulator.replica.leap_ends",
    "simulator.replica.plain",
    "simulator.replica.leaping",
    "simulator.replica.running_ahead",
    "simulator.clock.arrivals",
    "simulator.cluster.cluster",
    "simulator.cluster.in_own_time",
    "metrics.recording.recorder",
    "profiler.roofline.roofline",
    "profiler.operators.attention_lookup",
    "profiler.operators.fitted_model",
)
"""The modules that are compiled, in the order in which they are compiled (setup.py reads this list)."""


def compiled_modules() -> list[str]:
    """Those of `HOT` that this process has loaded as compiled code."""
    loaded = [(name, getattr(sys.modules.get(name), "__file__", None) or "") for name in HOT]
    return [name for name, file in loaded if file and not file.endswith(".py")]


def how_built() -> str:
    """`pure Python`, or `compiled`, for whoever reports a speed."""
    return "compiled" if compiled_modules() else "pure Python"
