"""Every policy against a small oracle written from its paper: no cohorts, no drafts, no ledger, one request at a time.

An oracle is told who runs (in admission order) and who waits, and says who gets how many tokens. The engine around it
counts blocks per request. Batches, their times and every token's time must agree.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import BatchShape, Request, make_policy, make_scheduler
from tests.policies.driving import drive

BLOCK = 4
TILE = 8
MORE = int(os.environ.get("MORE", "0"))
"""MORE=10 in the environment: ten times as many workloads, and others every time."""


@dataclass
class Job:
    request: Request
    output: int
    context: int = 0
    produced: int = 0
    blocks: int = 0
    running: bool = False
    prefilled: bool = False
    last_ns: int = -1
    times: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        return self.request.prompt_tokens + self.produced

    @property
    def lacking(self) -> int:
        """Tokens whose keys and values are missing: the rest of a prompt, or one while it decodes."""
        return self.known - self.context

    @property
    def decodes(self) -> bool:
        return self.running and self.prefilled


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


class Plan:
    """What an oracle writes on: grants, and the engine's blocks and queues."""

    def __init__(self, running: list[Job], waiting: list[Job], free: int, total: int, now: int, longest: int) -> None:
        self.running, self.waiting, self.free, self.total, self.now, self.longest = running, waiting, free, total, now, longest
        self.granted: dict[int, tuple[int, int]] = {}  # request -> (tokens, context before)
        self.jobs: list[tuple[Job, int]] = []
        self.victims = 0
        self.dummy = 0
        self.seqs = 1 << 30
        self.budget = 1 << 30
        self.first_to_go: Callable[[Job], int] = lambda job: 0

    @property
    def used(self) -> int:
        return sum(tokens for _, tokens in self.jobs)

    def give(self, job: Job, tokens: int) -> int:
        tokens = min(tokens, job.lacking, self.budget - self.used)
        if tokens > 0:
            self.jobs.append((job, tokens))
        return max(tokens, 0)

    def grow(self, job: Job, tokens: int) -> bool:
        """Blocks for so many tokens of context in all."""
        more = max(0, blocks(tokens) - job.blocks)
        if more > self.free:
            return False
        self.free -= more
        job.blocks += more
        return True

    def preempt_last(self) -> Job:
        victim = max(self.running, key=lambda job: (self.first_to_go(job), self.running.index(job)))
        self.running.remove(victim)
        self.jobs = [(job, tokens) for job, tokens in self.jobs if job is not victim]
        self.free += victim.blocks
        victim.blocks = victim.context = 0
        victim.running = victim.prefilled = False
        self.waiting.insert(0, victim)
        self.victims += 1
        return victim

    def decode_all(self, most: int = 1 << 30) -> int:
        """One token for every running decode; where blocks are short, the last admitted goes back to the queue."""
        count = 0
        for job in [job for job in self.running if job.decodes]:
            while job.running and count < most and not self.grow(job, job.context + 1):
                self.preempt_last()
            if job.running and count < most:
                count += self.give(job, 1)
        return sum(job.decodes for job, _ in self.jobs)

    def admit(self, job: Job, tokens: int, reserve: int) -> int:
        tokens = min(tokens, job.known, self.budget - self.used)
        if len(self.running) >= self.seqs or tokens <= 0 or not self.grow(job, reserve):
            return 0
        self.waiting.remove(job)
        self.running.append(job)
        job.running = True
        return self.give(job, tokens)


Oracle = Callable[[Plan], None]


def prefill_priority(plan: Plan) -> None:
    """vLLM (SOSP 2023), Sec. 4.5: prompts, whole, first come first served; only without any, the decodes."""
    plan.budget = max(2048, plan.longest)
    while plan.waiting and plan.waiting[0].known <= plan.budget - plan.used:
        if not plan.admit(plan.waiting[0], plan.waiting[0].known, plan.waiting[0].known):
            break
    if not plan.jobs:
        plan.decode_all()


def orca(size: int) -> Oracle:
    """Orca (OSDI 2022), Algorithm 1: select by arrival up to the batch size, reserving max_tokens for new requests."""

    def select(plan: Plan) -> None:
        left = size - plan.decode_all(size)
        while left > 0 and plan.waiting:
            job = plan.waiting[0]
            if not plan.admit(job, job.known, job.request.prompt_tokens + job.request.max_output_tokens):
                return
            left -= 1

    return select


