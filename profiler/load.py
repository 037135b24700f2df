"""One door to a cost model: names in, a CostModel out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from profiler.cost_model import CostModel
from profiler.errors import ProfileError
from profiler.specs.dtypes import canonical_dtype
from profiler.specs.hardware import Hardware, load_hardware
from profiler.specs.model_config import load_model_spec
from profiler.specs.model_spec import ModelSpec
from profiler.specs.parallel_layout import ParallelLayout

if TYPE_CHECKING:
    from profiler.operators.engine_terms import EngineTerms
    from profiler.operators.fitting.device_fit import DeviceFit
    from profiler.operators.named_engines import NamedEngine

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
    weight_dtype: str = "auto",
    kv_dtype: str = "auto",
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: bool = False,
    routing: str = "uniform",
    layer_split: Sequence[int] | None = None,
    engine: str | Path | NamedEngine = "none",
    terms: Mapping[str, Any] | None = None,
    **options: Any,
) -> CostModel:
    """The cost model of `model` on `gpu`.

    model: a name, a Hugging Face folder or config.json, a TOML file, or a ModelSpec. gpu: a name, a TOML file, or
    Hardware. cost_model: "roofline" (specifications alone), the path of a fitted model, or "auto": the fitted model
    that ships for this GPU where there is one, the roofline otherwise; `kind`, `name` and `provenance()` of the
    result say which it became. `path/to/file.py:ClassName`: a class of one's own that keeps the protocol `CostModel`;
    it is called with those of model (ModelSpec), gpu (Hardware), dtype, kv_dtype, tp, pp and layer_split that it
    names. dtype "auto": the checkpoint's own (16 bits where it is float32); weight_dtype: of linear layers, as
    `ModelSpec.served_as` takes it. tp, pp, layer_split: devices a stage, stages, layers of each stage. dp, ep, routing:
    data-parallel ranks whose expert layers work together, whole experts on each device, and how tokens spread over them
    (`profiler.specs.parallel_layout.ParallelLayout`); of a model with experts and dp above 1 the result is a
    `profiler.cost_model.RankedCostModel`. engine: as it is served (`operators.named_engines`), whose terms are
    added to the kernels' times; terms: fields of `EngineTerms` that differ from its own. A roofline knows the host's
    alone, and costs that were measured as whole iterations hold all of them already. options: whatever else the chosen
    kind takes (the roofline: tile, pipeline_link, constants).

    Raises ProfileError for anything unknown, unreadable or that does not fit together.
    """
    spec = model if isinstance(model, ModelSpec) else load_model_spec(model)
    hardware = gpu if isinstance(gpu, Hardware) else load_hardware(gpu)
    spec, dtype = spec.served_as(dtype, weight_dtype)
    layout = ParallelLayout(tp, dp, ep, routing)
    layout.check(spec)
    if spec.experts and dp > 1 and pp > 1:
        raise ProfileError(
            f"dp {dp} beside pp {pp}: ranks whose expert layers work together have one stage; leave pp out"
        )
    chosen: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "tp": tp, "pp": pp, "layer_split": layer_split}
    from profiler.operators.named_engines import load_engine

    named = load_engine(engine) if isinstance(engine, str | Path) else engine
    added = _Terms(named, dict(terms or {}))
    chosen |= options
    if spec.experts and not is_own_class(cost_model):
        chosen["layout"] = layout
    if str(cost_model) == "auto":
        found = _shipped(hardware) if _fits_serve(dtype, kv_dtype, options) else None
        cost = _fitted(found, spec, hardware, chosen, added) if found else _roofline(spec, hardware, chosen, added)
        return _named(cost, added, hardware, tp)
    if str(cost_model) == "roofline":
        return _named(_roofline(spec, hardware, chosen, added), added, hardware, tp)
    if is_own_class(cost_model):
        return _own(str(cost_model), spec, hardware, {**chosen, "dp": dp, "ep": ep, "routing": routing})
    path = Path(cost_model)
    if not path.exists():
        raise ProfileError(
            f"cost model {str(cost_model)!r}: no such file; expected auto, roofline, a fitted model, or "
            "path/to/file.py:ClassName"
        )
    return _named(_fitted(path, spec, hardware, chosen, added), added, hardware, tp)


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


def _named(cost: CostModel, added: _Terms, hardware: Hardware, tp: int) -> CostModel:
    """The same costs, whose name says which engine they are of, and which of them were calibrated on a run."""
    if added.engine.name != "none":
        cost.name += f", engine {added.engine.label}"
    if tp > 1 and not hardware.p2p:
        cost.name += ", no p2p: all-reduces CALIBRATED on one run"
    from profiler.operators.scaled_phases import scaled

    terms = {**added.engine.terms, **added.own}
    return scaled(cost, [float(terms.get(name, 1.0)) for name in ("prefill_scale", "decode_scale")])


class _Terms(NamedTuple):
    """What an engine, and what its user besides, adds to the kernels."""

    engine: NamedEngine
    own: dict[str, Any]

    def of_fit(self, fit: DeviceFit) -> EngineTerms:
        from profiler.operators.engine_terms import EngineTerms

        EngineTerms.from_mapping(self.own, "--term")
        return EngineTerms.from_mapping({**fit.terms, **self.engine.terms, **self.own}, f"fitted model {fit.gpu}")

    def refuse(self, known: tuple[str, ...], costs: str) -> None:
        """ProfileError for a term of the user's that these costs cannot take."""
        from profiler.operators.engine_terms import EngineTerms

        EngineTerms.from_mapping(self.own, "--term")
        for name in self.own:
            if not name.startswith(known):
                raise ProfileError(f"--term {name}: {costs}; expected terms that begin with {' or '.join(known)}")


