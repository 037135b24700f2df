"""How step times were read from papers and artifacts: readers of tables of their numbers, for docs/facts.py."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from policies.work.batch import BatchShape
from profiler.measurements.published_steps import PublishedStep


def published_steps(folder: Path) -> list[PublishedStep]:
    """Every step of the folder's tables that names a model and a GPU of ours."""
    steps: list[PublishedStep] = []
    for name, reader in _READERS.items():
        steps += reader(csv.DictReader(io.StringIO((folder / name).read_text(encoding="utf-8"))))
    return steps


def prefill(chunks: Sequence[int]) -> BatchShape:
    return BatchShape(tuple((tokens, 0) for tokens in chunks), sampled=len(chunks))


def decode(size: int, context: int) -> BatchShape:
    return BatchShape(decodes=size, decode_context_total=size * context, decode_context_max=context, sampled=size)


def _sarathi_table2(rows: Iterator[Mapping[str, str]]) -> list[PublishedStep]:
    """LLaMA-13B on an A6000. The prefill batch holds 1024 tokens in all, whatever its caption says."""
    shapes = {
        "prefill-only": prefill([1024]),
        "decode-only": decode(4, 1024),
        "hybrid": BatchShape(((1021, 0),), 3, 3 * 1024, 1024, sampled=4),
    }
    parts = {"total_time": "iteration", "linear_time": "linear"}
    steps = []
    for row in rows:
        kind = next((kind for kind in shapes if row["batch_or_workload"].startswith(kind)), None)
        if kind and row["metric"] in parts:
            what = f"{kind} {row['metric']}"
            steps.append(_step("SARATHI Table 2", "", what, "llama-13b", "a6000", 1, shapes[kind], row, parts))
    return steps


def _sarathi_fig7(rows: Iterator[Mapping[str, str]]) -> list[PublishedStep]:
    steps = []
    for row in rows:
        tokens = re.fullmatch(r"prefill (\d{1,9}) tokens", row["batch_or_workload"])
        if tokens and row["metric"] == "iteration_time":
            shape = prefill([int(tokens[1])])
            steps.append(_step("SARATHI Fig 7", "", tokens[0], "llama-13b", "a6000", 1, shape, row))
    return steps


_SARATHI_SERVE_PARTS = {"batch_execution_time": "iteration", "linear": "linear"}


