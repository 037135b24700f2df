"""Virtual time: SimPy engines, pipelines and clusters that replay traces under pluggable policies."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.config import ReplayConfig
    from simulator.errors import SimulationError
    from simulator.simulation import Run, replay

_HOME = {
    "ReplayConfig": "simulator.config",
    "Run": "simulator.simulation",
    "SimulationError": "simulator.errors",
    "replay": "simulator.simulation",
}

__all__ = ["ReplayConfig", "Run", "SimulationError", "replay"]


def __getattr__(name: str) -> Any:
    """Loads a name when it is first asked for, so that `import simulator` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'simulator' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
