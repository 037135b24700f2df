"""A recorded vLLM serving run: its requests and its log, and the engine settings that a replay has to share.

The form is that of LLMServingSim's bench: requests.jsonl, timeseries.csv (one line a second) and meta.json in one
folder, GPU/MODEL by name; or that of the runs which the project carries: requests.parquet (arrival_s, scheduled_s,
first_token_s, last_token_s, prompt_tokens, output_tokens) and seconds.parquet beside meta.json.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.errors import ExperimentError
from policies.edges.input_file import checked_file, read_json

if TYPE_CHECKING:
    import pandas as pd

    from workloads import Trace

Column = NDArray[np.float64]

CARRIED = "requests.parquet"
NULL_BLOCKS = 1
"""vLLM keeps one block of its pool as the null block."""


@dataclass(frozen=True)
class VllmRun:
    """What was measured: seconds since the first request was queued.

    requests: queued_s, scheduled_s, first_s, last_s, prompt, output. log: t, running, waiting, kv_cache_pct and
    throughputs, one row a second.
    """

    folder: Path
    meta: dict[str, Any]
    requests: pd.DataFrame
    log: pd.DataFrame

    @property
    def name(self) -> str:
        folder = self.folder.absolute()
        return f"{folder.parent.name}/{folder.name}"

    @property
    def gpu(self) -> str:
        """Device name as recorded, or the folder that the run lies in (GPU/MODEL)."""
        return str((self.meta.get("hardware") or {}).get("device_name") or self.folder.absolute().parent.name)

    @property
    def latencies(self) -> dict[str, Column]:
        """Seconds: TTFT, E2E of every request, measured from the moment the engine queued it, and TPOT of those with
        two tokens or more (vLLM's own benchmark leaves the others out of its TPOT, too)."""
        r = self.requests
        first, last, queued = (r[key].to_numpy(float) for key in ("first_s", "last_s", "queued_s"))
        later = r["output"].to_numpy(float) - 1
        more = later > 0
        return {"ttft": first - queued, "tpot": (last - first)[more] / later[more], "e2e": last - queued}

    def trace(self) -> Trace:
        """The run's requests as they arrived."""
        from workloads import read_trace

        carried = self.folder / CARRIED
        return (
            read_trace(carried) if carried.exists() else read_trace(self.folder / "requests.jsonl", trace_format="vllm")
        )

    def resolved(self, section: str, key: str, default: Any) -> Any:
        """A value of the engine's resolved configuration, or the default where the run did not record it."""
        return ((self.meta.get("resolved_config") or {}).get(section) or {}).get(key, default)

    def settings(self) -> dict[str, Any]:
        """`replay` options that this engine ran with; what was not recorded is vLLM's default."""
        asked = self.meta.get("engine_kwargs") or {}
        cache = self.meta.get("kv_cache") or {}
        blocks = cache.get("num_gpu_blocks")
        tensor_parallel = int(asked.get("tensor_parallel_size") or 1)
        return {
            "policy": "vllm_v1",
            "tp": tensor_parallel,
            "dp": int(asked.get("data_parallel_size") or 1),
            "ep": bool(asked.get("enable_expert_parallel") or False),
            "max_num_seqs": int(asked.get("max_num_seqs") or self.resolved("scheduler_config", "max_num_seqs", 256)),
            "token_budget": int(
                asked.get("max_num_batched_tokens") or self.resolved("scheduler_config", "max_num_batched_tokens", 2048)
            ),
            "max_model_len": asked.get("max_model_len") or self.resolved("model_config", "max_model_len", None),
            "num_blocks": blocks - NULL_BLOCKS if blocks else None,
            "block_size": int(cache.get("block_size") or 16),
            "gpu_memory_utilization": float(cache.get("gpu_memory_utilization") or 0.9),
            "prefix_caching": bool(cache.get("enable_prefix_caching", True)),
            "async_scheduling": bool(self.resolved("scheduler_config", "async_scheduling", True)),
            "reserve_full": bool(self.resolved("scheduler_config", "scheduler_reserve_full_isl", True)),
            "long_prefill_token_threshold": int(
                self.resolved("scheduler_config", "long_prefill_token_threshold", 0) or 0
            ),
            "free_order": "0.19" if self.version < (0, 20) else "0.32",
        }

    @property
    def version(self) -> tuple[int, int]:
        found = re.match(r"(\d{1,9})\.(\d{1,9})", str(self.meta.get("vllm_version", "")))
        return (int(found[1]), int(found[2])) if found else (0, 19)

    @property
    def largest_graph(self) -> int:
        """Rows of the largest captured CUDA graph; 0 where the engine ran eagerly.

        Where it was not recorded: vLLM captures up to twice max_num_seqs, at most 512.
        """
        if self.resolved("model_config", "enforce_eager", False):
            return 0
        usual = min(512, 2 * self.settings()["max_num_seqs"])
        return int(self.resolved("compilation_config", "max_cudagraph_capture_size", usual) or 0)

    def steps_at(self, seconds: Column) -> Column:
        """Steps that a request running all the time has made by `seconds`, from the log's tokens and running
        requests."""
        running = self.log["running"].to_numpy(float)
        mean = (running + np.concatenate([[0.0], running[:-1]])) / 2
        made = np.cumsum(self.log["gen_throughput"].to_numpy(float) / np.maximum(mean, 1.0))
        times = np.concatenate([[0.0], self.log["t"].to_numpy(float)])
        return np.interp(seconds, times, np.concatenate([[0.0], made]))

    def overcommitted(self) -> tuple[float, int]:
        """(second, blocks): by how much the running requests' tokens exceed the pool at the log's worst second.

        Only seconds count at which every request between its first schedule and its last token is running, so that
        none is preempted. More than a few blocks can only mean that prompts share prefixes in the cache.
        """
        blocks = (self.meta.get("kv_cache") or {}).get("num_gpu_blocks")
        size = int((self.meta.get("kv_cache") or {}).get("block_size") or 16)
        worst = (0.0, 0)
        if not blocks:
            return worst
        r = self.requests
        scheduled, first, last = (r[key].to_numpy(float) for key in ("scheduled_s", "first_s", "last_s"))
        prompt, output = r["prompt"].to_numpy(float), r["output"].to_numpy(float)
        for t, running in zip(self.log["t"].to_numpy(float), self.log["running"].to_numpy(int), strict=True):
            here = (scheduled < t) & (last > t)
            if here.sum() != running or (first[here] >= t).any():
                continue
            made = output[here] - (self.steps_at(last[here]) - self.steps_at(np.full(running, t)))
            needed = np.ceil((prompt[here] + np.maximum(made, 0)) / size).sum() - (blocks - NULL_BLOCKS)
            if needed > worst[1]:
                worst = (float(t), int(needed))
        return worst


def read_vllm_run(folder: str | Path) -> VllmRun:
    """Read GPU/MODEL/{requests.jsonl,timeseries.csv,meta.json}, or a carried run; raises ExperimentError."""
    import pandas as pd

    folder = Path(folder)
    if (folder / CARRIED).exists():
        return _carried_run(folder)
    try:
        meta = read_json(folder / "meta.json", ExperimentError)
        requests = pd.read_json(checked_file(folder / "requests.jsonl", ExperimentError), lines=True)
        log = pd.read_csv(checked_file(folder / "timeseries.csv", ExperimentError))
    except ExperimentError as error:
        raise ExperimentError(f"{error}; a run has requests.jsonl, timeseries.csv and meta.json") from None
    except (OSError, ValueError) as error:
        raise ExperimentError(f"{folder}: cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(meta, dict):
        raise ExperimentError(f"{folder}/meta.json: found no settings, expected a JSON object")
    wanted = {"input_toks": "prompt", "output_toks": "output"}
    times = {"queued_ts": "queued_s", "scheduled_ts": "scheduled_s"}
    times |= {"first_token_ts": "first_s", "last_token_ts": "last_s"}
    for column in (*wanted, *times):
        if column not in requests or not pd.api.types.is_numeric_dtype(requests[column]):
            raise ExperimentError(f"{folder}/requests.jsonl: {column}: not found or not numeric in every line")
    unfinished = requests[list(times)].isna()
    if unfinished.any(axis=None):
        row = int(unfinished.any(axis=1).to_numpy().argmax())
        column = str(unfinished.columns[unfinished.iloc[row]][0])
        raise ExperimentError(
            f"{folder}/requests.jsonl: row {row + 1}: {column}: found none, expected a time: leave out requests that "
            "did not finish"
        )
    for column in ("t", "gen_throughput", "running", "waiting", "kv_cache_pct"):
        if column not in log:
            raise ExperimentError(f"{folder}/timeseries.csv: missing column {column}, found {', '.join(log)}")
    requests = requests.sort_values("queued_ts", kind="stable", ignore_index=True)
    start = requests["queued_ts"].min()
    for column in times:
        requests[column] = requests[column] - start
    return VllmRun(folder, meta, requests.rename(columns={**wanted, **times}), log)


def _carried_run(folder: Path) -> VllmRun:
    from profiler.errors import ProfileError
    from profiler.measurements.bounded_parquet import read_parquet

    try:
        requests = read_parquet(folder / CARRIED).to_pandas()
        log = read_parquet(folder / "seconds.parquet").to_pandas()
    except ProfileError as error:
        raise ExperimentError(str(error)) from None
    meta = read_json(folder / "meta.json", ExperimentError)
    names = {
        "prompt_tokens": "prompt",
        "output_tokens": "output",
        "arrival_s": "queued_s",
        "first_token_s": "first_s",
        "last_token_s": "last_s",
    }
    for column in (*names, "scheduled_s"):
        if column not in requests or requests[column].isna().any():
            raise ExperimentError(f"{folder / CARRIED}: {column}: not found, or not in every row")
    requests = requests.sort_values("arrival_s", kind="stable", ignore_index=True)
    return VllmRun(folder, meta, requests.rename(columns=names), log)
