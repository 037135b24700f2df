"""One door to a cost model: names in, a CostModel out."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from profiler.cost_model import CostModel
from profiler.errors import ProfileError
from profiler.specs.dtypes import canonical_dtype
from profiler.specs.hardware import Hardware, load_hardware
from profiler.specs.model_config import load_model_spec
from profiler.specs.model_spec import ModelSpec

PROTOCOL = (
    *("kind", "calibrated", "name", "stages", "tile", "host_ns", "stage_ns", "send_ns", "repeat_ns", "predict_ns"),
    *("breakdown", "inside", "provenance"),
)
"""What a cost model has to have (`profiler.cost_model.CostModel`)."""


def load_cost_model(
    model: str | Path | ModelSpec,
    gpu: str | Path | Hardware,
    *,
    cost_model: str | Path = "auto",
    dtype: str = "auto",
    kv_dtype: str = "auto",
    tp: int = 1,
    pp: int = 1,
    layer_split: Sequence[int] | None = None,
    **options: Any,
) -> CostModel:
    """The cost model of `model` on `gpu`.

    model: a name, a Hugging Face folder or config.json, a TOML file, or a ModelSpec. gpu: a name, a TOML file, or
    Hardware. cost_model: "roofline" (specifications alone), the path of a fitted model, or "auto": the fitted model
    that ships for this GPU where there is one, the roofline otherwise; `kind`, `name` and `provenance()` of the
    result say which it became. `path/to/file.py:ClassName`: a class of one's own that keeps the protocol `CostModel`;
    it is called with those of model (ModelSpec), gpu (Hardware), dtype, kv_dtype, tp, pp and layer_split that it
    names. dtype "auto": the checkpoint's own (16 bits where it is float32). tp, pp, layer_split:
    devices a stage, stages, layers of each stage. options: whatever else the chosen kind takes (the roofline: tile,
    pipeline_link, constants).

    Raises ProfileError for anything unknown, unreadable or that does not fit together.
    """
    spec = model if isinstance(model, ModelSpec) else load_model_spec(model)
    hardware = gpu if isinstance(gpu, Hardware) else load_hardware(gpu)
    spec.refuse_mixed_windows()
    spec.refuse_quantised(
        "no cost model here knows the times of such GEMMs",
        "pass the config of the unquantised model (with --dtype fp8 or int8 for 8-bit weights), or costs of your own",
    )
    if dtype == "auto":
        dtype = spec.dtype if spec.dtype in ("bfloat16", "float16") else "bfloat16"
    engine: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "tp": tp, "pp": pp, "layer_split": layer_split}
    if str(cost_model) == "auto":
        found = _shipped(hardware) if _fits_serve(dtype, kv_dtype, options) else None
        return (
            _fitted(found, spec, hardware, engine | options) if found else _roofline(spec, hardware, engine | options)
        )
    if str(cost_model) == "roofline":
        return _roofline(spec, hardware, engine | options)
    if is_own_class(cost_model):
        return _own(str(cost_model), spec, hardware, engine | options)
    path = Path(cost_model)
    if not path.exists():
        raise ProfileError(
            f"cost model {str(cost_model)!r}: no such file; expected auto, roofline, a fitted model, or "
            "path/to/file.py:ClassName"
        )
    return _fitted(path, spec, hardware, engine | options)


def is_own_class(cost_model: str | Path) -> bool:
    """Whether this names a class in a file."""
    path, colon, _ = str(cost_model).rpartition(":")
    return bool(colon) and path.endswith(".py")


def _own(name: str, spec: ModelSpec, hardware: Hardware, engine: dict[str, Any]) -> CostModel:
    """A user's own class, made anew each time; what it lacks of the protocol is named."""
    from policies.registry import class_from_file

    path, _, cls = name.rpartition(":")
    found = class_from_file("cost model", Path(path), cls)
    given = {"model": spec, "gpu": hardware, **engine}
    try:
        parameters = signature(found).parameters.values()
    except (TypeError, ValueError):
        raise ProfileError(f"cost model {name}: found {type(found).__name__}, expected a class") from None
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    unknown = [
        one.name for one in parameters if one.name in names and one.default is one.empty and one.name not in given
    ]
    if unknown:
        raise ProfileError(f"cost model {name}: found the parameter {unknown[0]}, expected some of {', '.join(given)}")
    cost: CostModel = found(**{key: value for key, value in given.items() if takes_all or key in names})
    missing = [member for member in PROTOCOL if not hasattr(cost, member)]
    if missing:
        raise ProfileError(
            f"cost model {name}: found no {', '.join(missing)}, expected all of the protocol "
            "profiler.cost_model.CostModel"
        )
    if cost.stages != engine["pp"]:
        raise ProfileError(f"cost model {name}: found stages {cost.stages!r}, expected {engine['pp']}, as --pp says")
    return cost


def _roofline(spec: ModelSpec, hardware: Hardware, engine: dict[str, Any]) -> CostModel:
    from profiler.roofline.roofline import Roofline

    return Roofline(spec, hardware, **engine)


def _fits_serve(dtype: str, kv_dtype: str, options: dict[str, Any]) -> bool:
    """Whether shipped fits know these dtypes (16 bits) and options; otherwise "auto" means the roofline."""
    wanted = {canonical_dtype(dtype), "bfloat16" if kv_dtype == "auto" else canonical_dtype(kv_dtype)}
    return wanted <= {"bfloat16", "float16"} and not {"tile", "constants"} & set(options)


def _shipped(hardware: Hardware) -> Path | None:
    """The fitted model that ships for this GPU, if any."""
    if find_spec("profiler.operators.fitted_model") is None:
        return None
    from profiler.operators.fitted_model import find_fitted

    path: Path | None = find_fitted(hardware.name)
    return path


def _fitted(path: Path, spec: ModelSpec, hardware: Hardware, engine: dict[str, Any]) -> CostModel:
    from profiler.iterations.iteration_file import is_iteration_fit, load_iterations
    from profiler.iterations.staged_model import is_staged_fit, load_staged

    if is_iteration_fit(path):
        return load_iterations(path, spec, **engine)
    if is_staged_fit(path):
        return load_staged(path, spec, **engine)
    if find_spec("profiler.operators.fitted_model") is None:
        raise ProfileError(f"cost model {str(path)!r}: fitted models cannot be read by this version")
    from profiler.operators.fitted_model import load_fitted

    cost: CostModel = load_fitted(path, spec, hardware, **engine)
    return cost
