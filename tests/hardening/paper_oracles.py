"""Small oracles of the policies, each written from its paper: no cohorts, no drafts, no ledger, one request at a time.

An oracle is told who runs (in admission order) and who waits, and says who gets how many tokens, by calls on a `Plan`
that counts blocks per request. `tests/hardening/test_policies_against_oracles.py` holds the policies against them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from policies import BatchShape, Request

BLOCK = 4
TILE = 8


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
        self.running, self.waiting, self.free, self.total, self.now, self.longest = (
            running,
            waiting,
            free,
            total,
            now,
            longest,
        )
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
    if rows >= slots:
        return rows - (slots - 1)
    return (rows if decodes < rows else -(-(decodes + 1) // TILE) * TILE) - decodes


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
        fits = [
            n * TILE
            for n in range(1, most // TILE + 1)
            if n * TILE >= slots and t(prompt.context, n * TILE - (slots - 1)) <= limit
        ]
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
        prompts = sorted(
            [j for j in plan.running if not j.decodes] + ([] if plan.victims else plan.waiting), key=urgency
        )
        _give_in_order(plan, sorted(prompts, key=lambda job: plan.now > deadline(job)), left)

    return by_slack


def _give_in_order(plan: Plan, jobs: list[Job], left: int) -> None:
    """Whoever runs goes on; once one who waits is not let in, nobody behind it is."""
    line_stands = False
    for job in jobs:
        if left <= 0:
            return
        if job.running:
            left -= plan.give(job, left)
        elif not line_stands:
            got = plan.admit(job, left, job.known)
            left -= got
            line_stands = not got


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
        _give_in_order(plan, order, room(plan, order[0].context)[0])

    return by_slack


def age(job: Job) -> tuple[float, int]:
    return job.known + 1e7 * job.request.arrival_ns / 1e9, job.request.id
