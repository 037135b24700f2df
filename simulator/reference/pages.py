"""The built-in policies, a page each, written from their papers: no cohorts, one request at a time.

A page reads the engine's books through a `Plan` and asks it for tokens; knobs are those of the policy's class. What a
page and the policy of the same name plan has to agree; they share no code but the knobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from policies.chunked import Chunked
from policies.contract.policy import Policy
from policies.decode_maximal import DecodeMaximal
from policies.dynamic_chunk import DynamicChunk
from policies.fair.predicted_sjf import PredictedSjf
from policies.goodput_drafts import GoodputDrafts
from policies.most_in_time import MostInTime
from policies.orca import Orca
from policies.prefill_priority import PrefillPriority
from policies.request_level import RequestLevel
from policies.shortest_prompt_first import ShortestPromptFirst
from policies.slo_aware import SloAware, parse_classes
from policies.vllm_v1 import VllmV1
from policies.work.batch import BatchShape
from policies.work.request import NS_PER_S, Ns
from simulator.reference.books import Job
from simulator.reference.plan import Plan

NO_LIMIT = 1 << 60


def prefill_priority(plan: Plan, knobs: PrefillPriority) -> None:
    """vLLM (SOSP 2023), Sec. 4.5: prompts, whole, first come first served; only without any, the decodes."""
    prompts = 0
    while plan.waiting and (prompts < knobs.max_prompts or not knobs.max_prompts):
        whole = plan.to_prefill(plan.waiting[0])
        if whole > plan.left or not plan.admit(plan.waiting[0], whole):
            break
        prompts += 1
    if not prompts:
        plan.decode_all()


def orca(plan: Plan, knobs: Orca) -> None:
    """Orca (OSDI 2022), Algorithm 1: select by arrival up to the batch size, reserving max_tokens for new requests."""
    most = knobs.max_batch_size or NO_LIMIT
    left = min(most - plan.decode_all(most), knobs.max_prompts or NO_LIMIT)
    while left > 0 and plan.waiting:
        job = plan.waiting[0]
        whole = plan.to_prefill(job)
        if whole > plan.left or not plan.admit(job, whole, reserve=_longest(plan, job, knobs.reserve)):
            return
        left -= 1


def _longest(plan: Plan, job: Job, reserve: str) -> int:
    """Tokens that a request may grow to: its own limit, or the longest allowed."""
    limit = job.request.prompt_tokens + job.request.max_output_tokens
    return max(limit, plan.longest) if reserve == "longest" else limit


def request_level(plan: Plan, knobs: RequestLevel) -> None:
    """FasterTransformer as Orca, Sec. 3, tells it: a batch runs until its last request is done; rows stay as padding.

    In a pipeline a round is one batch for each micro-batch, formed of those who had come when the first was planned.
    """
    if _form_batch(plan, knobs):
        return
    if plan.decoding():
        batch = min(plan.decoding(), key=lambda group: group.jobs[0].last_token_ns)
        plan.decode(batch, NO_LIMIT)
        if knobs.keep_finished:
            plan.pad_to(batch.peak)


def _form_batch(plan: Plan, knobs: RequestLevel) -> bool:
    books = plan.books
    micro_batches = plan.limits.micro_batches - books.batches_in_flight
    running = books.running
    forming = all(job.prefilled and not job.delivered for job in running) if running else not books.batches_in_flight
    if micro_batches <= 0 or not plan.waiting or not forming:
        return False
    most = knobs.max_batch_size * micro_batches
    ready = plan.waiting[:most]
    if running:
        formed_ns = min(job.admitted_ns for job in running)
        ready = [job for job in ready if job.request.arrival_ns <= formed_ns]
    elif len(ready) < most:
        starts_ns = plan.waiting[0].request.arrival_ns + round(knobs.max_delay_s * NS_PER_S)
        if plan.now_ns < starts_ns:
            plan.alarm_ns = starts_ns
            return False
    longest = 0
    for job in ready[: -(-len(ready) // micro_batches)]:
        whole = plan.to_prefill(job)
        square = max(longest, whole) * (len(plan.rows) + 1)
        budget = plan.limits.token_budget
        if budget is not None and square > budget:
            break
        if not plan.admit(job, whole, reserve=_longest(plan, job, knobs.reserve)):
            break
        longest = max(longest, whole)
    plan.pad_to(longest * len(plan.rows))
    return bool(plan.rows)


def chunked(plan: Plan, knobs: Chunked) -> None:
    """Sarathi-Serve (OSDI 2024), Algorithm 3: all decodes, then half-done prompts, then new ones, within the budget."""
    _stall_free(plan, knobs.chunk_size, lambda: plan.waiting[0])


def shortest_prompt_first(plan: Plan, knobs: ShortestPromptFirst) -> None:
    """The same, but of the first `window` that wait the one with the fewest tokens, waiting time counted, is next."""

    def rank(job: Job) -> tuple[float, int]:
        return job.known + knobs.ageing * job.request.arrival_ns / NS_PER_S, job.request.id

    _stall_free(plan, knobs.chunk_size, lambda: min(plan.waiting[: knobs.window], key=rank))


def _stall_free(plan: Plan, size: int, following: Callable[[], Job]) -> None:
    left = size - plan.decode_all()
    for job in plan.prompts():
        if left > 0:
            left -= plan.run(job, left)
    while left > 0 and plan.waiting and not plan.victims:
        job = following()
        got = plan.admit(job, left, reserve=job.known)
        if not got:
            break
        left -= got


def decode_maximal(plan: Plan, knobs: DecodeMaximal) -> None:
    """SARATHI, Sec. 4.3 and 4.4: one chunk of C - (B - 1) tokens of one prompt, and B - 1 decodes; or B decodes."""
    _one_chunk(plan, lambda prompt: knobs.chunk_size, knobs.align)


def dynamic_chunk(plan: Plan, knobs: DynamicChunk) -> None:
    """The same with C chosen anew for every batch. merge: what a prompt leaves of the chunk is the next one's."""
    rules = {"pd_ratio": _by_load, "tbt_slo": _by_tbt, "prefix_aware": _by_prefix}
    _one_chunk(plan, lambda prompt: rules[knobs.rule](plan, prompt, knobs), knobs.align, merge=knobs.merge)


