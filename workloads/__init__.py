"""What arrives: traces in columns, readers for public formats, generators.

`read_trace` is the one door for files, `generate` and `preset` make synthetic workloads, `describe` tells what a trace
looks like, `write_trace` writes it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workloads.description import describe
    from workloads.generating.generator import generate
    from workloads.generating.presets import PRESETS, Preset, preset
    from workloads.reading.reader import read_trace
    from workloads.trace import Trace, TraceError
    from workloads.write import write_trace

_HOME = {
    "Trace": "workloads.trace",
    "TraceError": "workloads.trace",
    "read_trace": "workloads.reading.reader",
    "generate": "workloads.generating.generator",
    "PRESETS": "workloads.generating.presets",
    "Preset": "workloads.generating.presets",
    "preset": "workloads.generating.presets",
    "describe": "workloads.description",
    "write_trace": "workloads.write",
}

__all__ = ["PRESETS", "Preset", "Trace", "TraceError", "describe", "generate", "preset", "read_trace", "write_trace"]


def __getattr__(name: str) -> Any:
    """Loads a name when it is first asked for, so that `import workloads` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'workloads' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
