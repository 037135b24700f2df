"""What an engine knows, request by request: who waits, who runs, what everybody has computed, delivered and holds.

Nothing here is clever. A running request is looked at in every iteration, sums are added up when somebody asks for
them, and a decode is a request that lacks one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

from policies.work.batch import BatchShape
from policies.work.request import Ns, Request
from simulator.reference.blocks import Blocks
from simulator.reference.plan import Plan, Row

NEVER: Ns = -1


@dataclass(eq=False)
class Job:
    """One request on one engine.

    output: tokens after which its answer ends. context: tokens whose keys and values are there or in a planned batch.
    sampled: output tokens of planned batches; delivered: of completed ones. order: number of its admission, -1 while it
    waits. life: grows whenever it loses its place, so that what is still in flight for it is dropped.
    steps: when each token sampled for it was done; segments: which of these it received, as (from, to).
    """

    request: Request
    output: int
    context: int = 0
    sampled: int = 0
    delivered: int = 0
    order: int = -1
    life: int = 0
    prefilled: bool = False
    chunks_in_flight: int = 0
    table: list[int] = field(default_factory=list)
    status: str = "waiting"
    reason: str = ""
    admitted_ns: Ns = NEVER
    first_token_ns: Ns = NEVER
    last_token_ns: Ns = NEVER
    finished_ns: Ns = NEVER
    preemptions: int = 0
    cached: int = 0
    steps: list[Ns] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)

    @property
    def known(self) -> int:
        """Tokens of its text so far, those being sampled included."""
        return self.request.prompt_tokens + self.sampled

    @property
    def lacking(self) -> int:
        """Tokens to compute before the next one can be sampled: the rest of a prompt, or one while it decodes."""
        return self.known - self.context

    @property
    def in_flight(self) -> bool:
        return self.chunks_in_flight > 0 or self.sampled > self.delivered

    def receive(self, now_ns: Ns) -> None:
        """The token sampled last is delivered."""
        step = len(self.steps) - 1
        if self.segments and self.segments[-1][1] == step:
            self.segments[-1] = self.segments[-1][0], step + 1
        else:
            self.segments.append((step, step + 1))
        self.delivered += 1
        self.last_token_ns = now_ns
        if self.first_token_ns == NEVER:
            self.first_token_ns = now_ns


@dataclass(eq=False)
class Group:
    """A half-done prompt, or decodes that stay together: a micro-batch of a pipeline. peak: the most it ever had."""

    jobs: list[Job]
    peak: int = 1

    @property
    def decodes(self) -> bool:
        return self.jobs[0].prefilled

    @property
    def in_flight(self) -> bool:
        return any(job.in_flight for job in self.jobs)

    def take_in(self, jobs: list[Job]) -> None:
        self.jobs = sorted(self.jobs + jobs, key=lambda job: job.order)
        self.peak = max(self.peak, len(self.jobs))


class Batch(NamedTuple):
    """A planned iteration. groups: of its decodes, those whose prompt it completes included."""

    number: int
    planned_ns: Ns
    rows: list[Row]
    shape: BatchShape
    groups: list[Group]
    preempted: int
    cached_tokens: int


@dataclass(frozen=True)
class Limits:
    """What an engine may do. longest: prompt + declared output. micro_batches: stages of its pipeline. ahead: it plans
    one batch ahead of the running one. chase: a prompt's next chunk may be planned while its last one is in flight.
    together: decodes of one batch stay together; answers_together: they end together. estimate: predicted duration of a
    batch, if there is a cost model."""

    num_blocks: int
    block_size: int
    longest: int
    token_budget: int | None = None
    max_num_seqs: int | None = None
    watermark: float = 0.0
    micro_batches: int = 1
    ahead: bool = False
    chase: bool = False
    together: bool = False
    answers_together: bool = False
    tile: int = 128
    prefix_caching: bool = False
    free_order: str = "0.32"
    estimate: Callable[[BatchShape], Ns] | None = None


class Books:
    """The requests of one engine. page(plan, knobs): writes the next batch, as the policy's paper says.

    waiting: in order of arrival, preempted requests in front. line: whoever runs, in order of admission (in a pipeline
    by micro-batches). closing: whose last allowed token is in flight; nobody plans or preempts them any more.
    withheld: requests that are done and end with the last of their batch, with their place in line.
    """

    def __init__(self, page: Callable[[Plan, Any], None], knobs: Any, limits: Limits) -> None:
        self.page, self.knobs, self.limits = page, knobs, limits
        self.blocks = Blocks(limits.num_blocks, limits.block_size, limits.prefix_caching, limits.free_order)
        self.watermark_blocks = ceil(limits.watermark * limits.num_blocks)
        self.grouped = limits.micro_batches > 1 or limits.together
        self.waiting: list[Job] = []
        self.line: list[Group] = []
        self.closing: list[Job] = []
        self.withheld: dict[Job, Group] = {}
        self.batches_in_flight = 0
        self.alarm_ns: Ns | None = None
        self._admissions = self._batches = self._stopped = 0

    # What can be counted

    @property
    def running(self) -> list[Job]:
        """Whoever may be planned or preempted."""
        return [job for group in self.line for job in group.jobs]

    @property
    def num_running(self) -> int:
        return len(self.running) + len(self.closing)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of prompts (and tokens to recompute) not yet planned."""
        return sum(job.lacking for job in self.waiting + self.running if not job.prefilled)

    @property
    def promised_tokens(self) -> int:
        """Declared output tokens not yet planned."""
        return sum(job.request.max_output_tokens - job.sampled for job in self.waiting + self.running)

    # Requests come and go

    def add(self, request: Request, output: int, now_ns: Ns) -> Job:
        job = Job(request, min(output, request.max_output_tokens))
        job.reason = self.why_not(request)
        if job.reason:
            job.status, job.finished_ns = "rejected", now_ns
        else:
            self.waiting.append(job)
        return job

    def why_not(self, request: Request) -> str:
        """Why a request could never run here; empty if it can. The last token's keys and values are never stored."""
        length = request.prompt_tokens + request.max_output_tokens
        if length > self.limits.longest:
            return f"prompt + output limit = {length} tokens, more than the longest allowed {self.limits.longest}"
        needed, total = self.blocks.number_for(length - 1), self.blocks.total
        if needed > total - self.watermark_blocks:
            kept = f", {self.watermark_blocks} of them kept free by the watermark" if self.watermark_blocks else ""
            return f"needs {needed} KV blocks, the pool has {total}{kept}"
        return ""

    def end(self, job: Job, status: str, reason: str, now_ns: Ns) -> None:
        """A request ends, wherever it is; what is in flight for it is dropped."""
        if job.order < 0:
            self.waiting.remove(job)
        else:
            self._lose_place(job)
        job.status, job.reason, job.finished_ns = status, reason, now_ns

    def reject_stuck(self, now_ns: Ns) -> Job | None:
        """Nothing is in flight and the page plans nothing: the head of the queue can never start."""
        if self.batches_in_flight or self.alarm_ns is not None or not self.waiting:
            return None
        head = self.waiting[0]
        budget = self.limits.token_budget
        reason = (
            f"{type(self.knobs).__name__} cannot start it on an idle engine ({head.known} tokens, token budget "
            f"{'none' if budget is None else budget}, {self.blocks.number_for(head.known)} KV blocks of "
            f"{self.blocks.num_free} free)"
        )
        self.end(head, "failed" if head.delivered else "rejected", reason, now_ns)
        return head

    # The two moments of a batch

    def plan(self, now_ns: Ns) -> Batch | None:
        """Let the page write the next batch. None: there is nothing to run now."""
        if self.limits.ahead and self.batches_in_flight:
            self._set_aside()
        while True:
            plan = Plan(self, now_ns)
            self.page(plan, self.knobs)
            if plan.rows or not plan.victims:
                break
            # A plan that only preempted has freed blocks: ask again.
            self._stopped += plan.victims
        self.alarm_ns = plan.alarm_ns
        if not plan.rows:
            return None
        shape = plan.shape
        groups = self._advance(plan.rows)
        batch = Batch(self._batches, now_ns, plan.rows, shape, groups, self._stopped + plan.victims, plan.cached_tokens)
        self._stopped = 0
        self._batches += 1
        self.batches_in_flight += 1
        return batch

    def complete(self, batch: Batch, now_ns: Ns) -> list[Job]:
        """The last stage is done with a batch: deliver its tokens; whoever has all of them ends and is returned."""
        self.batches_in_flight -= 1
        finished = []
        for row in batch.rows:
            job = row.job
            if row.chunk:
                job.chunks_in_flight -= 1
            if not row.samples:
                continue
            job.steps.append(now_ns)
            if row.life == job.life:
                job.receive(now_ns)
                if job.delivered == job.output:
                    finished.append(job)
        finished.sort(key=lambda job: job.order)
        if self.limits.answers_together:
            for job in finished:
                self._withhold(job)
            finished = self.return_answers(now_ns)
        else:
            for job in finished:
                self.end(job, "finished", "", now_ns)
        if self.grouped:
            self._merge([group for group in batch.groups if group in self.line])
        return finished

    def return_answers(self, now_ns: Ns) -> list[Job]:
        """End whoever is done and was in a batch (in a pipeline: a micro-batch) of which nobody decodes any more."""
        apart, alone = self.limits.micro_batches > 1, not self.running and not self.closing
        done = [job for job, group in self.withheld.items() if alone or (apart and not group.jobs)]
        for job in done:
            self.end(job, "finished", "", now_ns)
        return done

    # What a plan does to the books

    def start(self, job: Job, cached: int, now_ns: Ns) -> None:
        """A waiting request is admitted, its first `cached` tokens being there already."""
        self.waiting.remove(job)
        self.line.append(Group([job]))
        job.order, job.status, job.context = self._admissions, "running", cached
        self._admissions += 1
        if job.admitted_ns == NEVER:
            job.admitted_ns, job.cached = now_ns, cached

    def stop(self, job: Job) -> None:
        """A running request is preempted: it waits in front of the queue and will be computed again."""
        self._lose_place(job)
        job.status = "waiting"
        job.preemptions += 1
        self.waiting.insert(0, job)

    def split(self, group: Group, first: int) -> None:
        """Only the first of a micro-batch are decoded; the rest stands behind them as one of its own."""
        if len(group.jobs) > first:
            rest = Group(group.jobs[first:], len(group.jobs) - first)
            group.jobs = group.jobs[:first]
            self.line.insert(self.line.index(group) + 1, rest)

    def _advance(self, rows: list[Row]) -> list[Group]:
        """Count a plan as planned. A prompt that it completes decodes from now on, beside the decodes of the batch."""
        of_job = {job: group for group in self.line for job in group.jobs}
        groups = list(dict.fromkeys(of_job[row.job] for row in rows if not row.chunk))
        for row in rows:
            job = row.job
            job.chunks_in_flight += row.chunk
            job.sampled += row.samples
            if row.chunk and row.samples:
                job.prefilled = True
                if self.grouped and groups:
                    self.line.remove(of_job[job])
                    groups[0].take_in([job])
                else:
                    groups.append(of_job[job])
        return groups

    def _merge(self, groups: list[Group]) -> None:
        """Decodes that ran in one batch stay together from now on, where the first of them stands."""
        if len(groups) > 1:
            first = min(groups, key=self.line.index)
            first.take_in([job for group in groups if group is not first for job in group.jobs])
            self.withheld = {job: first if group in groups else group for job, group in self.withheld.items()}
            self.line = [group for group in self.line if group is first or group not in groups]

    def _set_aside(self) -> None:
        """Whose declared limit the batch in flight reaches is not planned any more."""
        for group in list(self.line):
            for job in list(group.jobs):
                if job.prefilled and job.sampled == job.request.max_output_tokens:
                    self._out_of_line(job)
                    self.closing.append(job)

    def _withhold(self, job: Job) -> None:
        """A request is done: it keeps slot and blocks until its answer is returned."""
        if job in self.closing:
            self.closing.remove(job)
            group = Group([])
        else:
            group = next(group for group in self.line if job in group.jobs)
            self._out_of_line(job)
        self.withheld[job] = group
        job.life += 1

    def _lose_place(self, job: Job) -> None:
        if job in self.closing:
            self.closing.remove(job)
        elif job in self.withheld:
            del self.withheld[job]
        else:
            self._out_of_line(job)
        self.blocks.release(job, min(job.context, job.request.prompt_tokens + job.delivered - 1))
        job.order, job.context, job.sampled, job.prefilled = -1, 0, job.delivered, False
        job.life += 1

    def _out_of_line(self, job: Job) -> None:
        group = next(group for group in self.line if job in group.jobs)
        group.jobs.remove(job)
        if not group.jobs:
            self.line.remove(group)
