"""Commands about specifications: models, hardware, capacity, and predictions held against published step times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from policies.edges.settings import whole_number

Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
Model = Annotated[str, typer.Option(help="A name, a Hugging Face folder or config.json, or a TOML file.")]
Gpu = Annotated[str, typer.Option(help="A name or a TOML file.")]
Dtype = Annotated[str, typer.Option(help="Of weights and activations.")]
KvDtype = Annotated[str, typer.Option(help="Of the KV cache; auto: the checkpoint's, or as the activations.")]
WeightDtype = Annotated[str, typer.Option(help="Of linear layers: fp8, fp8_block, int4, ...; auto: the checkpoint's.")]
Dp = Annotated[int, typer.Option(help="Data-parallel ranks whose experts work together.")]
Ep = Annotated[bool, typer.Option("--ep", help="Whole experts on each of the tp x dp devices.")]
Tp = Annotated[int, typer.Option(help="Devices that share each layer.")]
Pp = Annotated[int, typer.Option(help="Pipeline stages.")]
LayerSplit = Annotated[str | None, typer.Option(help="Layers of each stage, such as 20,12 (default: even).")]
GIB = 2**30


def register(app: typer.Typer) -> None:
    """Add this module's commands to the profiler's app."""
    for command in (models, hardware, capacity, predict, published, rates):
        app.command()(command)


def models(json: Json = False) -> None:
    """Lists the models that have a name."""
    from profiler.specs.model_config import load_model_spec, model_names

    specs = [load_model_spec(name) for name in model_names()]
    if json:
        return _print_json([spec.summary() | {"kv_bytes_per_token": spec.kv_bytes_per_token()} for spec in specs])
    columns = ("model", "parameters", "layers", "hidden", "heads", "FFN", "vocabulary", "positions", "KV a token")
    rows = [
        (
            spec.name,
            _billions(spec.params),
            spec.layers,
            spec.hidden,
            f"{spec.heads}/{spec.kv_heads} x {spec.head_dim}",
            spec.intermediate,
            spec.vocab,
            spec.max_position if spec.sliding_window is None else f"{spec.max_position}, window {spec.sliding_window}",
            f"{spec.kv_bytes_per_token() / 1024:.0f} KiB",
        )
        for spec in specs
    ]
    _print_table(columns, rows, left=1)


def hardware(json: Json = False) -> None:
    """Lists the GPUs that have a name; a star marks a figure that was remembered, not read from a source."""
    from profiler.specs.hardware import hardware_names, load_hardware

    gpus = [load_hardware(name) for name in hardware_names()]
    if json:
        return _print_json([gpu.summary() for gpu in gpus])
    rows = []
    for gpu in gpus:
        star = dict.fromkeys(gpu.remembered, "*")
        rows.append(
            (
                gpu.name,
                gpu.title,
                f"{gpu.peak('bfloat16') / 1e12:g}",
                f"{gpu.memory_bytes / GIB:.1f}{star.get('memory_bytes', '')}",
                f"{gpu.memory_bandwidth / 1e9:g}",
                f"{gpu.peak('bfloat16') / gpu.memory_bandwidth:.0f}",
                f"{gpu.sms}{star.get('sms', '')}",
                f"{gpu.link_bandwidth / 1e9:g}{star.get('link_bandwidth', '')}",
                gpu.link,
            )
        )
    _print_table(("gpu", "", "bf16 TFLOPS", "GiB", "GB/s", "FLOP/B", "SMs", "link GB/s", "link"), rows, left=2)


def capacity(
    model: Model,
    gpu: Gpu,
    dtype: Dtype = "bfloat16",
    weight_dtype: WeightDtype = "auto",
    kv_dtype: KvDtype = "auto",
    dp: Dp = 1,
    ep: Ep = False,
    tp: Tp = 1,
    pp: Pp = 1,
    layer_split: LayerSplit = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = 16,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the device's memory for a paged pool.")] = 0.9,
    headroom: Annotated[float, typer.Option(help="Share left free where requests reserve slots (SARATHI).")] = 0.2,
    max_model_len: Annotated[
        list[int] | None, typer.Option(help="L, prompt and output together; may be given several times.")
    ] = None,
    mean_tokens: Annotated[
        float | None, typer.Option(help="Tokens that a running request holds on average (default: L / 2).")
    ] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Largest batch, for its activations.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(help="Most sampled rows, for their logits.")] = 256,
    json: Json = False,
) -> None:
    """How much fits: weights, activations, KV, blocks, slots B for each L, and what paging gains over slots."""
    from profiler.errors import ProfileError
    from profiler.specs.hardware import load_hardware
    from profiler.specs.layer_split import parse_split
    from profiler.specs.memory_plan import plan_memory, slots
    from profiler.specs.model_config import load_model_spec

    spec, device = load_model_spec(model).with_weights(weight_dtype), load_hardware(gpu)
    split = parse_split(layer_split)
    engine: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "tp": tp, "pp": pp, "layer_split": split}
    if mean_tokens is not None and not 0 < mean_tokens < float("inf"):
        raise ProfileError(f"--mean-tokens: found {mean_tokens:g}, expected a number above 0")
    plan = plan_memory(
        spec,
        device,
        **engine,
        dp=dp,
        ep=ep,
        block_size=block_size,
        utilisation=gpu_memory_utilization,
        activation_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    lengths = max_model_len or sorted({min(length, spec.max_position) for length in (1024, 2048, 4096, 8192)})
    rows = []
    for length in lengths:
        b = slots(spec, device, **engine, dp=dp, ep=ep, max_tokens=length, headroom=headroom)
        same_memory = int(plan.kv_tokens // length)
        held = mean_tokens if mean_tokens is not None else length / 2
        paged = plan.paged_requests(held)
        gain = paged / same_memory if same_memory else None
        rows.append((length, b, same_memory, held, paged, gain))
    keys = ("max_tokens", "slots", "slots_in_pool", "mean_tokens", "paged_requests", "paging_gain")
    if json:
        return _print_json(
            {
                "model": spec.name,
                "gpu": device.name,
                **engine,
                **plan.summary(),
                "headroom": headroom,
                "lengths": [dict(zip(keys, row)) for row in rows],
            }
        )
    where = f" (stage {plan.stage} of {pp}, the tightest)" if pp > 1 else ""
    sizes = {
        "device memory": plan.memory_bytes,
        f"usable ({gpu_memory_utilization:.0%})": plan.usable_bytes,
        "weights": plan.weight_bytes,
        f"activations ({max_num_batched_tokens} tokens, {max_num_seqs} sampled)": plan.activation_bytes,
        "runtime": plan.runtime_bytes,
        "KV cache": plan.kv_bytes,
    }
    typer.echo(f"{spec.name} on {tp * pp * dp} x {device.name}, each device{where}:")
    width = max(len(name) for name in sizes)
    for name, size in sizes.items():
        typer.echo(f"  {name:<{width}}  {size / GIB:8.2f} GiB")
    typer.echo(
        f"  KV a token {plan.kv_bytes_per_token / 1024:.1f} KiB, blocks of {block_size} tokens: {plan.num_blocks}"
    )
    typer.echo("")
    heads = ("L", f"B (headroom {headroom:.0%})", "slots in the pool", "mean tokens held", "paged", "gain")
    cells = [(*row[:3], f"{row[3]:g}", row[4], f"{row[5]:.2f}x" if row[5] else "-") for row in rows]
    _print_table(heads, cells, left=0)


def predict(
    model: Model,
    gpu: Gpu,
    chunk: Annotated[
        list[str] | None, typer.Option(help="TOKENS or TOKENS@PREFIX of a prefill chunk; may be given several times.")
    ] = None,
    decodes: Annotated[int, typer.Option(help="Requests that decode one token each.")] = 0,
    context: Annotated[int, typer.Option(help="Context of each decode.")] = 1024,
    dummy_tokens: Annotated[int, typer.Option(help="Padding rows.")] = 0,
    cost_model: Annotated[str, typer.Option(help="auto, roofline, or the path of a fitted model.")] = "auto",
    dtype: Dtype = "auto",
    weight_dtype: WeightDtype = "auto",
    kv_dtype: KvDtype = "auto",
    dp: Dp = 1,
    ep: Ep = False,
    routing: Annotated[str, typer.Option(help="How tokens spread over experts: uniform, balanced, ...")] = "uniform",
    tp: Tp = 1,
    pp: Pp = 1,
    layer_split: LayerSplit = None,
    engine: Annotated[str, typer.Option(help="Engine as it is served: vllm:0.19, ..., or a TOML file.")] = "none",
    term: Annotated[list[str] | None, typer.Option(help="Change a term of the engine, as launch_us=5.")] = None,
    p2p: Annotated[
        bool | None, typer.Option("--p2p/--no-p2p", help="GPUs of a node reach each other directly.")
    ] = None,
    json: Json = False,
) -> None:
    """What one iteration costs, part by part."""
    from dataclasses import replace

    from policies.work.batch import BatchShape
    from profiler.errors import ProfileError
    from profiler.evidence import evidence_of, parts_rest_on
    from profiler.load import load_cost_model
    from profiler.operators.engine_terms import parse_terms
    from profiler.specs.hardware import load_hardware
    from profiler.specs.layer_split import parse_split

    chunks = tuple(_chunk(text) for text in chunk or ())
    if min(decodes, context, dummy_tokens) < 0 or not (chunks or decodes):
        raise ProfileError("predict: give at least one --chunk or --decodes, and no negative number")
    card = load_hardware(gpu)
    if p2p is not None:
        card = replace(card, p2p=p2p)
    served: dict[str, Any] = {"engine": engine, "terms": parse_terms(term or [], ProfileError)}
    width: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "tp": tp, "pp": pp}
    width |= {"weight_dtype": weight_dtype, "dp": dp, "ep": ep, "routing": routing}
    cost = load_cost_model(model, card, cost_model=cost_model, layer_split=parse_split(layer_split), **width, **served)
    most = 10**9  # beyond it nothing is a batch, and sums of contexts leave 64 bits
    if max(decodes, context, dummy_tokens, *(max(one) for one in chunks or ((0, 0),))) > most:
        raise ProfileError(f"predict: found a number above {most:,}, expected a batch")
    total = decodes * context
    shape = BatchShape(chunks, decodes, total, context if decodes else 0, dummy_tokens, len(chunks) + decodes)
    parts = cost.breakdown(shape)
    evidence, rests_on = evidence_of([(cost, [shape], [1])]), parts_rest_on(cost, shape)
    if json:
        return _print_json(
            {
                "cost_model": cost.name,
                **evidence.as_dict(),
                "inside": cost.inside(shape),
                "shape": shape._asdict(),
                "stages_ns": [cost.stage_ns(shape, stage) for stage in range(cost.stages)],
                "parts_ns": dict(parts),
                "parts_rest_on": rests_on,
                "total_ns": sum(parts.values()),
            }
        )
    typer.echo(f"{cost.name} ({evidence.words})")
    whole = sum(parts.values())
    rows = [
        (name, rests_on.get(name, ""), f"{ns / 1e6:.3f}", f"{ns / whole:.1%}")
        for name, ns in [*parts.items(), ("total", whole)]
    ]
    _print_table(("part", "rests on", "ms", "share"), rows, left=2)


def published(
    data: Annotated[
        Path | None, typer.Option(help="Table of steps (.csv); default: the one that travels with the project.")
    ] = None,
    cost_model: Annotated[str, typer.Option(help="auto, roofline, or the path of a fitted model.")] = "roofline",
    each: Annotated[bool, typer.Option("--each", help="Print every step, not only each group.")] = False,
    json: Json = False,
) -> None:
    """Holds a cost model against step times from papers (SARATHI, Sarathi-Serve, Splitwise, Vidur, DistServe)."""
    from functools import cache
    from statistics import median

    from profiler.load import load_cost_model
    from profiler.measurements.published_steps import PUBLISHED, predicted_ms, published_steps

    @cache
    def cost(model: str, gpu: str, tp: int) -> Any:
        return load_cost_model(model, gpu, cost_model=cost_model, dtype="float16", tp=tp)

    results = []
    for step in published_steps(data or PUBLISHED):
        engine = cost(step.model, step.gpu, step.tp)
        ms = predicted_ms(engine, step)
        if ms is not None:
            results.append((step, ms, ms / step.measured_ms - 1, engine.name))
    if json:
        return _print_json(
            [
                {
                    "source": step.source,
                    "group": step.group,
                    "step": step.what,
                    "part": step.part,
                    "measured_ms": step.measured_ms,
                    "predicted_ms": ms,
                    "error": error,
                    "cost_model": name,
                }
                for step, ms, error, name in results
            ]
        )
    if each:
        cells = [
            (f"{step.source} {step.group}", step.what, f"{step.measured_ms:.2f}", f"{ms:.2f}", f"{error:+.1%}")
            for step, ms, error, _ in results
        ]
        return _print_table(("source", "step", "measured ms", "predicted ms", "error"), cells, left=2)
    groups: dict[str, list[float]] = {}
    for step, _, error, _ in results:
        groups.setdefault(f"{step.source} {step.group}".strip(), []).append(error)
    rows = [
        (name, len(errors), f"{median(errors):+.1%}", f"{median(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}")
        for name, errors in groups.items()
    ]
    _print_table(("source", "steps", "median error", "median |error|", "worst"), rows, left=1)


def rates(
    kernels: Annotated[
        Path | None, typer.Option(help="Folder of aiconfigurator kernel tables; default: what the project carries.")
    ] = None,
    steps: Annotated[
        Path | None, typer.Option(help="Folder of vLLM step logs; default: those that the project carries.")
    ] = None,
    json: Json = False,
) -> None:
    """Shows where the roofline's constants come from: the share of peak that measured kernels reach, host time."""
    from profiler.measurements.facts import STEP_LOGS
    from profiler.measurements.kernel_rates import gemm_errors, host_rates, kernel_profiles, kernel_rates

    profiles = kernel_profiles(kernels)
    found, errors, host = kernel_rates(profiles), gemm_errors(profiles), host_rates(steps or STEP_LOGS)
    if json:
        return _print_json({"rates": found, "gemm_errors": errors, "host": host})
    quartiles = ("p25", "p50", "p75")
    cells = [
        (row["gpu"], row["kernels"], row["count"], row["constant"], *(f"{row[key]:.3g}" for key in quartiles))
        for row in found
    ]
    _print_table(("gpu", "kernels", "count", "constant", "P25", "median", "P75"), cells, left=2)
    typer.echo("\nThe roofline's GEMMs against the same tables (bfloat16, n and k at least 2048):")
    cells = [(e["gpu"], e["rows"], e["count"], f"{e['median']:+.1%}", f"{e['median_abs']:.1%}") for e in errors]
    _print_table(("gpu", "rows", "count", "median error", "median |error|"), cells, left=2)
    typer.echo("\nHost time of a step in vLLM, one Python process:")
    cells = [(h["log"], h["part"], h["steps"], f"{h['fixed_us']:.0f}", f"{h['each_us']:.1f}") for h in host]
    _print_table(("log", "part", "steps", "fixed us", "us a sequence"), cells, left=2)


def _chunk(text: str) -> tuple[int, int]:
    from profiler.errors import ProfileError

    words = text.partition("@")
    tokens, prefix = whole_number(words[0]), whole_number(words[2] or "0")
    if not tokens or prefix is None:
        raise ProfileError(f"--chunk: found {text!r}, expected TOKENS or TOKENS@PREFIX")
    return tokens, prefix


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _print_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value, indent=2))


def _print_table(columns: tuple[str, ...], rows: list[Any], left: int) -> None:
    """Rows under their heads; the first `left` columns and text that is not a figure are flush left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max([len(head), *(len(row[i]) for row in cells)]) for i, head in enumerate(columns)]

    def line(row: list[str], pad: Callable[[str, int, int], str]) -> str:
        return "  ".join(pad(cell, widths[i], i) for i, cell in enumerate(row)).rstrip()

    def align(cell: str, width: int, column: int) -> str:
        return cell.ljust(width) if column < left else cell.rjust(width)

    typer.echo(line(list(columns), align))
    typer.echo("  ".join("-" * width for width in widths))
    for row in cells:
        typer.echo(line(row, align))
