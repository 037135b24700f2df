"""Makes the tables of measurements that travel with the project: `python docs/facts.py SOURCE`, and, for live runs of
the project's own executor, `python docs/facts.py live NAME FOLDER` with the folder of a whole `experiments validate`.

SOURCE is a folder with the public originals in their own forms (paths as below). What is written is in Charioteer's
forms only: profiles, traces, tables of runs, steps and figures. profiler/data/facts/sources.toml says of every table
where it comes from, under which licence, and what was left out; tests/originals holds a few rows of each original, in
its own form, for the tests of the readers.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from profiler.measurements.importers import import_profile  # noqa: E402
from profiler.measurements.profile import Profile, chunk_text, write_profile  # noqa: E402
from workloads import Trace, read_trace, write_trace  # noqa: E402

FACTS = ROOT / "profiler" / "data" / "facts"
ORIGINALS = ROOT / "tests" / "originals"

PROFILES = {
    "rtx4090_llama-3.1-8b": ("llmservingsim", "llmservingsim/RTX4090/Llama-3.1-8B"),
    "rtxpro6000_llama-3.1-8b": ("llmservingsim", "llmservingsim/RTXPRO6000/Llama-3.1-8B"),
    "rtxpro6000_qwen3-32b": ("llmservingsim", "llmservingsim/RTXPRO6000/Qwen3-32B"),
    "a6000_llama-3.1-8b": ("llmservingsim-v0", "llmservingsim/v0/A6000/meta-llama/Llama-3.1-8B"),
    "a100": ("aiconfigurator", "aiconfigurator/a100_sxm"),
    "h100": ("aiconfigurator", "aiconfigurator/h100_sxm"),
    "h200": ("aiconfigurator", "aiconfigurator/h200_sxm"),
}
RUNS = ("RTX4090/Llama-3.1-8B", "RTXPRO6000/Llama-3.1-8B", "RTXPRO6000/Qwen3-32B")
SPECULATING_STEP_LOGS = ("spec_b512", "spec_preempt_b512_k90")
STEP_LOGS = ("fp32_t2q_512", "nano_rate2_512", "preempt_b512_k250", "preempt_cache_b512_k250")


def main(source: Path) -> None:
    for name, (kind, folder) in PROFILES.items():
        profile(import_profile(kind, source / "profiles" / folder), FACTS / "profiles" / f"{name}.parquet")
    for name in RUNS:
        vllm_run(source / "traces/vllm_runs" / name, FACTS / "vllm_runs" / name)
    for name in STEP_LOGS:
        for kind in ("steps", "reqs"):
            step_log(source / f"vllm_cpu_steps/{kind}_{name}.jsonl", FACTS / f"vllm_cpu_steps/{kind}_{name}.parquet")
    for name in SPECULATING_STEP_LOGS:
        for kind in ("steps", "reqs"):
            log = source / f"vllm_cpu_spec_steps/{kind}_{name}.jsonl"
            step_log(log, FACTS / f"vllm_cpu_steps/{kind}_{name}.parquet")
    for name in ("conv", "code"):
        trace(read_trace(source / f"traces/azure2023/AzureLLMInferenceTrace_{name}.csv"), f"azure2023_{name}")
    trace(read_trace(source / "traces/mooncake/conversation_trace.jsonl"), "mooncake_conversation")
    agent_sessions(source / "traces/agentic")
    paper_figures(source / "groundtruth")
    originals(source)
    size = sum(path.stat().st_size for path in FACTS.rglob("*") if path.is_file())
    print(f"{FACTS.relative_to(ROOT)}: {size / 1e6:.1f} MB")


def parquet(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, compression="zstd", compression_level=19)


def profile(found: Profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_profile(found, path)
    parquet(pq.read_table(path), path)


def trace(found: Trace, name: str) -> None:
    path = FACTS / "traces" / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_trace(found, path)
    parquet(pq.read_table(path), path)


KEPT_OF_A_RUN = {
    "model_config": ("max_model_len", "enforce_eager", "dtype"),
    "scheduler_config": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "async_scheduling",
        "scheduler_reserve_full_isl",
        "long_prefill_token_threshold",
        "enable_chunked_prefill",
        "policy",
        "stream_interval",
    ),
    "compilation_config": ("max_cudagraph_capture_size",),
    "parallel_config": ("tensor_parallel_size", "disable_custom_all_reduce"),
}


def vllm_run(folder: Path, out: Path) -> None:
    """Request times in seconds since the first was queued; of the engine's resolved settings what a replay can use."""
    rows = pd.read_json(folder / "requests.jsonl", lines=True)
    start = rows["queued_ts"].min()
    table = pd.DataFrame(
        {
            "arrival_s": rows["queued_ts"] - start,
            "prompt_tokens": rows["input_toks"],
            "output_tokens": rows["output_toks"],
            "scheduled_s": rows["scheduled_ts"] - start,
            "first_token_s": rows["first_token_ts"] - start,
            "last_token_s": rows["last_token_ts"] - start,
        }
    )
    parquet(pa.Table.from_pandas(table, preserve_index=False), out / "requests.parquet")
    seconds = pd.read_csv(folder / "timeseries.csv")
    parquet(pa.Table.from_pandas(seconds, preserve_index=False), out / "seconds.parquet")
    meta = json.loads((folder / "meta.json").read_text())
    kept = {
        key: meta[key]
        for key in ("model", "vllm_version", "engine_kwargs", "num_requests", "kv_cache", "hardware")
        if key in meta
    }
    resolved = meta.get("resolved_config", {})
    kept["resolved_config"] = {
        section: {key: resolved[section][key] for key in keys}
        for section, keys in KEPT_OF_A_RUN.items()
        if section in resolved
    }
    (out / "meta.json").write_text(json.dumps(kept, indent=1) + "\n")


