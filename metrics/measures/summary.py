"""A run in one flat dictionary, computed from its tables alone: every number can be rebuilt from the run folder.

Latencies are those of measured requests that finished; whatever ended otherwise is counted, and counts against the
SLO. Throughput is what the machine delivered in the measured window, to requests of the warm-up too. What each key
means stands in `metrics.measures.summary_keys.SUMMARY_KEYS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrics.measures.latencies import own_latencies
from metrics.measures.memory_keys import memory_summary
from metrics.measures.ranks import met_ns, rank_summary
from metrics.measures.replica_presence import Presence, fleet, stage_seconds
from metrics.measures.slo import Bound, parse_slo, parse_warmup, requests_within
from metrics.measures.statistics import jain_index, percentiles, statistics
from metrics.measures.steady_state import steady_state
from metrics.measures.summary_keys import LATENCIES, SUMMARY_KEYS
from metrics.measures.tenants import program_summary, tenant_summary
from metrics.measures.token_times import TokenTimes
from metrics.measures.utilisation import Work, utilisation
from metrics.measures.windows import held_ns, share_inside
from metrics.run_folder.columns import STATUSES, MetricsError
from metrics.run_folder.drafts import speculation_summary
from metrics.run_folder.tables import RunTables

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

Ints = NDArray[np.int64]

STALL_BOUND_S = 0.2
_WHOLE_DEFAULTS: dict[str, Any] = {
    "warmup": 0, "stall_bound_s": STALL_BOUND_S, "peaks": None, "model_flops": None, "model_bytes": None,
}  # fmt: skip


def summarise(
    run: RunTables,
    *,
    warmup: int | str = 0,
    slo: str | Mapping[str, str] | None = None,
    stall_bound_s: float = STALL_BOUND_S,
    peaks: Mapping[str, float] | None = None,
    model_flops: Work | None = None,
    model_bytes: Work | None = None,
    wanted: Bools | None = None,
) -> dict[str, Any]:
    """The summary of a run.

    warmup: left out of the statistics: a number of requests (in order of arrival), seconds as "30s", or "auto" for
        where `metrics.measures.steady_state` finds that the run has settled.
    slo: such as `ttft_p99=2,tbt_p99=0.2`, or one per SLO class (column `slo` of the requests).
    peaks: peak_flops, peak_bytes_per_s (of one device) and devices, for MFU and MBU.
    model_flops, model_bytes: work per iteration, see `metrics.measures.utilisation`.
    wanted: one flag per row of the requests table: only these are counted, measured and in the throughput.

    Options left out are taken from the run's config where it has them: token_budget, num_blocks, chunk_size, slots,
    peaks, model_flops, model_bytes.
    """
    whole = _Whole(run, warmup, stall_bound_s, peaks, model_flops, model_bytes)
    everybody = np.arange(len(whole.measured))
    if wanted is None:
        return whole.summary_of(everybody, whole.tokens, slo)
    rows = everybody[wanted]
    return whole.summary_of(rows, next(whole.tokens.split([rows])), slo)


class _Whole:
    """What the summaries of all parts of a run have in common, worked out once."""

    def __init__(
        self,
        run: RunTables,
        warmup: int | str,
        stall_bound_s: float,
        peaks: Mapping[str, float] | None,
        model_flops: Work | None,
        model_bytes: Work | None,
    ) -> None:
        config = self.config = run.config
        requests = self.requests = _requests(run)
        self.stall_bound_s = stall_bound_s
        self.tokens = TokenTimes(run)
        _nobody_lost_a_token(requests, self.tokens)
        steady = steady_state(run)
        if warmup == "auto":
            # Where no steady part was found nothing is left out: `overloaded` says why.
            warmup = f"{float(np.min(requests['arrival_s'])) + steady.warmup_s:.9f}s" if steady.warmup_s > 0 else 0
        self.start_s, self.measured = _window(requests, warmup)
        self.end_s = float(np.max(requests["finished_s"], initial=self.start_s))
        stays = fleet(run, None if peaks is None else peaks.get("devices", 1))
        # Of the run itself, whichever of its requests are looked at.
        self.of_run: dict[str, Any] = {
            **{key: _name(config.get(key)) for key in ("world", "policy", "model", "gpu", "cost_model")},
            **_evidence(config),
            "window_start_s": self.start_s,
            "window_end_s": self.end_s,
            "duration_s": self.end_s - self.start_s,
            "overloaded": steady.overloaded,
            "load": steady.load if steady.overloaded else None,
            "pd_ratio": _ratio(int(requests["prompt_tokens"].sum()), int(requests["output_tokens"].sum())),
            **_iterations(run, config, stays, self.start_s, self.end_s),
            "pd_optimum": pd_optimum(_setting(config, "chunk_size"), _setting(config, "slots")),
            **utilisation(
                run,
                stays,
                self.start_s,
                self.end_s,
                peaks or config.get("peaks"),
                model_flops if model_flops is not None else config.get("model_flops"),
                model_bytes if model_bytes is not None else config.get("model_bytes"),
            ),
            **_bubbles(run),
            **tenant_summary(run),
            **program_summary(run),
            **rank_summary(run),
        }

    def summary_of(self, rows: Ints, tokens: TokenTimes, slo: str | Mapping[str, str] | None) -> dict[str, Any]:
        """The summary of some requests, by their rows; tokens: theirs alone."""
        requests = {name: column[rows] for name, column in self.requests.items()}
        measured = self.measured[rows]
        counted = np.ones(len(rows), dtype=bool)
        finished = measured & (requests["status"] == "finished")
        own = own_latencies(requests, finished)
        summary: dict[str, Any] = dict.fromkeys(SUMMARY_KEYS)
        summary.update(
            self.of_run,
            requests=len(rows),
            **{status: int((requests["status"] == status).sum()) for status in STATUSES},
            warmup_requests=int((~measured).sum()),
            measured=int(measured.sum()),
            measured_finished=int(finished.sum()),
        )
        summary.update(_latencies(own, tokens, finished))
        summary.update(_stalls(tokens, finished, self.stall_bound_s))
        summary.update(_throughput(requests, tokens, counted, self.start_s, self.end_s))
        summary.update(_fairness(requests, finished, own))
        summary.update(_counts(requests, measured))
        summary.update(memory_summary(self.config, requests["cached_tokens"], measured))
        summary.update(_objectives(slo, summary, requests, tokens, measured, own))
        return summary


def summarise_classes(
    run: RunTables, column: str = "slo", *, slo: str | Mapping[str, str] | None = None, **options: Any
) -> dict[str, dict[str, Any]]:
    """One summary per value of a column of the requests (SLO class, priority, session), in order; null is "none".

    Counts, latencies and throughput are those of its requests; iterations, memory and devices are the whole run's.

    slo: one objective for all, or one per SLO class, as in `summarise`.
    """
    labels = np.array(["none" if v is None else str(v) for v in run.table("requests", [column])[column].to_pylist()])
    names, part_of = np.unique(labels, return_inverse=True)
    whole = _Whole(run, **{**_WHOLE_DEFAULTS, **options})
    ordered = np.argsort(part_of, kind="stable")
    parts = np.split(ordered, np.cumsum(np.bincount(part_of, minlength=len(names)))[:-1]) if len(names) else []
    return {
        str(name): whole.summary_of(rows, tokens, slo)
        for name, rows, tokens in zip(names.tolist(), parts, whole.tokens.split(parts))
    }


def pd_optimum(chunk_size: float | None, slots: float | None) -> float:
    """P:D at which each chunk of C - (B - 1) prefill tokens finds its B - 1 decodes (SARATHI, Sec. 5.2)."""
    if not chunk_size or not slots or slots < 2:
        return math.nan
    return (chunk_size - (slots - 1)) / (slots - 1)


def _requests(run: RunTables) -> dict[str, NDArray[Any]]:
    columns = (
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        "admitted_s",
        "first_token_s",
        "finished_s",
        "preemptions",
        "cached_tokens",
        "status",
        "slo",
        "request",
    )
    return {name: run.column("requests", name) for name in columns}


def _nobody_lost_a_token(requests: dict[str, NDArray[Any]], tokens: TokenTimes) -> None:
    unknown = ~np.isin(requests["status"].astype(str), STATUSES)
    if unknown.any():
        row = int(np.argmax(unknown))
        raise MetricsError(
            f"requests: row {row}: found status {requests['status'][row]!r}, expected one of {', '.join(STATUSES)}"
        )
    timed = tokens.tokens_per_request()
    wrong = timed != requests["output_tokens"]
    if wrong.any():
        row = int(np.argmax(wrong))
        raise MetricsError(
            f"requests: request {requests['request'][row]}: found {requests['output_tokens'][row]} output tokens, "
            f"expected the {timed[row]} that its segments have times for"
        )


def _window(requests: dict[str, NDArray[Any]], warmup: int | str) -> tuple[float, Bools]:
    """Where the measured window starts, and who is measured."""
    arrival = requests["arrival_s"]
    amount, in_seconds = parse_warmup(warmup)
    if not len(arrival):
        return 0.0, np.zeros(0, dtype=bool)
    if not amount:
        return float(arrival.min()), np.ones(len(arrival), dtype=bool)
    if in_seconds:
        return float(amount), arrival >= amount
    rank = np.empty(len(arrival), dtype=np.int64)
    rank[np.lexsort((requests["request"], arrival))] = np.arange(len(arrival))
    measured = rank >= amount
    start = arrival[measured].min() if measured.any() else requests["finished_s"].max()
    return float(start), measured


def _latencies(own: dict[str, Floats], tokens: TokenTimes, finished: Bools) -> dict[str, float]:
    found = {}
    for name in LATENCIES:
        if name == "tbt_s":
            gaps = tokens.gaps(finished)
            values = statistics(gaps.ns / 1e9, gaps.count)
        else:
            latency = own[name.removesuffix("_s")]
            values = statistics(latency[~np.isnan(latency)])
        found.update({f"{name}_{statistic}": value for statistic, value in values.items()})
    return found


def _stalls(tokens: TokenTimes, finished: Bools, bound_s: float) -> dict[str, float]:
    if not bound_s > 0:
        raise MetricsError(f"stall bound: found {bound_s}, expected seconds above 0")
    bound_ns = round(bound_s * 1e9)
    gaps = tokens.gaps(finished)
    stalls = gaps.ns > bound_ns
    return {
        "stall_bound_s": bound_s,
        "stalls": int(gaps.count[stalls].sum()),
        "stall_s_total": int((gaps.ns[stalls] * gaps.count[stalls]).sum()) / 1e9,
        "stall_s_longest": int(np.max(gaps.ns[stalls], initial=0)) / 1e9,
        "stalled_requests": int((tokens.gaps_above(bound_ns)[finished] > 0).sum()),
    }


def _throughput(
    requests: dict[str, NDArray[Any]], tokens: TokenTimes, counted: Bools, start_s: float, end_s: float
) -> dict[str, float]:
    duration = end_s - start_s
    ended = counted & (requests["status"] == "finished") & (requests["finished_s"] >= start_s)
    prompts = int(requests["prompt_tokens"][counted & (requests["first_token_s"] >= start_s)].sum())
    output = tokens.delivered(round(start_s * 1e9), counted)
    return {
        "requests_per_s": _ratio(int(ended.sum()), duration),
        "output_tokens_per_s": _ratio(output, duration),
        "total_tokens_per_s": _ratio(prompts + output, duration),
    }


def _fairness(requests: dict[str, NDArray[Any]], finished: Bools, own: dict[str, Floats]) -> dict[str, float]:
    e2e = own["e2e"][finished]
    served = requests["output_tokens"][finished][e2e > 0] / e2e[e2e > 0]
    return {"fairness_jain": jain_index(served) if len(served) else math.nan}


def _counts(requests: dict[str, NDArray[Any]], measured: Bools) -> dict[str, float]:
    prompt = int(requests["prompt_tokens"][measured].sum())
    cached = int(requests["cached_tokens"][measured].sum())
    return {
        "preemptions": int(requests["preemptions"][measured].sum()),
        "preempted_requests": int((requests["preemptions"][measured] > 0).sum()),
        "prompt_tokens": prompt,
        "output_tokens": int(requests["output_tokens"][measured].sum()),
        "cached_tokens": cached,
        "cached_share": _ratio(cached, prompt),
    }


def _iterations(
    run: RunTables, config: Mapping[str, Any], stays: list[Presence], start_s: float, end_s: float
) -> dict[str, Any]:
    begun_ns, ended_ns = run.column_ns("iterations", "start_s"), run.column_ns("iterations", "end_s")
    inside_window = ended_ns > round(start_s * 1e9)

    def column(name: str) -> NDArray[Any]:
        return run.column("iterations", name)[inside_window]

    tokens = column("chunk_tokens").astype(np.int64) + column("decodes") + column("draft_tokens")
    dummies, decodes = column("dummy_tokens").astype(np.int64), column("decodes")
    count, useful, padding = len(tokens), int(tokens.sum()), int(dummies.sum())
    budget, blocks = _setting(config, "token_budget"), _setting(config, "num_blocks")
    held = held_ns(run)[inside_window]
    device_ns = run.column_ns("iterations", "device_s")[inside_window]
    share = share_inside(run, start_s)[inside_window]
    # Exact whatever the order: whole nanoseconds by themselves, and the few that lie in the window in part.
    partly = (share != 1).nonzero()[0]
    whole_ns = int(device_ns.sum()) - int(device_ns[partly].sum())
    busy_s = math.fsum([whole_ns, *(device_ns[partly] * share[partly]).tolist()]) / 1e9
    host_ns = sum(
        int(run.column_ns("iterations", f"host_{when}_s")[inside_window].sum()) for when in ("before", "after")
    )
    lengths = (ended_ns - begun_ns)[inside_window] / 1e9
    found: dict[str, Any] = {f"iteration_s_{name}": value for name, value in statistics(lengths).items()}
    found.update(
        iterations=count,
        tokens_per_iteration=_ratio(useful, count),
        decodes_per_iteration=_ratio(int(decodes.sum()), count),
        chunk_tokens_total=int(column("chunk_tokens").sum()),
        token_budget=budget,
        token_budget_use=_ratio(useful, count * budget) if budget else math.nan,
        dummy_tokens=padding,
        dummy_share=_ratio(padding, useful + padding),
        graph_padding_rows=int(np.maximum(column("executed_rows") - tokens - dummies, 0).sum()),
        host_s_total=host_ns / 1e9,
        device_s_total=int(device_ns.sum()) / 1e9,
        device_busy_share=_ratio(busy_s, stage_seconds(stays, start_s, end_s)),
        inside_share=_ratio(int(column("inside").sum()), count) if _has_region(config) else math.nan,
        kv_blocks=blocks,
        **speculation_summary(run, inside_window),
    )
    experts = column("activated_experts")
    known = experts[~np.isnan(experts)]
    found["activated_experts_mean"] = float(known.mean()) if len(known) else None
    found["activated_experts_max"] = float(known.max()) if len(known) else None
    for name in ("running", "waiting"):
        found[f"{name}_mean"] = _ratio(float((column(name) * held).sum()), float(held.sum()))
        found[f"{name}_max"] = int(np.max(column(name), initial=0))
    if blocks:
        used = 1 - column("free_blocks") / blocks
        found["kv_use_mean"] = _ratio(float((used * held).sum()), float(held.sum()))
        found["kv_use_max"] = float(np.max(used, initial=0.0))
    return found


def _bubbles(run: RunTables) -> dict[str, float]:
    """Of the whole run: a bubble has no warm-up. A single stage that waits for no rank has none worth the name."""
    if not np.any(run.column("stages", "stage")) and not _steps_together(run):
        return {}
    from metrics.pipelines.bubbles import find_bubbles

    found = find_bubbles(run)
    return {
        "bubble_share": found.share,
        **{f"bubble_share_{cause}": share for cause, share in found.cause_shares.items()},
        "lost_device_s": found.lost_device_s,
    }


def _steps_together(run: RunTables) -> bool:
    """Whether ranks of a replica share their steps."""
    if run.ranks == 1:
        return False
    pools = run.config.get("pools")
    if isinstance(pools, list) and any("ranks_step_together" in pool for pool in pools):
        return any(pool.get("ranks_step_together") for pool in pools)
    met = met_ns(run)
    own = run.column_ns("iterations", "start_s") + run.column_ns("iterations", "device_s")
    return met is not None and bool((met > own).any())


def _objectives(
    slo: str | Mapping[str, str] | None,
    summary: Mapping[str, Any],
    requests: dict[str, NDArray[Any]],
    tokens: TokenTimes,
    measured: Bools,
    own: dict[str, Floats],
) -> dict[str, Any]:
    if not slo:
        return {"slo_attainment": math.nan, "goodput_requests_per_s": math.nan}
    met = np.zeros(len(measured), dtype=bool)
    held = np.zeros(len(measured), dtype=bool)  # whoever has an objective
    run_meets = True
    finished = measured & (requests["status"] == "finished")
    if isinstance(slo, str):
        parts = [(np.ones(len(measured), dtype=bool), slo, summary)]
    else:
        parts = [(requests["slo"] == name, objective, {}) for name, objective in slo.items()]
    for mine, objective, known in parts:
        bounds = parse_slo(objective)
        held |= mine
        met |= mine & requests_within(bounds, own, tokens)
        if isinstance(slo, str) or (mine & measured).any():
            run_meets &= bool((mine & finished).any()) and not any(
                _statistic(bound, own, tokens, mine & finished, known) > bound.bound_s for bound in bounds
            )
    good = int((met & finished).sum())
    return {
        "slo": slo if isinstance(slo, str) else "; ".join(f"{name}: {text}" for name, text in slo.items()),
        "slo_met": run_meets if held[measured].any() or isinstance(slo, str) else None,
        "slo_attainment": _ratio(good, int((held & measured).sum())),
        "goodput_requests_per_s": _ratio(good, summary["duration_s"]),
    }


def _statistic(
    bound: Bound, own: dict[str, Floats], tokens: TokenTimes, finished: Bools, summary: Mapping[str, Any]
) -> float:
    if bound.key in summary:
        return float(summary[bound.key])
    gaps = tokens.gaps(finished) if bound.metric == "tbt" else None
    values = gaps.ns / 1e9 if gaps is not None else own[bound.metric][finished & ~np.isnan(own[bound.metric])]
    counts = gaps.count if gaps is not None else None
    if bound.percentile is None:
        return statistics(values, counts)[bound.statistic]
    return percentiles(values, [bound.percentile], counts)[0]


def _setting(config: Mapping[str, Any], name: str) -> Any:
    """A setting of the run: at the top of its config, or among the policy's knobs."""
    knobs = config.get("knobs")
    return config.get(name, knobs.get(name) if isinstance(knobs, Mapping) else None)


def _evidence(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the run's costs rest on, as its config says; folders of earlier versions know no shares."""
    found = config.get("cost_evidence")
    if isinstance(found, Mapping):
        return {
            "calibrated": found.get("calibrated"),
            "measured_share": found.get("measured_share"),
            "cost_basis": found.get("words"),
        }
    calibrated = config.get("calibrated")
    words = {"False": "uncalibrated: specifications alone", "True": "fitted: the run does not say to what share"}
    live = config.get("world") == "live"
    return {"calibrated": calibrated, "cost_basis": None if live else words.get(str(calibrated))}


def _has_region(config: Mapping[str, Any]) -> bool:
    """Whether anything was measured that a shape could lie in: not for a roofline, nor for a live run, which is itself
    the measurement."""
    return config.get("world") != "live" and config.get("calibrated") is not False


def _name(value: Any) -> Any:
    return value.get("name") if isinstance(value, Mapping) else value


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
