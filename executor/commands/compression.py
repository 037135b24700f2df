"""`python -m executor compression`: what packed keys and values save, cost and do to a model's answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from executor.commands import options as o
from executor.errors import ExecutorError
from executor.machine.threads import set_threads
from policies.edges.declared_settings import with_flags
from policies.edges.input_file import LOG_BYTES, read_text


def register(app: typer.Typer) -> None:
    app.command("compression")(compression_command)


@with_flags(o.live_flags(("model", "dtype", "device", "threads")), model="smollm2", dtype="float32", device="cpu")
def compression_command(
    text: Annotated[Path, typer.Argument(help="A text to run through the model.")],
    tokens: Annotated[int, typer.Option(help="Tokens of the text, from its beginning.")] = 1024,
    codings: Annotated[str, typer.Option("--codings", help="kivi, delta, or both with a comma.")] = "kivi,delta",
    bits: Annotated[str, typer.Option("--bits", help="Bits per element: some of 2, 4, 8.")] = "8,4,2",
    group: Annotated[int, typer.Option(help="Tokens packed together: the KV block.")] = 32,
    window: Annotated[int, typer.Option(help="Most recent tokens in full precision.")] = 128,
    costs: Annotated[
        Path | None,
        typer.Option("--costs", help="Write the measured times here: `simulator replay --kv-compression-cost FILE`."),
    ] = None,
    as_json: o.Json = False,
    **settings: Any,
) -> None:
    """Measure compressed keys and values on a text: perplexity, logits, bytes and time, beside the full pool."""
    from executor.measuring.compression_error import measure_compression
    from executor.model.loading import load_model
    from executor.model.tokenizer import load_tokenizer
    from profiler.specs.kv_compression import Compression

    words = read_text(text, ExecutorError, LOG_BYTES)
    try:
        widths = [int(part) for part in bits.split(",")]
    except ValueError:
        raise ExecutorError(f"--bits: found {bits!r}, expected numbers as 4,2") from None
    asked = [Compression(coding.strip(), width, group, window) for coding in codings.split(",") for width in widths]
    set_threads(settings["threads"])
    loaded = load_model(
        settings["model"],
        dtype=settings["dtype"],
        device=settings["device"],
        kernels="torch",
        attention="sdpa",
        max_tokens=tokens,
        clip_max_tokens=True,
        trim_last_layer=False,
    )
    ids = load_tokenizer(loaded.source).encode(words)[: min(tokens, loaded.max_tokens)]
    errors = measure_compression(loaded, ids, asked)
    if costs is not None:
        from executor.measuring.profile_rows import device_name
        from profiler.compression_cost import write_prices

        name = device_name(loaded.device)
        prices = {f"{error.coding}{error.bits}": error.prices(loaded.spec, name) for error in errors}
        write_prices(prices, costs, {"device": name, "model": loaded.spec.name, "tokens": len(ids), "window": window})
    found = [error.as_dict() for error in errors]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    full = found[0]["perplexity_full"]
    print(f"{len(ids)} tokens, window {window}, groups of {group}; perplexity in full {full:.3f}")
    columns = (
        "coding",
        "bits",
        "perplexity",
        "kl",
        "logit_error_mean",
        "logit_error_max",
        "same_top",
        "packed_ratio",
        "ratio",
        "seal_us_per_token",
        "read_us_per_token",
        "read_full_us_per_token",
    )
    print("  ".join(f"{name:>{max(8, len(name))}}" for name in columns))
    for row in found:
        cells = [f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in columns]
        print("  ".join(f"{cell:>{max(8, len(name))}}" for name, cell in zip(columns, cells)))
