"""What a simulated engine pays for speculation: the costs of its drafting model, and the memory that this takes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from policies import Speculation
from profiler import Hardware, ModelSpec, load_cost_model, load_model_spec
from profiler.cost_model import CostModel
from profiler.specs.dtypes import dtype_bytes
from profiler.specs.layer_split import split_layers
from profiler.speculation_cost import DraftingPrices, SpeculatingCost, eagle_head
from simulator.config import ReplayConfig
from simulator.errors import SimulationError


def check_speculation(config: ReplayConfig) -> Speculation | None:
    """How a config speculates; SimulationError for what does not go together with it, by name."""
    if config.speculation is None:
        for flag, value in (
            ("--acceptance", config.acceptance),
            ("--drafts-found", config.drafts_found),
            ("--draft-model", config.draft_model),
            ("--draft-step-us", config.draft_step_us),
        ):
            if value is not None:
                raise SimulationError(
                    f"{flag} without --speculation: expected --speculation ngram:4, draft:3 or eagle:4"
                )
        return None
    speculation = Speculation.parse(config.speculation)
    if config.acceptance is None:
        raise SimulationError(
            f"--speculation {speculation} without --acceptance: expected how many drafts are accepted, such as "
            "--acceptance 0.7 (docs/concepts/speculation.md)"
        )
    if speculation.method == "draft" and config.draft_model is None:
        raise SimulationError(f"--speculation {speculation}: expected --draft-model, the model that drafts")
    if speculation.method != "draft" and config.draft_model is not None:
        raise SimulationError(
            f"--draft-model with --speculation {speculation}: expected draft:K; no other method has one"
        )
    if speculation.method != "ngram" and config.drafts_found is not None:
        raise SimulationError(
            f"--drafts-found with --speculation {speculation}: a model always drafts; expected ngram:K"
        )
    for flag, used in (
        ("--reference", config.reference),
        ("--afd", bool(config.afd)),
        ("--ladder", config.ladder not in (None, "none")),
        ("--kv-compression", config.kv_compression is not None),
    ):
        if used:
            raise SimulationError(f"{flag} with --speculation: not simulated together; leave one of them out")
    return speculation


def speculating_cost(config: ReplayConfig, cost: CostModel, model: ModelSpec, gpu: Hardware) -> CostModel:
    """The cost model with verification and drafting in it."""
    if config.speculation is None or isinstance(cost, SpeculatingCost):
        return cost
    speculation = Speculation.parse(config.speculation)
    prices = DraftingPrices()
    if config.draft_step_us is not None:
        prices = replace(prices, step_us=config.draft_step_us)
    drafter = drafting_model(config, model)
    layers = tuple(config.layer_split or split_layers(model.layers, cost.stages))
    return SpeculatingCost.of(
        cost,
        speculation.method,
        prices,
        model,
        gpu,
        drafter=None if drafter is None else _drafter_cost(drafter, gpu, config.dtype, config.kv_dtype, config.tp),
        dtype="bfloat16" if config.dtype == "auto" else config.dtype,
        kv_dtype=config.kv_dtype,
        tp=config.tp,
        layers=layers,
    )


def drafting_model(config: ReplayConfig, model: ModelSpec) -> ModelSpec | None:
    """The model that drafts, None for n-grams."""
    if config.speculation is None:
        return None
    method = Speculation.parse(config.speculation).method
    if method == "draft":
        assert config.draft_model is not None
        drafter = load_model_spec(config.draft_model)
        if drafter.vocab != model.vocab:
            raise SimulationError(
                f"--draft-model {config.draft_model}: found a vocabulary of {drafter.vocab} tokens, expected "
                f"{model.name}'s {model.vocab}: drafts are verified token by token"
            )
        return drafter
    return eagle_head(model) if method == "eagle" else None


def blocks_beside_drafter(config: ReplayConfig, model: ModelSpec, num_blocks: int) -> int:
    """KV blocks that are left of so many where a drafting model's weights, and its own keys and values, lie beside."""
    drafter = drafting_model(config, model)
    if drafter is None:
        return num_blocks
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    held = dtype if config.kv_dtype == "auto" else config.kv_dtype
    held = held if dtype_bytes(held) >= 1 else "bfloat16"
    own, more = (spec.kv_bytes_per_token(held, config.tp) * config.block_size for spec in (model, drafter))
    embeddings = 0 if config.draft_model is not None else drafter.hidden * drafter.vocab
    weights = (drafter.params - embeddings) * dtype_bytes(dtype if dtype_bytes(dtype) >= 1 else "bfloat16") / config.tp
    left = int((num_blocks * own - weights) / (own + more))
    if left < 1:
        raise SimulationError(f"--speculation {config.speculation}: {drafter.name} leaves no room for keys and values")
    return left


@lru_cache(maxsize=8)
def _drafter_cost(drafter: ModelSpec, gpu: Hardware, dtype: str, kv_dtype: str, tp: int) -> CostModel:
    return load_cost_model(drafter, gpu, dtype=dtype, kv_dtype=kv_dtype, tp=tp)
