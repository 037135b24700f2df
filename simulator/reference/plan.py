"""The batch being written: what a policy's page can see and ask for, each request by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from policies.work.batch import BatchShape
from policies.work.request import Ns

if TYPE_CHECKING:
    from simulator.reference.books import Books, Group, Job


class Row(NamedTuple):
    """What a batch does for one request: `tokens` of them on a context of `prefix`. chunk: of a prompt. samples: it
    ends with a new token. life: of the request, when it was planned."""

    job: Job
    tokens: int
    prefix: int
    chunk: bool
    samples: bool
    life: int


class Plan:
    """rows: what has been granted. victims: requests preempted. dummies: padding. alarm_ns: when to ask again at the
    latest."""

    def __init__(self, books: Books, now_ns: Ns) -> None:
        self.books, self.now_ns = books, now_ns
        self.limits, self.blocks, self.waiting = books.limits, books.blocks, books.waiting
        self.rows: list[Row] = []
        self.victims = 0
        self.dummies = 0
        self.cached_tokens = 0
        self.alarm_ns: Ns | None = None

    # What a page sees

    @property
    def used(self) -> int:
        return sum(row.tokens for row in self.rows)

    @property
    def left(self) -> int:
        """Tokens that may still be granted."""
        budget = self.limits.token_budget
        return (1 << 60 if budget is None else budget) - self.used

    @property
    def decodes(self) -> int:
        return sum(not row.chunk for row in self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that can run: what the pool cannot hold never does."""
        return min(self.limits.longest, self.blocks.total * self.blocks.size)

    @property
    def slots(self) -> int:
        """Requests of the longest length that fit in memory and may run at once, per micro-batch."""
        fit = self.blocks.total // max(1, self.blocks.number_for(self.longest))
        if self.limits.max_num_seqs is not None:
            fit = min(fit, self.limits.max_num_seqs)
        return max(1, fit // self.limits.micro_batches)

    def free(self) -> list[Group]:
        """Whoever may be planned now: not in flight, unless the engine plans ahead."""
        limits = self.limits
        return [
            group
            for group in self.books.line
            if limits.ahead or not group.in_flight or (limits.chase and not group.decodes)
        ]

    def decoding(self) -> list[Group]:
        return [group for group in self.free() if group.decodes]

    def prompts(self) -> list[Job]:
        """Half-done prompts that may be planned now."""
        return [group.jobs[0] for group in self.free() if not group.decodes]

    def to_prefill(self, job: Job) -> int:
        """Tokens to compute of a prompt, running or waiting: a prefix hit needs none."""
        return job.lacking if job.order >= 0 else job.known - len(self.blocks.hits(job)) * self.blocks.size

    @property
    def shape(self) -> BatchShape:
        contexts = [row.prefix for row in self.rows if not row.chunk]
        return BatchShape(
            tuple((row.tokens, row.prefix) for row in self.rows if row.chunk),
            len(contexts),
            sum(contexts),
            max(contexts, default=0),
            self.dummies,
            sum(row.samples for row in self.rows),
            0,
        )

    # What it can ask for

    def run(self, job: Job, tokens: int) -> int:
        """Up to `tokens` tokens of a running request; returns the tokens granted, 0 if blocks are short."""
        tokens = min(tokens, job.lacking, self.left)
        if tokens <= 0 or not self.blocks.extend(job, job.context + tokens):
            return 0
        return self._grant(job, tokens)

    def admit(self, job: Job, tokens: int, *, reserve: int = 0, room_for: int = 0) -> int:
        """Start a waiting request with up to `tokens` tokens; returns the tokens granted.

        reserve: it takes blocks for so many tokens at once. room_for: so many have to fit in free blocks, though only
        those of the tokens granted are taken.
        """
        cached = len(self.blocks.hits(job)) * self.blocks.size
        tokens = min(tokens, job.known - cached, self.left)
        most = self.limits.max_num_seqs
        if tokens <= 0 or (most is not None and self.books.num_running >= most):
            return 0
        held = max(cached + tokens, reserve)
        if not self.blocks.enter(job, cached, held, room_for, self.books.watermark_blocks):
            return 0
        self.books.start(job, cached, self.now_ns)
        self.cached_tokens += cached
        return self._grant(job, tokens)

    def decode(self, group: Group, most: int, first_to_go: Callable[[Job], Any] | None = None) -> None:
        """One token for each of a group, at most `most` of them; where blocks are short somebody is preempted."""
        most = min(most, self.left)
        if most <= 0:
            return
        self.books.split(group, most)
        for job in list(group.jobs):
            while job.order >= 0 and not self.run(job, 1):
                self.preempt(first_to_go)

    def decode_all(self, at_most: int | None = None, first_to_go: Callable[[Job], Any] | None = None) -> int:
        """One token for every decode that is free; in a pipeline for an even share of the running requests. Returns
        how many."""
        if at_most is None:
            at_most = -(-self.books.num_running // self.limits.micro_batches)
        for group in self.decoding():
            self.decode(group, at_most - self.decodes, first_to_go)
        return self.decodes

    def preempt(self, first_to_go: Callable[[Job], Any] | None = None) -> None:
        """Stop whoever goes first, by default who was admitted last; what this plan granted to it is undone."""
        victim = max(self.books.running, key=first_to_go if first_to_go is not None else lambda job: job.order)
        for row in self.rows:
            if row.job is victim:
                if row.chunk:
                    self.blocks.not_computed(victim, row.prefix, victim.context)
                victim.context = row.prefix
        self.rows = [row for row in self.rows if row.job is not victim]
        self.books.stop(victim)
        self.victims += 1

    def pad_to(self, rows: int) -> None:
        """Fill the batch with dummy tokens up to so many rows."""
        self.dummies = max(0, rows - self.used) if self.used else 0

    def _grant(self, job: Job, tokens: int) -> int:
        end = job.context + tokens
        if not job.prefilled:
            self.blocks.computed(job, end)
        self.rows.append(Row(job, tokens, job.context, not job.prefilled, end == job.known, job.life))
        job.context = end
        return tokens