def step_log(source: Path, path: Path) -> None:
    """The lines as columns; ids become numbers."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    for row in rows:
        if "reqs" in row:
            row["reqs"] = [[int(name), *rest] for name, *rest in row["reqs"]]
    unused = {"i", "nivcsw", "n_prefill", "prefill_tokens", "n_decode", "decode_ctx"}
    parquet(pa.Table.from_pylist([{key: row[key] for key in row if key not in unused} for row in rows]), path)


def agent_sessions(folder: Path) -> None:
    """All sessions. Block ids are local to a session, so each gets a range of its own."""
    sessions = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    rows = []
    offset = 0
    for session in sorted(sessions, key=lambda session: session["id"]):
        for turn, one in enumerate(session["requests"]):
            rows.append(
                {
                    "arrival_s": one["t"],
                    "prompt_tokens": one["in"],
                    "output_tokens": one["out"],
                    "session": session["id"],
                    "turn": turn,
                    "think_s": one.get("think_time"),
                    "api_s": one.get("api_time"),
                    "prefix_hashes": [offset + name for name in one["hash_ids"]],
                    "hash_tokens": session["block_size"],
                }
            )
        offset += 1 + max(name for one in session["requests"] for name in one["hash_ids"])
    rows.sort(key=lambda row: (row["arrival_s"], row["session"]))
    parquet(pa.Table.from_pylist(rows), FACTS / "traces" / "agent_sessions.parquet")


FIGURES = ("sarathi_*.csv", "sarathiserve_artifact_step_times.csv", "sarathiserve_tables1-3_setup.csv")
COLUMNS = (
    "paper",
    "model",
    "gpu",
    "parallelism",
    "batch_or_workload",
    "metric",
    "value",
    "unit",
    "source_loc",
    "address",
    "seen",
)


def paper_figures(folder: Path) -> None:
    """One row a number that a paper or an artifact prints; and one row a step of their step times."""
    rows = []
    for pattern in FIGURES:
        for path in sorted(folder.glob(pattern)):
            with path.open(newline="", encoding="utf-8") as lines:
                rows += [{name: row[name] for name in COLUMNS} for row in csv.DictReader(lines)]
    names = {"batch_or_workload": "workload", "source_loc": "place"}
    write_csv(FACTS / "paper_figures.csv", [{names.get(key, key): value for key, value in row.items()} for row in rows])
    from published_forms import published_steps

    steps = published_steps(folder)
    write_csv(FACTS / "published_steps.csv", [step_row(step) for step in steps])
    tokens = pd.read_csv(folder / "sarathiserve_fig1a_output_tokens_vs_time.csv")
    parquet(pa.Table.from_pandas(tokens, preserve_index=False), FACTS / "sarathiserve_fig1a.parquet")


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def step_row(step: Any) -> dict[str, Any]:
    shape = step.shape
    return {
        "source": step.source,
        "group": step.group,
        "what": step.what,
        "model": step.model,
        "gpu": step.gpu,
        "tp": step.tp,
        "part": step.part,
        "chunks": chunk_text(shape.chunks),
        "decodes": shape.decodes,
        "context_total": shape.decode_context_total,
        "context_max": shape.decode_context_max,
        "sampled": shape.sampled,
        "measured_ms": step.measured_ms,
    }


def originals(source: Path) -> None:
    """A few rows of each original, as it comes."""
    traces, profiles = source / "traces", source / "profiles"
    first_lines(traces / "azure2023/AzureLLMInferenceTrace_conv.csv", 201)
    first_lines(traces / "azure2023/vidur_splitwise_conv.csv", 201)
    first_lines(traces / "mooncake/conversation_trace.jsonl", 300)
    first_lines(traces / "lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv", 601)
    run = traces / "vllm_runs/RTXPRO6000/Llama-3.1-8B"
    first_lines(run / "requests.jsonl", 40)
    first_lines(run / "timeseries.csv", 1000)
    first_lines(run / "meta.json", 1000)
    first_lines(source / "vllm_cpu_steps/reqs_fp32_t2q_512.jsonl", 1000)
    first_lines(source / "vllm_cpu_steps/steps_fp32_t2q_512.jsonl", 40)
    first_lines(source / "groundtruth/distserve_profile_fits.csv", 1000)
    some_rows(
        source / "groundtruth/splitwise_a100_repeats.csv",
        "model == 'llama2-70b' and tensor_parallel == 2 and prompt_size <= 512 and batch_size == 1",
    )
    some_columns(source / "hardware.csv", HARDWARE)
    some_columns(source / "model_shapes.csv", SHAPES)
    for client in ("chunk-1", "chunk-11"):
        servegen_client(traces / "servegen_r1", client)
    grid = "n_decode == 0 or (prefill_chunk in (0, 16, 512) and kv_prefill in (0, 2048) and n_decode in (1, 2, 16, 64))"
    skew = "n in (2, 16) and pc in (0, 512) and kp in (0, 2048)"
    for card, degrees in (("RTX4090", (1,)), ("RTXPRO6000", (1, 2))):
        folder = profiles / "llmservingsim" / card / "Llama-3.1-8B"
        first_lines(folder / "meta.yaml", 1000)
        for degree in degrees:
            first_lines(folder / f"tp{degree}/dense.csv", 10_000)
            first_lines(folder / f"tp{degree}/per_sequence.csv", 10_000)
            some_rows(folder / f"tp{degree}/attention.csv", grid)
            some_rows(folder / f"tp{degree}/skew.csv", skew, every=8)
    old = profiles / "llmservingsim/v0/A6000/meta-llama/Llama-3.1-8B/tp1"
    some_rows(old / "layers.csv", "input in (1, 2, 16, 128)")
    some_rows(
        old / "attention.csv",
        "(batch_size in (1, 2) or 90 <= batch_size <= 96) and kv_cache_size <= 3072 and prefill_chunk_size <= 32",
    )
    a100 = profiles / "aiconfigurator/a100_sxm"
    some_rows(a100 / "gemm_perf.parquet", "n == 65536 and k == 4096")
    some_rows(a100 / "context_attention_perf.parquet", "num_heads == 32 and num_key_value_heads == 8")
    some_rows(a100 / "generation_attention_perf.parquet", "num_heads == 32 and num_key_value_heads == 8")
    some_rows(a100 / "custom_allreduce_perf.parquet", "message_size > 0")


HARDWARE = (
    "gpu", "bf16_dense_tflops", "memory_bw_GBps", "capacity_GB_nominal", "gpu_link_GBps_bidirectional",
)  # fmt: skip
SHAPES = (
    "model", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_position",
    "sliding_window", "params_computed", "kv_bytes_per_token_16bit",
)  # fmt: skip
SOURCE = Path()


def _out(path: Path) -> Path:
    out = ORIGINALS / path.relative_to(SOURCE)
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def first_lines(path: Path, count: int) -> None:
    """Bytes as they are, line ends included."""
    with path.open("rb") as file:
        _out(path).write_bytes(b"".join(file.readline() for _ in range(count)))


def some_rows(path: Path, condition: str, every: int = 1) -> None:
    out = _out(path)
    if path.suffix == ".parquet":
        kept = pd.read_parquet(path).query(condition)
        parquet(pa.Table.from_pandas(kept, preserve_index=False), out)
        return
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    numbers = pd.read_csv(path)
    kept = table.loc[numbers.query(condition).index[::every]]
    kept.to_csv(out, index=False, lineterminator="\n")


def some_columns(path: Path, columns: tuple[str, ...]) -> None:
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    table[list(columns)].to_csv(_out(path), index=False, lineterminator="\n")


HOURS = (61_200, 72_000)


def servegen_client(folder: Path, client: str) -> None:
    """One client's windows of three hours."""
    path = folder / f"{client}-trace.csv"
    rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept_rows = [row for row in rows if HOURS[0] <= float(row.partition(",")[0]) < HOURS[1]]
    _out(path).write_text("".join(kept_rows), encoding="utf-8")
    histograms = json.loads((folder / f"{client}-dataset.json").read_text())
    kept = {key: value for key, value in histograms.items() if HOURS[0] <= float(key) < HOURS[1]}
    _out(folder / f"{client}-dataset.json").write_text(json.dumps(kept))


