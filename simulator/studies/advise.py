"""The first question answered: which policy, which chunk size, for this trace on this GPU, and why.

Start from chunk 256 under chunked prefill, look at the trace's P:D, and walk: double or halve the chunk while that
helps, try the other policies around the best one, and the vLLM scheduler with the matching flags. Better means: the
objective is met; then more requests meet it each second; then the tighter of its bounds is kept with more room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metrics.measures.slo import parse_slo
from metrics.measures.summary_keys import SUMMARY_KEYS
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.simulation import Run
from simulator.simulation import replay as replay_trace
from workloads import Trace

START_CHUNK = 256
SMALLEST_CHUNK, LARGEST_CHUNK = 64, 8192
VLLM_MAX_NUM_SEQS = 256
"""Requests that vLLM runs at once if nobody says otherwise (0.19: 1,024 on GPUs with 70 GiB and more)."""
FEW = 100
"""Requests below which a P99 is no percentile but the longest of them."""
DEFAULT_SLO = "ttft_p99=2,tbt_p99=0.2"
DRAFTING = ("speculation", "acceptance", "drafts_found", "draft_model", "draft_step_us")
"""Settings of speculation, which is tried beside the best of the others."""


@dataclass(frozen=True)
class Candidate:
    """One setting that was tried. room: how far below its bound the tightest objective stays (1 is empty, below 0
    is missed)."""

    label: str
    policy: str
    chunk_size: int | None
    token_budget: int | None
    summary: Mapping[str, Any]
    room: float

    @property
    def score(self) -> tuple[bool, float, float]:
        """Objective met, goodput to three digits (less is noise), room."""
        goodput = self.summary["goodput_requests_per_s"] or 0.0
        return bool(self.summary["slo_met"]), float(f"{goodput:.3g}"), self.room


@dataclass(frozen=True)
class Advice:
    """The best setting, what was tried on the way, and the reasons in words."""

    best: Candidate
    tried: tuple[Candidate, ...]
    slo: str
    reasons: tuple[str, ...]
    vllm_flags: Mapping[str, int | float]
    vllm: Candidate
    config: ReplayConfig

    def as_dict(self) -> dict[str, Any]:
        keys = (
            "slo_met",
            "slo_attainment",
            "goodput_requests_per_s",
            "ttft_s_p50",
            "ttft_s_p99",
            "tbt_s_p50",
            "tbt_s_p99",
            "e2e_s_p50",
            "output_tokens_per_s",
            "overloaded",
            "preemptions",
        )

        def facts(candidate: Candidate) -> dict[str, Any]:
            return {
                "label": candidate.label,
                "policy": candidate.policy,
                "chunk_size": candidate.chunk_size,
                "token_budget": candidate.token_budget,
                "room": candidate.room,
                **{key: candidate.summary[key] for key in keys},
            }

        return {
            "slo": self.slo,
            "best": facts(self.best),
            "reasons": list(self.reasons),
            "vllm_flags": dict(self.vllm_flags),
            "vllm": facts(self.vllm),
            "tried": [facts(candidate) for candidate in self.tried],
        }


def advise(
    trace: Trace,
    config: ReplayConfig | None = None,
    *,
    slo: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Advice:
    """Find a policy and chunk size for `trace`. config: model, GPU and engine settings; its policy is ignored. Where it
    speculates, everything is tried without first, and then whether the best does better with it.

    slo: such as "ttft_p99=2,tbt_p99=0.2"; the config's, or that very one, where None.
    """
    base = config or ReplayConfig()
    slo = slo or base.slo or DEFAULT_SLO
    bounds_of(slo)
    drafting: dict[str, Any] = {name: getattr(base, name) for name in DRAFTING}
    without: dict[str, Any] = dict.fromkeys(DRAFTING)
    base = _measured_alike(trace, replace(base, slo=slo, **without))
    tried: dict[str, Candidate] = {}
    speculates = ""

    def attempt(policy: str, chunk_size: int | None = None, token_budget: int | None = None) -> Candidate:
        size = chunk_size or token_budget
        label = (policy if size is None else f"{policy} {size}") + speculates
        if label not in tried:
            if progress is not None:
                progress(label)
            knobs = {} if chunk_size is None else {"chunk_size": chunk_size}
            settings = replace(base, policy=policy, knobs=knobs, token_budget=token_budget or base.token_budget)
            summary = replay_trace(trace, settings).summary
            tried[label] = Candidate(label, policy, chunk_size, token_budget, summary, room_below(summary, slo))
        return tried[label]

    chunked = _walk(lambda size: attempt("chunked", chunk_size=size), START_CHUNK)
    assert chunked.chunk_size is not None
    size = chunked.chunk_size
    maximal = _walk(lambda c: attempt("decode_maximal", chunk_size=c), min(size, 512))
    others = [maximal, attempt("prefill_priority"), attempt("dynamic_chunk")]
    vllm = _walk(lambda budget: attempt("vllm_v1", token_budget=budget), max(size, START_CHUNK))
    best = max([chunked, *others, vllm], key=lambda candidate: candidate.score)
    reasons = _reasons(trace if base.limit is None else trace.head(base.limit), best, tried, slo)
    plain = best
    if drafting["speculation"] is not None:
        base = replace(base, **drafting)
        speculates = f" with {drafting['speculation']}"
        speculating = attempt(plain.policy, plain.chunk_size, plain.token_budget)
        best = max(plain, speculating, key=lambda candidate: candidate.score)
        reasons.insert(-1, _worth_speculating(plain, speculating, best, str(drafting["speculation"])))
        if best is plain:
            base = replace(base, **without)
    flags: dict[str, int | float] = {
        "max_num_batched_tokens": vllm.token_budget or size,
        "long_prefill_token_threshold": 0,
        "gpu_memory_utilization": base.gpu_memory_utilization or 0.9,
    }
    running = int(vllm.summary["running_max"] or best.summary["running_max"] or 1)
    if running > VLLM_MAX_NUM_SEQS:
        # A limit that a light piece of a trace never meets is no reason to lower the engine's own.
        flags["max_num_seqs"] = 1 << (running - 1).bit_length()
    order = sorted(tried.values(), key=lambda candidate: candidate.score, reverse=True)
    chosen = replace(
        base,
        policy=best.policy,
        knobs={} if best.chunk_size is None else {"chunk_size": best.chunk_size},
        token_budget=best.token_budget,
    )
    return Advice(best, tuple(order), slo, tuple(reasons), flags, vllm, chosen)


def _worth_speculating(plain: Candidate, speculating: Candidate, best: Candidate, method: str) -> str:
    """Whether to switch speculation on, and by how much answers are sooner or later with it."""
    before, after = (candidate.summary["e2e_s_mean"] for candidate in (plain, speculating))
    length = speculating.summary["acceptance_length"]
    length_said = (
        f"{length:.2f} tokens a verified step" if length == length and length is not None else "no drafts found"
    )
    told = (
        f"{_numbers(speculating)}; mean E2E {in_milliseconds(after)} against {in_milliseconds(before)} without, "
        f"{length_said}"
    )
    verdict = "switch it on" if best is speculating else "leave it off"
    return f"speculation {method}: {verdict}: {told}"


def _measured_alike(trace: Trace, base: ReplayConfig) -> ReplayConfig:
    """The same settings with one warm-up for all that is tried: that of the starting point, in requests.

    Each setting's own would be another, and rates over other requests and other seconds cannot be compared.
    """
    if base.warmup not in (None, "auto"):
        return base
    start = replace(base, policy="chunked", knobs={"chunk_size": START_CHUNK}, warmup="auto")
    return replace(base, warmup=str(replay_trace(trace, start).summary["warmup_requests"]))


def _walk(attempt: Callable[[int], Candidate], start: int) -> Candidate:
    """Double while that is better, otherwise halve while that is better."""
    best = attempt(start)
    for factor in (2.0, 0.5):
        moved = False
        size = start
        while SMALLEST_CHUNK <= (size := int(size * factor)) <= LARGEST_CHUNK:
            candidate = attempt(size)
            if candidate.score <= best.score:
                break
            best, moved = candidate, True
        if moved:
            break
    return best


def room_below(summary: Mapping[str, Any], slo: str) -> float:
    """1 - value / bound of the tightest bound; -inf where nothing was measured."""
    rooms = []
    for metric, bound in bounds_of(slo):
        value = summary[metric]
        rooms.append(float("-inf") if value is None or value != value else 1.0 - value / bound)
    return min(rooms)


def bounds_of(slo: str) -> list[tuple[str, float]]:
    """(summary key, bound in seconds) of each part of an objective."""
    bounds = [(bound.key, bound.bound_s) for bound in parse_slo(slo)]
    for key, _ in bounds:
        if key not in SUMMARY_KEYS:
            raise SimulationError(f"--slo: {key} is in no summary; advise takes mean, p50, p90, p95, p99 and max")
    return bounds


def in_milliseconds(seconds: float | None) -> str:
    if seconds is None or seconds != seconds:
        return "n/a"
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def _numbers(candidate: Candidate) -> str:
    summary = candidate.summary
    return (
        f"TTFT P50 {in_milliseconds(summary['ttft_s_p50'])}, P99 {in_milliseconds(summary['ttft_s_p99'])}; "
        f"TBT P50 {in_milliseconds(summary['tbt_s_p50'])}, P99 {in_milliseconds(summary['tbt_s_p99'])}; "
        f"{summary['goodput_requests_per_s'] or 0:.2f} requests/s within the objective"
    )


def _reasons(trace: Trace, best: Candidate, tried: Mapping[str, Candidate], slo: str) -> list[str]:
    """Why, in tokens and milliseconds. trace: what was replayed of it."""
    summary = best.summary
    prompt, output = float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean())
    beside = ""
    if best.chunk_size:
        decodes = f"{summary['decodes_per_iteration']:.0f}"
        beside = f"; chunks of {best.chunk_size} beside the {decodes} decode{'s' * (decodes != '1')} of a mean batch"
    reasons = [
        f"the trace has P:D {prompt / output:.1f} ({prompt:,.0f} prompt and {output:,.0f} output tokens on average)"
        + beside,
        f"{best.label}: {_numbers(best)}",
    ]
    alike = [candidate.label for candidate in tried.values() if candidate is not best and candidate.score == best.score]
    if alike:
        reasons.append(f"as good by objective, goodput and room, so that nothing decides: {', '.join(alike)}")
    start = tried[f"chunked {START_CHUNK}"]
    if start is not best:
        reasons.append(f"against the starting point chunked {START_CHUNK}: {_numbers(start)}")
    baseline = tried["prefill_priority"]
    if baseline is not best:
        reasons.append(
            f"prefill_priority: {_numbers(baseline)}; its longest gap is "
            f"{in_milliseconds(baseline.summary['tbt_s_max'])}, here {in_milliseconds(summary['tbt_s_max'])}"
        )
    if best.summary["overloaded"]:
        reasons.append(
            f"every setting is overloaded at this rate (load {summary['load']:.2f}): more replicas, a faster GPU or a "
            "smaller model are needed, no chunk size helps"
            if all(candidate.summary["overloaded"] for candidate in tried.values())
            else f"it is overloaded at this rate (load {summary['load']:.2f})"
        )
    elif not summary["slo_met"]:
        missed = [
            f"{metric} {in_milliseconds(summary[metric])} above {in_milliseconds(bound)}"
            for metric, bound in bounds_of(slo)
            if not (summary[metric] is not None and summary[metric] <= bound)
        ]
        reasons.append(f"no setting meets {slo}: {', '.join(missed)}")
    elif best.room > 0.5 and summary["measured_finished"] >= FEW:
        reasons.append(f"the tightest bound is kept with {best.room:.0%} to spare: this GPU has room for more load")
    reasons.append(_rests_on(summary))
    return reasons


def _rests_on(summary: Mapping[str, Any]) -> str:
    """Whom the numbers count, and how little that is where it is."""
    measured, left_out = summary["measured_finished"], summary["warmup_requests"]
    one = measured == 1
    text = f"all of this rests on {measured:,} request{'s' * (not one)}" + (
        f": the first {left_out:,} {'are' if left_out > 1 else 'is'} left out as warm-up, "
        "and counted in `finished` and the throughputs alone"
        if left_out
        else ""
    )
    if measured < FEW:
        text += f"; that is little: P99 of fewer than {FEW} is the longest of them, a longer trace may choose otherwise"
    return text


def draw_frontier(advice: Advice, folder: Path) -> list[Path]:
    """The settings tried, as TTFT P99 against TBT P99, the objective's bounds, the choice marked."""
    from metrics.drawing.figure_style import POLICY_STYLES, SINGLE_COLUMN_IN, footnote, house_style, new_figure, save
    from metrics.drawing.log_axis import log_scale

    folder.mkdir(parents=True, exist_ok=True)
    bounds = dict(bounds_of(advice.slo))
    with house_style():
        figure, axes = new_figure(SINGLE_COLUMN_IN * 1.35, 3.0)
        plot = axes[0, 0]
        said: list[tuple[int, float, float]] = []
        for policy in dict.fromkeys(candidate.policy for candidate in advice.tried):
            points = sorted(
                (c for c in advice.tried if c.policy == policy), key=lambda c: c.chunk_size or c.token_budget or 0
            )
            style = POLICY_STYLES[policy]
            x = [c.summary["tbt_s_p99"] * 1e3 for c in points]
            y = [c.summary["ttft_s_p99"] * 1e3 for c in points]
            plot.plot(x, y, marker=style.marker, markersize=4, label=policy, **style.line())
            for candidate, at in zip(points, zip(x, y)):
                size = candidate.chunk_size or candidate.token_budget
                # The same size of another policy beside it says it already.
                if (
                    size
                    and min(at) > 0
                    and not any(
                        size == other and abs(math.log(at[0] / a)) + abs(math.log(at[1] / b)) < 0.15
                        for other, a, b in said
                    )
                ):
                    said.append((size, *at))
                    plot.annotate(str(size), at, xytext=(3, 3), textcoords="offset points", fontsize=6)
        best = advice.best.summary
        at = (best["tbt_s_p99"] * 1e3, best["ttft_s_p99"] * 1e3)
        plot.plot(*at, "o", markersize=11, fillstyle="none", color="black", label="advised")
        bound: dict[str, Any] = {"color": "0.5", "linestyle": ":", "linewidth": 0.9}
        if {"tbt_s_p99", "ttft_s_p99"} & set(bounds):
            plot.plot([], [], label="objective", **bound)
        if "tbt_s_p99" in bounds:
            plot.axvline(bounds["tbt_s_p99"] * 1e3, **bound)
        if "ttft_s_p99" in bounds:
            plot.axhline(bounds["ttft_s_p99"] * 1e3, **bound)
        log_scale(plot, "x", "y")
        plot.set(xlabel="TBT P99 (ms)", ylabel="TTFT P99 (ms)")
        plot.legend(loc="best")
        footnote(figure, [f"Costs: {best['cost_model']} ({best['cost_basis']})."])
        return save(figure, folder, "frontier")


def run_chosen(trace: Trace, advice: Advice) -> Run:
    """The advised setting once more, with its tables."""
    return replay_trace(trace, advice.config)
