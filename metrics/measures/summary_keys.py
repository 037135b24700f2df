"""Every key of summary.json and what it means: the table in docs/reference/metrics.md is printed from here."""

from __future__ import annotations

from metrics.measures.bubble_causes import CAUSE_NAMES
from metrics.measures.memory_keys import MEMORY_KEYS
from metrics.measures.statistics import STATISTICS
from metrics.run_folder.drafts import SPECULATION_KEYS

LATENCIES = {
    "ttft_s": "time to first token: arrival to first token delivered",
    "tbt_s": "gap between two deliveries to a request, of one token each or, with speculation, of several; a preempted "
    "request's wait for its next token is one of them",
    "tpot_s": "(E2E - TTFT) / (output tokens - 1) of a request with at least two tokens",
    "e2e_s": "arrival to last token",
    "normalized_latency_s": "E2E / output tokens",
    "scheduling_delay_s": "arrival to being planned for the first time",
}
"""Latencies of measured, finished requests in seconds, each with mean, p50, p90, p95, p99 and max."""

ITERATION_TIME = {"iteration_s": "stage 0 begins to tokens delivered, of each iteration in the window"}

_STATISTIC_WORDS = {"mean": "mean", "max": "largest", **{s: f"{s[1:]}th percentile" for s in STATISTICS if s[0] == "p"}}


def _families() -> dict[str, str]:
    return {
        f"{name}_{statistic}": f"{_STATISTIC_WORDS[statistic]}: {meaning}"
        for name, meaning in (LATENCIES | ITERATION_TIME).items()
        for statistic in STATISTICS
    }


BASIS = ("calibrated", "measured_share", "cost_basis")
"""Keys that say what the costs of a run rest on."""