LIVE = ("ttft_s_mean", "tpot_s_mean", "e2e_s_mean", "e2e_s_p90", "output_tokens_per_s")


def live_study(name: str, folder: Path) -> None:
    """Statistics of every live run, the traces as they were served, and the costs fitted before."""
    out = FACTS / "live_runs" / name
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for load in sorted(folder.glob("load-*")):
        at = load.name.removeprefix("load-")
        for run in sorted((load / "live").glob("*/summary.json")):
            config, summary = (json.loads((run.parent / file).read_text()) for file in ("config.json", "summary.json"))
            policy, _, repeat = run.parent.name.rpartition("-")
            assert config["world"] == "live"
            rows.append(
                {"load": at, "policy": policy, "repeat": repeat, **{key: f"{summary[key]:.6g}" for key in LIVE}}
            )
        any_run = next((load / "simulated").glob("*/requests.parquet"))
        requests = pd.read_parquet(any_run).sort_values("request")
        requests[["arrival_s", "prompt_tokens", "output_tokens"]].to_csv(out / f"trace-{at}.csv", index=False)
        used = json.loads((any_run.parent / "config.json").read_text())["replay"]
    write_csv(out / "live.csv", rows)
    keys = ("model", "dtype", "max_num_seqs", "max_model_len", "block_size", "num_blocks", "token_budget", "seed")
    study = {"replay": {key: used[key] for key in keys}, "note": ""}
    (out / "study.json").write_text(json.dumps(study, indent=1) + "\n")
    for file in ("model.json", "device.toml"):
        (out / file).write_text((folder / file).read_text())


if __name__ == "__main__":
    if sys.argv[1:2] == ["live"] and len(sys.argv) == 4:
        live_study(sys.argv[2], Path(sys.argv[3]))
        raise SystemExit
    if len(sys.argv) != 2:
        raise SystemExit("python docs/facts.py SOURCE, or python docs/facts.py live NAME FOLDER")
    SOURCE = Path(sys.argv[1])
    main(SOURCE)
