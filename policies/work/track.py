"""One request on its way through a scheduler: what is computed of it, what it holds, and what it has delivered."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from policies.work.request import Ns, Request

if TYPE_CHECKING:
    from policies.kv_memory.extent_ledger import Extent
    from policies.work.cohort import Cohort

NEVER: Ns = -1


class Track:
    """A waiting, running or ended request. Read-only to policies; only scheduler, draft and ledger write it.

    order: admission number, -1 while waiting; a readmitted request gets a new one.
    known: prompt tokens + output tokens sampled or promised. lacking = known - context is what has to be computed
        before the next token can be sampled; a decoding request lacks exactly 1.
    produced: tokens delivered in closed segments; a member of a cohort owes the rest to the cohort's steps.
    ends_after: output tokens after which the oracle ends it (never more than the declared limit).
    drafts: tokens drafted for it after its last step, to be verified in its next (only with speculation).
    drafts_accepted, rejections: drafts accepted so far, and steps in which one was not.
    blocks: KV blocks held when the request last joined a cohort, or now if it is in none.
    table, extents, named_blocks: what it holds, as its ledger writes it down: block ids, or the extents of its first
        named_blocks blocks (see `policies.kv_memory.extent_ledger`).
    segments: (cohort number, from step, to step), half-open; with the cohorts' times they give every token's time.
    """

    __slots__ = (
        "admitted_ns",
        "base",
        "blocks",
        "cached_total",
        "chunks_in_flight",
        "closing",
        "cohort",
        "computed",
        "decodes_from",
        "drafts",
        "drafts_accepted",
        "ends_after",
        "epoch",
        "extents",
        "finished_ns",
        "first_token_ns",
        "hands_over",
        "last_token_ns",
        "limit_after",
        "named_blocks",
        "order",
        "own_context",
        "own_known",
        "preemptions",
        "produced",
        "reason",
        "rejections",
        "request",
        "segment_start",
        "segments",
        "status",
        "table",
    )

    def __init__(self, request: Request, ends_after: int, computed: int = 0, produced: int = 0) -> None:
        self.request = request
        self.order = -1
        self.own_context = 0
        self.own_known = request.prompt_tokens + produced
        self.computed = computed
        self.chunks_in_flight = 0
        self.closing = False
        self.drafts = self.drafts_accepted = self.rejections = 0
        self.hands_over = False
        self.cohort: Cohort | None = None
        self.base = 0
        self.segment_start = 0
        self.decodes_from = 0
        self.segments: list[tuple[int, int, int]] = []
        self.produced = produced
        self.limit_after = request.max_output_tokens
        self.ends_after = min(ends_after, request.max_output_tokens)
        self.blocks = 0
        self.table: array[int] | None = None
        self.extents: list[Extent] | None = None
        self.named_blocks = 0
        self.epoch = 0
        self.preemptions = 0
        self.cached_total = 0
        self.status = "waiting"
        self.reason = ""
        self.admitted_ns: Ns = NEVER
        self.first_token_ns: Ns = NEVER
        self.last_token_ns: Ns = NEVER
        self.finished_ns: Ns = NEVER

    @property
    def context(self) -> int:
        """Tokens whose keys and values are cached or being computed in a planned batch."""
        cohort = self.cohort
        return self.own_context if cohort is None else self.base + cohort.planned

    @property
    def known(self) -> int:
        cohort = self.cohort
        return self.own_known if cohort is None else self.base + cohort.planned + 1

    @property
    def lacking(self) -> int:
        return self.own_known - self.own_context if self.cohort is None else 1

    @property
    def in_flight(self) -> int:
        cohort = self.cohort
        if cohort is None:
            return self.chunks_in_flight
        return cohort.planned - len(cohort.times)

    @property
    def delivered(self) -> int:
        """Output tokens delivered so far."""
        cohort = self.cohort
        if cohort is None:
            return self.produced
        return self.produced + max(0, len(cohort.times) - self.segment_start)

    def take_back_token(self) -> None:
        """Its last token was on its way but will not be delivered."""
        cohort, start, end = self.segments.pop()
        if end - 1 > start:
            self.segments.append((cohort, start, end - 1))
        self.produced -= 1

    def __repr__(self) -> str:
        return f"Track(request {self.request.id}, {self.status}, context {self.context} of {self.known})"
