"""One door to a cost model: names in, a CostModel out."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from profiler.cost_model import CostModel
from profiler.errors import ProfileError
from profiler.specs.dtypes import canonical_dtype
from profiler.specs.hardware import Hardware, load_hardware
from profiler.specs.model_config import load_model_spec
from profiler.specs.model_spec import ModelSpec


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
    result say which it became. dtype "auto": the checkpoint's own (16 bits where it is float32). tp, pp, layer_split:
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
    path = Path(cost_model)
    if not path.exists():
        raise ProfileError(f"cost model {str(cost_model)!r}: no such file; expected auto, roofline or a fitted model")
    return _fitted(path, spec, hardware, engine | options)


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