def request_level(size: int) -> Oracle:
    """FasterTransformer as Orca, Sec. 3, tells it: a batch runs until its last request is done; rows stay as padding."""
    peak = [0]

    def static(plan: Plan) -> None:
        if plan.running:
            plan.decode_all()
            plan.dummy = peak[0] - len(plan.jobs)
        if plan.running or not plan.waiting:
            return
        while plan.waiting and len(plan.running) < size:
            job = plan.waiting[0]
            if not plan.admit(job, job.known, job.request.prompt_tokens + job.request.max_output_tokens):
                break
        peak[0] = len(plan.running)
        longest = max(tokens for _, tokens in plan.jobs)
        plan.dummy = longest * len(plan.jobs) - plan.used

    return static


def chunked(size: int, key: Callable[[Job], object] | None = None) -> Oracle:
    """Sarathi-Serve (OSDI 2024), Algorithm 3: all decodes, then half-done prompts, then new ones, within the budget.

    key: which waiting request is next, instead of the first.
    """

    def stall_free(plan: Plan) -> None:
        left = size - plan.decode_all()
        for job in [job for job in plan.running if not job.decodes]:
            if left > 0:
                left -= plan.give(job, left)
        while left > 0 and plan.waiting and not plan.victims:
            job = min(plan.waiting, key=key) if key else plan.waiting[0]  # type: ignore[type-var,arg-type]
            got = plan.admit(job, left, job.known)
            if not got:
                break
            left -= got

    return stall_free


