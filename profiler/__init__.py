"""What an iteration costs: model and GPU specs, profile tables, fits, and the cost models built from them.

Names below load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiler.cost_model import CostModel
    from profiler.errors import ProfileError
    from profiler.load import load_cost_model
    from profiler.roofline.constants import RooflineConstants
    from profiler.roofline.roofline import Roofline
    from profiler.specs.hardware import Hardware, hardware_names, load_hardware
    from profiler.specs.memory_plan import MemoryPlan, num_blocks, plan_memory, slots
    from profiler.specs.model_config import load_model_spec, model_names
    from profiler.specs.model_spec import ModelSpec
    from profiler.specs.shape_columns import ShapeColumns
    from profiler.specs.useful_work import byte_coefficients, bytes_of, flop_coefficients, flops_of, peaks

_HOME = {
    "CostModel": "cost_model",
    "Hardware": "specs.hardware",
    "ModelSpec": "specs.model_spec",
    "Roofline": "roofline.roofline",
    "RooflineConstants": "roofline.constants",
    "ShapeColumns": "specs.shape_columns",
    "byte_coefficients": "specs.useful_work",
    "bytes_of": "specs.useful_work",
    "flop_coefficients": "specs.useful_work",
    "flops_of": "specs.useful_work",
    "load_cost_model": "load",
    "MemoryPlan": "specs.memory_plan",
    "ProfileError": "errors",
    "hardware_names": "specs.hardware",
    "load_hardware": "specs.hardware",
    "load_model_spec": "specs.model_config",
    "model_names": "specs.model_config",
    "num_blocks": "specs.memory_plan",
    "peaks": "specs.useful_work",
    "plan_memory": "specs.memory_plan",
    "slots": "specs.memory_plan",
}

__all__ = [
    "CostModel",
    "Hardware",
    "MemoryPlan",
    "ModelSpec",
    "ProfileError",
    "Roofline",
    "RooflineConstants",
    "ShapeColumns",
    "byte_coefficients",
    "bytes_of",
    "flop_coefficients",
    "flops_of",
    "hardware_names",
    "load_cost_model",
    "load_hardware",
    "load_model_spec",
    "model_names",
    "num_blocks",
    "peaks",
    "plan_memory",
    "slots",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"profiler.{_HOME[name]}"), name)