SUMMARY_KEYS: dict[str, str] = {
    "world": "simulated or live",
    "policy": "scheduling policy",
    "model": "model",
    "gpu": "device",
    "cost_model": "where the costs came from (simulated runs)",
    "calibrated": "true: 90 % of the predicted time or more comes from measured operators",
    "measured_share": "share of the predicted time from measured operators: the batch lies inside a cell of the "
    "operator's measured grid (null for a live run)",
    "cost_basis": "the same in words, with the operators that were extrapolated or assumed",
    "requests": "requests of the trace; always finished + rejected + failed + aborted",
    "finished": "requests that got all their tokens",
    "rejected": "requests that could never run, each with its reason in requests.parquet",
    "failed": "requests that a failure ended",
    "aborted": "requests that the client gave up on, or that timed out",
    "warmup_requests": "requests left out of the statistics because they arrived in the warm-up",
    "measured": "requests that the statistics are about (of any end)",
    "measured_finished": "measured requests that finished; latencies are theirs",
    "window_start_s": "start of the measured window: end of the warm-up, or the first arrival",
    "window_end_s": "end of the measured window: the last end of any request",
    "duration_s": "length of the measured window",
    "overloaded": "the queueing delay grows without end: more arrives than is served",
    "load": "arrivals over service as that growth implies it (null unless overloaded)",
    **_families(),
    "stall_bound_s": "a TBT above this is a stall",
    "stalls": "stalls of measured, finished requests",
    "stall_s_total": "their lengths added up",
    "stall_s_longest": "the longest of them (0 if there is none)",
    "stalled_requests": "measured, finished requests with at least one stall",
    "requests_per_s": "requests finished in the window / its length",
    "output_tokens_per_s": "output tokens delivered in the window / its length",
    "total_tokens_per_s": "the same plus the prompts of requests whose first token fell into the window",
    "slo": "the objective (null if none was given)",
    "slo_met": "whether the run's statistics (or each SLO class's) stay within every bound (null without an objective)",
    "slo_attainment": "share of measured requests with an objective that finished and meet all its bounds themselves",
    "goodput_requests_per_s": "measured requests that meet every bound themselves / window length",
    "fairness_jain": "Jain's index over output tokens / E2E of measured, finished requests (1: all served alike)",
    "tenants": "tenants of the run (null if no request names one)",
    "fairness_jain_tenants": "Jain's index over the weighted tokens given to each tenant (1: all were given the same)",
    "light_tenants_ttft_s_p99": "99th percentile of TTFT over tenants that asked for less than an equal share",
    "programs": "programs of the run, or sessions where the trace names none (null if there is neither)",
    "programs_finished": "programs whose calls all finished",
    "program_s_mean": "first arrival to last end of a program whose calls all finished, waits for tools included: mean",
    "program_s_p50": "the same: 50th percentile",
    "program_s_p90": "the same: 90th percentile",
    "program_s_p99": "the same: 99th percentile",
    "preemptions": "times that a measured request was thrown back to the queue",
    "preempted_requests": "measured requests to which that happened",
    "prompt_tokens": "prompt tokens of measured requests",
    "output_tokens": "output tokens delivered to measured requests",
    "cached_tokens": "prompt tokens of measured requests found in the prefix cache on the first admission",
    "cached_share": "cached_tokens / prompt_tokens",
    "pd_ratio": "P:D of the whole trace: prompt tokens / output tokens delivered",
    "pd_optimum": "P:D at which every chunk finds its decodes: (C - (B - 1)) / (B - 1) for chunk size C and B slots",
    "iterations": "iterations in the window",
    "tokens_per_iteration": "mean of prefill and decode tokens per iteration",
    "decodes_per_iteration": "mean of decodes per iteration",
    "chunk_tokens_total": "prefill tokens computed in the window, recomputation after preemption included",
    "token_budget": "most tokens of one batch (null if unlimited or unknown)",
    "token_budget_use": "mean of (prefill + decode tokens) / token_budget",
    "dummy_tokens": "padding rows planned by the policy in the window",
    "dummy_share": "dummy_tokens / (prefill + decode + dummy tokens)",
    "graph_padding_rows": "rows executed beyond tokens and dummies, to fill up a captured graph",
    "activated_experts_mean": "experts that an iteration's rows went to, mean over layers with experts and over "
    "iterations: counted live, expected in a simulation (null for dense models, or where costs do not say)",
    "activated_experts_max": "the same of the iteration with most of them",
    "running_mean": "requests admitted, weighted by time while batches are in flight",
    "running_max": "most requests admitted at once",
    "waiting_mean": "requests queued, weighted by time while batches are in flight",
    "waiting_max": "most requests queued at once",
    "kv_blocks": "KV blocks of one replica (null if unknown)",
    "kv_use_mean": "share of KV blocks in use, weighted by time while batches are in flight",
    "kv_use_max": "largest share of KV blocks in use",
    **MEMORY_KEYS,
    **SPECULATION_KEYS,
    "host_s_total": "host time before and after the iterations of the window",
    "device_s_total": "device time of the iterations of the window, summed over stages",
    "device_busy_share": "busy time of the stages in the window / time that stages of any replica were there in it",
    "inside_share": "share of iterations whose shape lies in the cost model's measured region; null for a live run "
    "and a roofline",
    "bubble_share": "share of stage time in flight in which a stage idles (null without a pipeline, or ranks that step "
    "together)",
    **{f"bubble_share_{cause}": f"the part of bubble_share due to {name}" for cause, name in CAUSE_NAMES.items()},
    "lost_device_s": "device-seconds lost in bubbles",
    "ranks": "data-parallel ranks of a replica (null without ranks, like the keys that follow)",
    "rank_waiting_share": "share of step time that ranks wait for a slower one (0 where they do not step together)",
    "rank_waiting_share_max": "the same of the rank that waits most",
    "rank_dummy_share": "share of all ranks' steps that are dummies, without a request of their own",
    "rank_imbalance": "tokens of the busiest rank / mean of all ranks that ran anything (1: even)",
    "mfu": "useful FLOPs / (peak FLOP/s x device-seconds in the window); null unless work and peaks were given",
    "mfu_busy": "the same over the time that the devices were busy",
    "mbu": "bytes that have to be moved / (peak bytes/s x device-seconds in the window); null unless given",
    "mbu_busy": "the same over the time that the devices were busy",
}
"""Key -> meaning, in the order of summary.json. Seconds, tokens, requests or shares of 1, as the name says."""


def keys_table() -> str:
    """SUMMARY_KEYS as a Markdown table; one row for the six statistics of a latency."""
    rows = ["| key | meaning |", "|---|---|"]
    families = LATENCIES | ITERATION_TIME
    for key, meaning in SUMMARY_KEYS.items():
        family = next(
            (name for name in families if key.startswith(f"{name}_") and key[len(name) + 1 :] in STATISTICS), ""
        )
        if not family:
            rows.append(f"| `{key}` | {meaning} |")
        elif key == f"{family}_mean":
            names = ", ".join(f"`{family}_{s}`" for s in STATISTICS)
            rows.append(f"| {names} | {families[family]} |")
    return "\n".join(rows)