def _sarathi_serve(rows: Iterator[Mapping[str, str]]) -> list[PublishedStep]:
    """Yi-34B on two A100 PCIe cards. Decode contexts are not logged (at most 1024): half of that is assumed.

    The two files disagree on decode at batch 4 and are kept apart; the prefill of 256 was the first, cold batch.
    """
    steps = []
    for row in rows:
        what = row["batch_or_workload"]
        if row["metric"] not in _SARATHI_SERVE_PARTS or what.startswith("prefill-only 256 "):
            continue
        file = "figure 2" if "figure-2" in row["source_loc"] else "table 2"
        if found := re.match(r"prefill-only (\d{1,9}) tokens", what):
            shape, group = prefill([int(found[1])]), f"{file} prefill"
        elif found := re.match(r"decode-only \d{1,9} tokens \(B=(\d{1,9}), max len (\d{1,9})\)", what):
            shape, group = decode(int(found[1]), int(found[2]) // 2), f"{file} decode"
        elif found := re.match(r"(\d{1,9})p\+(\d{1,9})d", what):
            tokens, size = int(found[1]), int(found[2])
            shape = BatchShape(((tokens, 0),) if tokens else (), size, size * 512, 512, sampled=size + (tokens > 0))
            group = f"{file} {_SARATHI_SERVE_PARTS[row['metric']]}"
        else:
            continue
        engine = ("yi-34b", "a100-pcie", 2)
        steps.append(_step("Sarathi-Serve artifact", group, what, *engine, shape, row, _SARATHI_SERVE_PARTS))
    return steps


def _splitwise(rows: Iterator[Mapping[str, str]]) -> list[PublishedStep]:
    """Llama-2-70B and BLOOM-176B on A100s: medians of prompt time and of time per token (context: prompt + half)."""
    names = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}
    steps = []
    for row in rows:
        model, tp = names[row["model"]], int(row["tensor_parallel"])
        prompt, size, output = (int(row[k]) for k in ("prompt_tokens_per_request", "batch_size", "output_tokens"))
        what = f"{model} tp{tp} {size} x {prompt} -> {output}"
        timed = {
            "prompt, batch 1" if size == 1 else "prompt, larger batches": (
                "prompt_time_ms_median",
                prefill([prompt] * size),
            ),
            f"token, tp{tp}": ("token_time_ms_median", decode(size, prompt + min(output, 1024) // 2)),
        }
        for group, (column, shape) in timed.items():
            ms = float(row[column])
            steps.append(PublishedStep("Splitwise", f"{model} {group}", what, model, "a100", tp, shape, ms))
    return steps


def _vidur(rows: Iterator[Mapping[str, str]]) -> list[PublishedStep]:
    """Linear layers of one layer, times the layers of the model."""
    names = {"Llama-2-7b-hf": "llama-2-7b", "Llama-2-70b-hf": "llama-2-70b", "Meta-Llama-3-8B": "llama-3-8b"}
    layers = {"llama-2-7b": 32, "llama-2-70b": 80, "llama-3-8b": 32}
    steps = []
    for row in rows:
        model, tokens = names[row["model"].rsplit("/", 1)[-1]], int(row["num_tokens"])
        ms = float(row["linear_sum_ms_per_layer"]) * layers[model]
        size = "up to 64" if tokens <= 64 else "65 to 512" if tokens <= 512 else "above 512"
        tp, what = int(row["tensor_parallel"]), f"{model} tp{row['tensor_parallel']} {tokens} rows"
        group = f"{row['gpu']}, {size} rows"
        steps.append(PublishedStep("Vidur", group, what, model, row["gpu"], tp, prefill([tokens]), ms, "linear"))
    return steps


def _distserve(rows: Iterator[Mapping[str, str]]) -> list[PublishedStep]:
    """OPT models on A100s: lines that their authors fitted to step times of two systems, evaluated at prompts and
    batches of the sizes that their profiler visited. Decodes: one line up to the batch threshold, another beyond."""
    from profiler.measurements.importers.distserve import BATCHES, CONTEXTS, PROMPTS

    steps = []
    for row in rows:
        model, tp, phase = row["model"].rsplit("/", 1)[-1], int(row["tensor_parallel"]), row["phase"]
        a, b, c = (float(row[key]) for key in ("a_ms", "b_ms", "c_ms"))
        threshold = float(row["small_large_batch_threshold"])
        system = "vLLM 0.2.3" if row["system"].startswith("vLLM") else "SwiftTransformer"
        kind = "prefill" if phase == "prefill" else "decode"
        group = f"{system} {model} tp{tp} {kind}"
        shapes: list[tuple[str, BatchShape, float]] = []
        if phase == "prefill":
            shapes += [(f"{n} tokens", prefill([n]), a + b * n + c * n * n) for n in PROMPTS]
        else:
            for size in (size for size in BATCHES if (size <= threshold) == (phase == "decoding_smallbs")):
                shapes += [
                    (f"{size} x {context}", decode(size, context), a + b * size * context + c * size)
                    for context in CONTEXTS
                ]
        for what, shape, ms in shapes:
            steps.append(PublishedStep("DistServe", group, f"{system} {model} {what}", model, "a100", tp, shape, ms))
    return steps


def _step(
    source: str,
    group: str,
    what: str,
    model: str,
    gpu: str,
    tp: int,
    shape: BatchShape,
    row: Mapping[str, str],
    parts: Mapping[str, str] | None = None,
) -> PublishedStep:
    part = parts[row["metric"]] if parts else "iteration"
    return PublishedStep(source, group, what, model, gpu, tp, shape, float(row["value"]), part)


_READERS = {
    "sarathi_table2_step_times.csv": _sarathi_table2,
    "sarathi_fig7_tile_quantisation.csv": _sarathi_fig7,
    "sarathiserve_artifact_step_times.csv": _sarathi_serve,
    "splitwise_a100_step_times.csv": _splitwise,
    "vidur_profile_linear_ops_per_layer.csv": _vidur,
    "distserve_profile_fits.csv": _distserve,
}