def _one_chunk(plan: Plan, rows_of: Callable[[Job], int], align: str, merge: bool = False) -> None:
    """rows_of(prompt): C. shrink: a smaller chunk where that gives whole tiles, dummy tokens where it does not."""
    slots, tile = plan.slots, plan.limits.tile
    line = plan.prompts() + plan.waiting
    prompt = line[0] if line else None
    if prompt is not None and _slot_blocks(plan, prompt) > plan.blocks.num_free:
        prompt = None
    decodes = plan.decode_all(slots if prompt is None else slots - 1)
    if prompt is None or plan.victims:
        return
    left = _beside(plan, rows_of(prompt), decodes)
    shares: list[tuple[Job, int]] = []
    free = plan.blocks.num_free
    for job in line if merge else line[:1]:
        free -= _slot_blocks(plan, job)
        if left <= 0 or free < 0:
            break
        lacking = plan.to_prefill(job)
        shares.append((job, min(left, lacking)))
        left -= lacking
    if align == "shrink" and shares:
        job, tokens = shares.pop()
        before = decodes + sum(tokens for _, tokens in shares)
        whole_tiles = (before + tokens) // tile * tile - before
        shares.append((job, whole_tiles if whole_tiles > 0 else tokens))
    granted = 0
    for job, tokens in shares:
        got = plan.run(job, tokens) if job.order >= 0 else plan.admit(job, tokens, reserve=_slot(plan, job))
        if not got:
            break
        granted += got
    if granted and align != "none":
        plan.pad_to(-(-plan.used // tile) * tile)


def _slot(plan: Plan, job: Job) -> int:
    return _longest(plan, job, "longest")


def _slot_blocks(plan: Plan, job: Job) -> int:
    """Blocks of the slot that a prompt still needs."""
    return 0 if job.order >= 0 else plan.blocks.number_for(_slot(plan, job))


def _beside(plan: Plan, rows: int, decodes: int) -> int:
    """The chunk of a batch of C rows: C - (B - 1); with B > C what the decodes leave of C, or of the tile above."""
    if rows >= plan.slots:
        return rows - (plan.slots - 1)
    tile = plan.limits.tile
    return (rows if decodes < rows else -(-(decodes + 1) // tile) * tile) - decodes


def _fewest_rows(plan: Plan) -> int:
    """The smallest whole number of tiles with room for a chunk beside B - 1 decodes."""
    tile = plan.limits.tile
    return -(-plan.slots // tile) * tile


def _by_load(plan: Plan, prompt: Job, knobs: DynamicChunk) -> int:
    """C for the share of prompt tokens in all tokens still to come, answers counted by their declared limits."""
    prefill, promised = plan.books.prefill_tokens, plan.books.promised_tokens
    share = prefill / (prefill + promised) if prefill + promised else 0.0
    if share > knobs.prefill_heavy:
        return knobs.large
    return knobs.small if share < knobs.decode_heavy else knobs.middle


def _by_tbt(plan: Plan, prompt: Job, knobs: DynamicChunk) -> int:
    """C: the most tiles with which the iteration keeps the target; one that holds a chunk at least."""
    least = _fewest_rows(plan)
    most = max(least, knobs.largest)
    if not any(job.prefilled for job in plan.books.running):
        return most
    decodes, lacking = plan.shape, plan.to_prefill(prompt)

    def shape_of(rows: int) -> BatchShape:
        tokens = min(lacking, _beside(plan, rows, decodes.decodes))
        dummies = 0 if knobs.align == "none" else -(decodes.decodes + tokens) % plan.limits.tile
        return decodes._replace(chunks=((tokens, prompt.known - lacking),), dummy_tokens=dummies)

    return _most_rows(plan, round(knobs.tbt_target_s * NS_PER_S), least, most, shape_of)


def _by_prefix(plan: Plan, prompt: Job, knobs: DynamicChunk) -> int:
    """C: the most tiles whose chunk on its prefix takes no longer than the first one took, by t(L, x) = c + g L + b x +
    a (2 L x + x^2)."""
    tile, beside = plan.limits.tile, plan.slots - 1
    least = _fewest_rows(plan)
    most = max(least, knobs.first)
    prefix = prompt.known - plan.to_prefill(prompt)
    if not prefix:
        return most
    first = most - beside
    c, g, b, a = knobs.c_ns, knobs.g_ns, knobs.b_ns, knobs.a_ns
    if not (a or b):
        c, g, b, a = _from_estimates(plan, prefix, first)

    def fits(rows: int) -> bool:
        # A hair less, lest rounding turn a whole tile into the one below.
        x = rows - beside - 1e-6
        return c + g * prefix + b * x + a * (2 * prefix * x + x * x) <= c + b * first + a * first * first

    if b + 2 * a * prefix <= 0:
        return least
    return max([least] + [rows for rows in range(least, most + 1, tile) if rows > beside and fits(rows)])


def _from_estimates(plan: Plan, prefix: int, first: int) -> tuple[float, float, float, float]:
    """c, g, b, a from four estimates: the first chunk and half of it, on no prefix and on this one."""
    half = max(1, first // 2)
    full = max(half + 1, first)

    def takes(tokens: int, prefix: int) -> Ns:
        return _estimate(plan, BatchShape(((tokens, prefix),)))

    more_half, more_full = takes(half, prefix) - takes(half, 0), takes(full, prefix) - takes(full, 0)
    a = max(0.0, (more_full - more_half) / (2 * prefix * (full - half)))
    g = more_half / prefix - 2 * a * half
    b = (takes(full, 0) - takes(half, 0)) / (full - half) - a * (full + half)
    return takes(half, 0) - b * half - a * half * half, g, b, a


def _most_rows(plan: Plan, limit_ns: Ns, least: int, most: int, shape_of: Callable[[int], BatchShape]) -> int:
    """The most whole tiles within the limit; a batch of more tiles is taken to last no less."""
    tile = plan.limits.tile
    low, high = least // tile, most // tile
    while low < high:
        middle = -(-(low + high) // 2)
        fits = _estimate(plan, shape_of(middle * tile)) <= limit_ns
        low, high = (middle, high) if fits else (low, middle - 1)
    return max(least, low * tile)


def _estimate(plan: Plan, shape: BatchShape) -> Ns:
    assert plan.limits.estimate is not None
    return plan.limits.estimate(shape)


def vllm_v1(plan: Plan, knobs: VllmV1) -> None:
    """vLLM's v1/core/sched/scheduler.py: running requests in order, each what it lacks; waiting ones if none was
    preempted and the whole prompt would fit. scheduling=priority: the least urgent gives way, the most urgent is next;
    a prompt that has to give way to itself ends the look at the running ones."""
    alone = plan.books.num_running + len(plan.waiting) == 1
    limit = NO_LIMIT if alone else knobs.long_prefill_token_threshold or NO_LIMIT
    by_priority = knobs.scheduling == "priority"

    def urgency(job: Job) -> tuple[int, Ns, int]:
        return job.request.priority, job.request.arrival_ns, job.request.id

    first_to_go = urgency if by_priority else None
    for group in plan.free():
        if group.jobs and group.decodes:
            plan.decode(group, NO_LIMIT, first_to_go)
            continue
        for job in list(group.jobs):
            while job.order >= 0 and plan.left and not plan.run(job, limit):
                plan.preempt(first_to_go)
            if by_priority and job.order < 0:
                return
    while plan.waiting and plan.left and not plan.victims:
        job = min(plan.waiting, key=urgency) if by_priority else plan.waiting[0]
        if not plan.admit(job, min(job.known, limit), room_for=job.known if knobs.reserve_full else 0):
            break


def predicted_sjf(plan: Plan, knobs: PredictedSjf) -> None:
    """Shortest job first by predicted work, a second of waiting worth so many tokens; batches as in Sarathi-Serve."""

    def work(job: Job) -> tuple[float, Ns, int]:
        request = job.request
        answer = min(request.predicted_tokens or request.max_output_tokens, request.max_output_tokens)
        left = max(1, answer - job.delivered)
        tokens = job.known + knobs.output_weight * left + knobs.ageing * request.arrival_ns / NS_PER_S
        return tokens, request.arrival_ns, request.id

    _stall_free(plan, knobs.chunk_size, lambda: min(plan.waiting, key=work))


def slo_aware(plan: Plan, knobs: SloAware) -> None:
    """After Niyama: the iteration is filled to the tightest TBT target among the running requests; slack is the time to
    the deadline less the iterations that the prompt still needs; who could not be in time even if started now, behind
    everybody more urgent, steps back."""
    targets = parse_classes(knobs.classes)

    def target_ns(job: Job) -> tuple[Ns, Ns]:
        own = targets.get(job.request.slo)
        ttft_s = knobs.ttft_s if own is None or own.ttft_s is None else own.ttft_s
        tbt_s = knobs.tbt_s if own is None or own.tbt_s is None else own.tbt_s
        return round(ttft_s * NS_PER_S), round(tbt_s * NS_PER_S)

    def due_ns(job: Job) -> Ns:
        ttft, tbt = target_ns(job)
        return job.last_token_ns + tbt if job.delivered else job.request.arrival_ns + ttft

    def room(prefix: int) -> tuple[int, Ns]:
        """Tokens for prompts beside the decodes, and how long such an iteration takes."""
        shape = plan.shape
        if plan.limits.estimate is None:
            return knobs.chunk_size - shape.decodes, 0

        def shape_of(rows: int) -> BatchShape:
            return shape._replace(chunks=((rows - shape.decodes, prefix),))

        least = (shape.decodes // plan.limits.tile + 1) * plan.limits.tile
        rows = max(least, knobs.chunk_size)
        admitted = plan.books.running + plan.books.closing
        if any(job.prefilled for job in plan.books.running):
            rows = _most_rows(plan, min(target_ns(job)[1] for job in admitted), least, rows, shape_of)
        return rows - shape.decodes, _estimate(plan, shape_of(rows))

    def late_already(job: Job) -> bool:
        return knobs.relegate and job.request.arrival_ns + target_ns(job)[0] < plan.now_ns

    plan.decode_all(first_to_go=lambda job: (job.request.priority, job.order))
    if not plan.prompts() and not plan.waiting:
        return
    tokens, takes_ns = room(0)
    per_iteration = max(1, tokens)
    prompts = plan.prompts() + ([] if plan.victims else _candidates(plan.waiting, targets, knobs.window, late_already))

    def latest_start_ns(job: Job) -> Ns:
        return due_ns(job) - -(-job.lacking // per_iteration) * takes_ns

    in_time: list[Job] = []
    late: list[Job] = []
    ahead = 0
    for job in sorted(prompts, key=lambda job: (job.request.priority, latest_start_ns(job), job.request.id)):
        if knobs.relegate and plan.now_ns + -(-(ahead + job.lacking) // per_iteration) * takes_ns > due_ns(job):
            late.append(job)
        else:
            in_time.append(job)
            ahead += job.lacking
    order = in_time + late
    left = room(order[0].context)[0] if order and order[0].context else tokens
    line_stands = False
    for job in order:
        if left <= 0:
            return
        if job.order >= 0:
            left -= plan.run(job, left)
        elif not line_stands:
            # Once one who waits is not let in, nobody behind it is.
            got = plan.admit(job, left, reserve=job.known)
            left -= got
            line_stands = not got


def most_in_time(plan: Plan, knobs: MostInTime) -> None:
    """Moore and Hodgson (Moore 1968): jobs by deadline, and whenever the last of them would be late, the longest of
    those taken so far is given up. Given-up and late prompts start while few others of their kind run."""
    ttft_ns, tbt_ns = round(knobs.ttft_s * NS_PER_S), round(knobs.tbt_s * NS_PER_S)

    def room(prefix: int) -> tuple[int, Ns]:
        """Tokens for prompts beside the decodes, and how long such an iteration takes."""
        shape = plan.shape
        if plan.limits.estimate is None:
            return knobs.chunk_size - shape.decodes, 0

        def shape_of(rows: int) -> BatchShape:
            return shape._replace(chunks=((rows - shape.decodes, prefix),))

        least = (shape.decodes // plan.limits.tile + 1) * plan.limits.tile
        rows = max(least, knobs.chunk_size)
        if not any(job.prefilled for job in plan.books.running):
            return rows - shape.decodes, _estimate(plan, shape_of(rows))
        most_ns = round(knobs.use * knobs.tbt_s * NS_PER_S)
        rows = _most_rows(plan, most_ns, least, rows, shape_of)
        takes_ns = _estimate(plan, shape_of(rows))
        return 0 if takes_ns > most_ns else rows - shape.decodes, takes_ns

    def due_ns(job: Job) -> Ns:
        return job.last_token_ns + tbt_ns if job.delivered else job.request.arrival_ns + ttft_ns

    plan.decode_all()
    if not plan.prompts() and not plan.waiting:
        return
    left, takes_ns = room(0)
    if left <= 0:
        return
    token_ns = takes_ns / max(1, left)
    preempted = [job for job in plan.waiting if job.preemptions]
    others = [job for job in plan.waiting if not job.preemptions]
    lost = [job for job in others if job.request.arrival_ns + ttft_ns < plan.now_ns]
    in_time = others[len(lost) :][: knobs.window]
    taken: list[Job] = []
    given_up: list[Job] = [] if plan.victims else lost[: knobs.window]
    work_ns = 0.0
    candidates = plan.prompts() + ([] if plan.victims else preempted + in_time)
    for job in sorted(candidates, key=lambda job: (due_ns(job), job.request.id)):
        taken.append(job)
        work_ns += job.lacking * token_ns
        if plan.now_ns + work_ns > due_ns(job):
            longest = min(taken, key=lambda one: (-one.lacking, one.request.id))
            taken.remove(longest)
            given_up.append(longest)
            work_ns -= longest.lacking * token_ns
    given_up.sort(key=lambda job: (job.order < 0, job.lacking, job.request.id))
    order = taken + given_up
    if order and order[0].context:
        left, _ = room(order[0].context)
    for job in taken:
        if left <= 0:
            return
        got = plan.run(job, left) if job.order >= 0 else plan.admit(job, left, reserve=job.known)
        if not got:
            return
        left -= got
    running = plan.books.running
    most = knobs.lost * plan.books.num_running if any(job.prefilled for job in running) else NO_LIMIT
    late = sum(
        bool(job.delivered) and job.first_token_ns - job.request.arrival_ns > knobs.ttft_s * NS_PER_S for job in running
    )
    for job in given_up:
        if left <= 0:
            return
        if job.order >= 0:
            left -= plan.run(job, left)
        elif late < max(1.0, most):
            got = plan.admit(job, left, reserve=job.known)
            if not got:
                return
            left -= got
            late += 1


def _candidates(
    waiting: list[Job], targets: Mapping[str | None, Any], window: int, late_already: Callable[[Job], bool]
) -> list[Job]:
    """Of every priority and class with targets of its own the preempted requests in front, the first that are in time,
    then the first late."""
    classes: dict[tuple[int, str | None], list[Job]] = {}
    for job in waiting:
        slo = job.request.slo if job.request.slo in targets else None
        classes.setdefault((job.request.priority, slo), []).append(job)
    chosen = []
    for jobs in classes.values():
        preempted = next((at for at, job in enumerate(jobs) if not job.preemptions), len(jobs))
        rest = jobs[preempted:]
        in_time = [job for job in rest if not late_already(job)][:window]
        late = [job for job in rest if late_already(job)][: window - len(in_time)]
        chosen += jobs[: min(preempted, window)] + in_time + late
    return chosen


PAGES: Mapping[type[Policy], Callable[[Plan, Any], None]] = {
    Chunked: chunked,
    GoodputDrafts: chunked,
    DecodeMaximal: decode_maximal,
    DynamicChunk: dynamic_chunk,
    MostInTime: most_in_time,
    Orca: orca,
    PredictedSjf: predicted_sjf,
    PrefillPriority: prefill_priority,
    RequestLevel: request_level,
    ShortestPromptFirst: shortest_prompt_first,
    SloAware: slo_aware,
    VllmV1: vllm_v1,
}
