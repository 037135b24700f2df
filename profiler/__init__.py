"""What an iteration costs: model and GPU specs, profile tables, fits, and the cost models built from them.

Names below load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "CostModel": "cost_model",
    "Hardware": "hardware",
    "ModelSpec": "model_spec",
    "Roofline": "roofline",
    "RooflineConstants": "roofline_constants",
    "ShapeColumns": "shapes",
    "byte_coefficients": "work",
    "bytes_of": "work",
    "flop_coefficients": "work",
    "flops_of": "work",
    "load_cost_model": "load",
    "MemoryPlan": "capacity",
    "ProfileError": "errors",
    "hardware_names": "hardware",
    "load_hardware": "hardware",
    "load_model_spec": "model_config",
    "model_names": "model_config",
    "num_blocks": "capacity",
    "peaks": "work",
    "plan_memory": "capacity",
    "slots": "capacity",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"profiler.{_HOME[name]}"), name)