def _roofline(spec: ModelSpec, hardware: Hardware, engine: dict[str, Any], added: _Terms) -> CostModel:
    from profiler.operators.engine_terms import EngineTerms
    from profiler.roofline.constants import RooflineConstants
    from profiler.roofline.roofline import RankedRoofline, Roofline

    added.refuse(("host_", "front_", "prefill_scale", "decode_scale"), "a roofline has no such term")
    if added.own or added.engine.terms:
        terms = EngineTerms.from_mapping({**added.engine.terms, **added.own})
        across = engine["tp"] > 1
        host_us = {
            "host_before_ns": terms.host_before_us + across * terms.host_tp_step_us,
            "host_before_per_sequence_ns": terms.host_before_sequence_us + across * terms.host_tp_sequence_us,
            "host_after_ns": terms.host_after_us,
            "host_after_per_sample_ns": terms.host_after_sample_us,
        }
        constants = engine.get("constants") or RooflineConstants()
        engine = {**engine, "constants": replace(constants, **{name: us * 1e3 for name, us in host_us.items()})}
    layout = engine.get("layout")
    return (RankedRoofline if layout is not None and layout.dp > 1 else Roofline)(spec, hardware, **engine)


def _fits_serve(dtype: str, kv_dtype: str, options: dict[str, Any]) -> bool:
    """Whether shipped fits know these dtypes (16 bits) and options; otherwise "auto" means the roofline."""
    wanted = {canonical_dtype(dtype), "bfloat16" if kv_dtype == "auto" else canonical_dtype(kv_dtype)}
    return wanted <= {"bfloat16", "float16", "float8"} and not {"tile", "constants"} & set(options)


def _shipped(hardware: Hardware) -> Path | None:
    """The fitted model that ships for this GPU, if any."""
    if find_spec("profiler.operators.fitted_model") is None:
        return None
    from profiler.operators.fitted_model import find_fitted

    path: Path | None = find_fitted(hardware.kernels_of or hardware.name)
    return path


def _fitted(path: Path, spec: ModelSpec, hardware: Hardware, engine: dict[str, Any], added: _Terms) -> CostModel:
    from profiler.iterations.iteration_file import is_iteration_fit, load_iterations
    from profiler.iterations.staged_model import is_staged_fit, load_staged

    if is_iteration_fit(path) or is_staged_fit(path):
        added.refuse(
            ("front_", "prefill_scale", "decode_scale"), f"{path} was measured as whole iterations, which hold it"
        )
    if is_iteration_fit(path):
        return load_iterations(path, spec, **engine)
    if is_staged_fit(path):
        return load_staged(path, spec, **engine)
    if find_spec("profiler.operators.fitted_model") is None:
        raise ProfileError(f"cost model {str(path)!r}: fitted models cannot be read by this version")
    from profiler.operators.compose import CardFiles, compose
    from profiler.operators.fitting.model_file import read_model

    fit = read_model(path)
    widths = {name: width for name, width in added.engine.half_widths.items() if name != "front_end"}
    return compose(fit, spec, hardware, files=CardFiles(path), terms=added.of_fit(fit), term_widths=widths, **engine)