def decode_maximal(size: int | Callable[[Plan, Job, int], int], align: str, *, merge: bool = False) -> Oracle:
    """SARATHI, Sec. 4.3 and 4.4: one chunk of C - (B - 1) tokens of one prompt, and B - 1 decodes; or B decodes.

    size: C, or the rule that chooses it from the plan, the prompt whose turn it is and B. shrink: a smaller chunk where
    that gives whole tiles, dummy tokens where it does not. merge: what a prompt leaves of the chunk is the next one's.
    """

    def one_chunk(plan: Plan) -> None:
        slots = max(1, plan.total // blocks(plan.longest))
        line = [job for job in plan.running if not job.decodes] + plan.waiting
        prompt = line[0] if line else None
        if prompt is not None and not prompt.running and blocks(slot_of(plan, prompt)) > plan.free:
            prompt = None
        decodes = plan.decode_all(slots if prompt is None else slots - 1)
        if prompt is None:
            return
        rows = size(plan, prompt, slots) if callable(size) else size
        taken, free = [], plan.free
        left = beside(rows, slots, decodes)
        for job in line if merge else line[:1]:
            needs = 0 if job.running else blocks(slot_of(plan, job))
            if left <= 0 or needs > free:
                break
            taken.append((job, min(left, job.lacking)))
            left, free = left - taken[-1][1], free - needs
        if align == "shrink":
            job, tokens = taken.pop()
            before = plan.used + sum(tokens for _, tokens in taken)
            whole = (before + tokens) // TILE * TILE - before
            taken.append((job, whole if whole > 0 else tokens))
        for job, tokens in taken:
            assert plan.give(job, tokens) if job.running else plan.admit(job, tokens, slot_of(plan, job))
        if align != "none":
            plan.dummy = -plan.used % TILE

    return one_chunk


def slot_of(plan: Plan, job: Job) -> int:
    return max(plan.longest, job.request.prompt_tokens + job.request.max_output_tokens)


def beside(rows: int, slots: int, decodes: int) -> int:
    """The chunk of a batch of C rows: C - (B - 1); with B > C what the decodes leave of C, or of the next tile above."""
    return rows - (slots - 1) if rows >= slots else max(rows, -(-(decodes + 1) // TILE) * TILE) - decodes


def fewest_tiles(slots: int) -> int:
    """The smallest whole number of tiles with room for a chunk beside B - 1 decodes."""
    return next(tiles for tiles in range(1, 1 << 20) if tiles * TILE > slots - 1)


def guess_ns(chunks: list[tuple[int, int]], decodes: int, contexts: int, dummies: int) -> int:
    """What a cost model says: by rows, by what decodes look back on, and by what chunks do."""
    rows = sum(tokens for tokens, _ in chunks) + decodes + dummies
    return 1000 + 10 * rows + contexts // 16 + sum(prefix for _, prefix in chunks) // 2


def estimate(shape: BatchShape) -> int:
    return guess_ns(list(shape.chunks), shape.decodes, shape.decode_context_total, shape.dummy_tokens)


def by_tbt(target_ns: int, largest: int) -> Callable[[Plan, Job, int], int]:
    """C: the most tiles with which the iteration keeps the target; one that holds a chunk at least."""

    def rows(plan: Plan, prompt: Job, slots: int) -> int:
        least = fewest_tiles(slots)
        if not any(job.decodes for job in plan.running):
            return max(largest, least * TILE)
        decoding = [job.context for job, _ in plan.jobs]

        def takes(tiles: int) -> int:
            tokens = min(prompt.lacking, beside(tiles * TILE, slots, len(decoding)))
            dummies = -(len(decoding) + tokens) % TILE
            return guess_ns([(tokens, prompt.context)], len(decoding), sum(decoding), dummies)

        within = [tiles for tiles in range(least, largest // TILE + 1) if takes(tiles) <= target_ns]
        return max(within, default=least) * TILE

    return rows


def by_prefix(first: int, c: int, g: int, b: int, a: int) -> Callable[[Plan, Job, int], int]:
    """C: the most tiles whose chunk on its prefix takes no longer than the first one took, by t(L, x) = c + g L + b x +
    a (2 L x + x^2)."""

    def t(prefix: int, x: int) -> int:
        return c + g * prefix + b * x + a * (2 * prefix * x + x * x)

    def rows(plan: Plan, prompt: Job, slots: int) -> int:
        most = max(first, fewest_tiles(slots) * TILE)
        if not prompt.context:
            return most
        limit = t(0, most - (slots - 1))
        fits = [n * TILE for n in range(1, most // TILE + 1) if n * TILE >= slots and t(prompt.context, n * TILE - (slots - 1)) <= limit]
        return min(most, max([*fits, fewest_tiles(slots) * TILE]))

    return rows


def by_load(plan: Plan, prompt: Job, slots: int) -> int:
    """C for the share of prompt tokens in all tokens still to come, answers counted by their declared limits."""
    everybody = plan.running + plan.waiting
    prefill = sum(job.lacking for job in everybody if not job.decodes)
    promised = sum(job.request.max_output_tokens - job.produced for job in everybody)
    share = prefill / (prefill + promised)
    return 32 if share > 0.7 else 16 if share < 0.3 else 24


def vllm_v1(budget: int, threshold: int) -> Oracle:
    """vLLM's v1/core/sched/scheduler.py: running requests in order, each what it lacks; waiting ones if none was
    preempted and the whole prompt would fit."""

    def schedule(plan: Plan) -> None:
        plan.budget = budget
        limit = threshold if threshold and len(plan.running) + len(plan.waiting) > 1 else 1 << 30
        for job in list(plan.running):
            if not job.running:
                break
            wanted = min(job.lacking, limit, plan.budget - plan.used)
            while job.running and wanted and not plan.grow(job, job.context + wanted):
                plan.preempt_last()
            if job.running:
                plan.give(job, wanted)
        while plan.waiting and plan.used < plan.budget and not plan.victims:
            job = plan.waiting[0]
            chunk = min(job.known, limit, plan.budget - plan.used)
            if blocks(job.known) > plan.free or not plan.admit(job, chunk, chunk):
                break

    return schedule


def slo_aware(size: int, ttft_ns: int, tbt_ns: int) -> Oracle:
    """After Niyama: by priority, then by deadline (no cost model: slack is waiting alone); who is late steps back."""

    def deadline(job: Job) -> int:
        return job.last_ns + tbt_ns if job.produced else job.request.arrival_ns + ttft_ns

    def urgency(job: Job) -> tuple[int, int, int]:
        return job.request.priority, deadline(job), job.request.id

    def by_slack(plan: Plan) -> None:
        plan.first_to_go = lambda job: job.request.priority
        left = size - plan.decode_all()
        prompts = sorted([j for j in plan.running if not j.decodes] + ([] if plan.victims else plan.waiting), key=urgency)
        line_stands = False
        for job in sorted(prompts, key=lambda job: plan.now > deadline(job)):
            if left <= 0:
                return
            if job.running:
                left -= plan.give(job, left)
            elif not line_stands:
                got = plan.admit(job, left, job.known)
                left -= got
                line_stands = not got

    return by_slack


def slo_aware_by_time(size: int, targets: dict[str | None, tuple[int, int]]) -> Oracle:
    """After Niyama: the iteration is filled to the tightest TBT target among the running requests; slack is the time to
    the deadline less the iterations that the prompt still needs; who could not be in time even if started now, behind
    everybody more urgent, steps back. targets: (TTFT, TBT) by class, ns."""

    def deadline(job: Job) -> int:
        ttft, tbt = targets[job.request.slo]
        return job.last_ns + tbt if job.produced else job.request.arrival_ns + ttft

    def room(plan: Plan, prefix: int) -> tuple[int, int]:
        """Tokens for prompts beside the decodes, and how long such an iteration takes."""
        decoding = [job.context for job, _ in plan.jobs]

        def takes(rows: int) -> int:
            return guess_ns([(rows - len(decoding), prefix)], len(decoding), sum(decoding), 0)

        least = next(rows for rows in range(TILE, 1 << 20, TILE) if rows > len(decoding))
        rows = max(least, size)
        if any(job.decodes for job in plan.running):
            tightest = min(targets[job.request.slo][1] for job in plan.running)
            rows = max([least] + [n for n in range(least, rows + 1, TILE) if takes(n) <= tightest])
        return rows - len(decoding), takes(rows)

    def by_slack(plan: Plan) -> None:
        plan.first_to_go = lambda job: job.request.priority
        plan.decode_all()
        prompts = [job for job in plan.running if not job.decodes] + ([] if plan.victims else plan.waiting)
        if not prompts:
            return
        tokens, takes = room(plan, 0)

        def slack(job: Job) -> int:
            return deadline(job) - plan.now - -(-job.lacking // tokens) * takes

        in_time, late, ahead = [], [], 0
        for job in sorted(prompts, key=lambda job: (job.request.priority, slack(job), job.request.id)):
            ends = plan.now + -(-(ahead + job.lacking) // tokens) * takes
            if ends > deadline(job):
                late.append(job)
            else:
                in_time.append(job)
                ahead += job.lacking
        order = in_time + late
        left = room(plan, order[0].context)[0]
        line_stands = False
        for job in order:
            if left <= 0:
                return
            if job.running:
                left -= plan.give(job, left)
            elif not line_stands:
                got = plan.admit(job, left, job.known)
                left -= got
                line_stands = not got

    return by_slack


def age(job: Job) -> tuple[float, int]:
    return job.known + 1e7 * job.request.arrival_ns / 1e9, job.request.id


class Case(NamedTuple):
    policy: str
    knobs: dict[str, object]
    oracle: Callable[[], Oracle]
    estimator: Callable[[BatchShape], int] | None = None


SIZES: dict[str, object] = {"large": 32, "middle": 24, "small": 16}
CHUNK_TIME = {"c": 1000, "g": 5, "b": 100, "a": 2}
PREFIX_AWARE: dict[str, object] = {"rule": "prefix_aware", "first": 32, **{f"{name}_ns": value for name, value in CHUNK_TIME.items()}}
TARGETS: dict[str | None, tuple[int, int]] = {None: (9_000, 2_000), "chat": (5_000, 1_300)}

ORACLES: dict[str, Case] = {
    "prefill_priority": Case("prefill_priority", {}, lambda: prefill_priority),
    "orca": Case("orca", {}, lambda: orca(1 << 30)),
    "orca of 3": Case("orca", {"max_batch_size": 3}, lambda: orca(3)),
    "request_level": Case("request_level", {"max_batch_size": 3}, lambda: request_level(3)),
    "chunked": Case("chunked", {"chunk_size": 12}, lambda: chunked(12)),
    "chunked of 3": Case("chunked", {"chunk_size": 3}, lambda: chunked(3)),
    "decode_maximal": Case("decode_maximal", {"chunk_size": 24}, lambda: decode_maximal(24, "pad")),
    "decode_maximal, shrunk": Case(
        "decode_maximal", {"chunk_size": 24, "align": "shrink"}, lambda: decode_maximal(24, "shrink")
    ),
    "decode_maximal of 5": Case(
        "decode_maximal", {"chunk_size": 5, "align": "none"}, lambda: decode_maximal(5, "none")
    ),
    "dynamic_chunk": Case("dynamic_chunk", SIZES, lambda: decode_maximal(by_load, "pad")),
    "dynamic_chunk, merged": Case(
        "dynamic_chunk", {**SIZES, "merge": True}, lambda: decode_maximal(by_load, "pad", merge=True)
    ),
    "dynamic_chunk, merged and shrunk": Case(
        "dynamic_chunk", {**SIZES, "merge": True, "align": "shrink"},
        lambda: decode_maximal(by_load, "shrink", merge=True),
    ),
    "dynamic_chunk by TBT": Case(
        "dynamic_chunk", {"rule": "tbt_slo", "tbt_target_s": 1.35e-6, "largest": 64},
        lambda: decode_maximal(by_tbt(1_350, 64), "pad"), estimate,
    ),
    "dynamic_chunk by prefix": Case(
        "dynamic_chunk", PREFIX_AWARE, lambda: decode_maximal(by_prefix(32, **CHUNK_TIME), "pad")
    ),
    "vllm_v1": Case("vllm_v1", {}, lambda: vllm_v1(2048, 0)),
    "vllm_v1 by 7": Case("vllm_v1", {"long_prefill_token_threshold": 7}, lambda: vllm_v1(2048, 7)),
    "shortest_prompt_first": Case(
        "shortest_prompt_first", {"chunk_size": 12, "ageing": 1e7}, lambda: chunked(12, age)
    ),
    "slo_aware": Case(
        "slo_aware", {"chunk_size": 12, "ttft_s": 5e-6, "tbt_s": 2e-6}, lambda: slo_aware(12, 5_000, 2_000)
    ),
    "slo_aware by time": Case(
        "slo_aware",
        {"chunk_size": 44, "ttft_s": 9e-6, "tbt_s": 2e-6, "classes": "chat:ttft=5e-6,tbt=1.3e-6"},
        lambda: slo_aware_by_time(44, TARGETS), estimate,
    ),
}  # fmt: skip


def simulate(oracle: Oracle, requests: list[tuple[Request, int]], total: int, longest: int) -> tuple[list[object], dict[int, list[int]]]:
    """(start, rows by request, dummy rows) of every batch, and every token's time."""
    pending = [Job(request, output) for request, output in requests]
    everybody, waiting, running = list(pending), [], []
    now, free = 0, total
    batches: list[object] = []
    while pending or waiting or running:
        while pending and pending[0].request.arrival_ns <= now:
            waiting.append(pending.pop(0))
        plan = Plan(running, waiting, free, total, now, longest)
        oracle(plan)
        free = plan.free
        if not plan.jobs:
            now = max(now, pending[0].request.arrival_ns)
            continue
        batches.append((now, {job.request.id: (tokens, job.context) for job, tokens in plan.jobs}, plan.dummy))
        contexts = sum(job.context for job, _ in plan.jobs if job.decodes)
        now += 1000 + 10 * (plan.used + plan.dummy) + contexts // 16
        for job, tokens in plan.jobs:
            job.context += tokens
            if job.context == job.known:
                job.produced += 1
                job.prefilled = True
                job.last_ns = now
                job.times.append(now)
                if job.produced == job.output:
                    running.remove(job)
                    free += job.blocks
    return batches, {job.request.id: job.times for job in everybody}


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[tuple[Request, int]], int]:
    """Requests, and a pool of at least what the longest of them needs: often too small for all."""
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 3000), st.integers(1, 40), st.integers(1, 25), st.integers(0, 5), st.integers(-1, 1),
                st.sampled_from([None, "chat"]),
            ),
            min_size=1,
            max_size=12,
        )
    )
    requests, now = [], 0
    for row, (gap, prompt, output, slack, priority, slo) in enumerate(rows):
        now += gap
        requests.append((Request(row, now, prompt, output + slack, priority=priority, slo=slo), output))
    longest = max(request.prompt_tokens + request.max_output_tokens for request, _ in requests)
    return requests, blocks(longest) + draw(st.integers(0, 12) | st.integers(0, 150))


@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=60 * max(1, MORE), deadline=None, derandomize=not MORE)
@given(workload=workloads(), by_id=st.booleans())
def test_a_policy_plans_what_its_paper_says(name: str, workload: tuple[list[tuple[Request, int]], int], by_id: bool) -> None:
    requests, total = workload
    policy, knobs, oracle, estimator = ORACLES[name]
    longest = max(request.prompt_tokens + request.max_output_tokens for request, _ in requests)
    scheduler = make_scheduler(
        make_policy(policy, knobs), num_blocks=total, block_size=BLOCK, max_model_len=longest, watermark=0.0, tile=TILE,
        by_id=by_id, estimator=estimator,
    )  # fmt: skip
    log = drive(scheduler, requests)
    expected, times = simulate(oracle(), requests, total, longest)
    found = [
        (planned, {request: (tokens, context) for request, tokens, context in rows}, shape.dummy_tokens)
        for _, planned, shape, rows in log.batches
    ]
    assert found == expected
    assert log.token_times == times


