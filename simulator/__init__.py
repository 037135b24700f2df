"""Virtual time: SimPy engines, pipelines and clusters that replay traces under pluggable policies."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.config import ReplayConfig
    from simulator.errors import SimulationError
    from simulator.replay import Run, replay

_HOME = {
    "ReplayConfig": "simulator.config",
    "Run": "simulator.replay",
    "SimulationError": "simulator.errors",
    "replay": "simulator.replay",
}

__all__ = ["ReplayConfig", "Run", "SimulationError", "replay"]


def __getattr__(name: str) -> Any:
    """Loads a name when it is first asked for, so that `import simulator` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'simulator' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_HOME[name])
    value = getattr(module, name)
    # The function shares its module's name: keep what was asked for, not the submodule.
    globals()[name] = value
    return value
