"""What an iteration costs: model and GPU specs, profile tables, fits, and the cost models built from them.

Names below load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiler.capacity import MemoryPlan, num_blocks, plan_memory, slots
    from profiler.cost_model import CostModel
    from profiler.errors import ProfileError
    from profiler.hardware import Hardware, hardware_names, load_hardware
    from profiler.load import load_cost_model
    from profiler.model_config import load_model_spec, model_names
    from profiler.model_spec import ModelSpec
    from profiler.roofline import Roofline
    from profiler.roofline_constants import RooflineConstants
    from profiler.shapes import ShapeColumns
    from profiler.work import byte_coefficients, bytes_of, flop_coefficients, flops_of, peaks

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

__all__ = [
    "CostModel", "Hardware", "MemoryPlan", "ModelSpec", "ProfileError", "Roofline", "RooflineConstants",
    "ShapeColumns", "byte_coefficients", "bytes_of", "flop_coefficients", "flops_of", "hardware_names",
    "load_cost_model", "load_hardware", "load_model_spec", "model_names", "num_blocks", "peaks", "plan_memory",
    "slots",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"profiler.{_HOME[name]}"), name)
