"""The plan being written. A policy asks, the draft grants or refuses.

Budget, sequence slots, watermark, prefix hits, block reservation and the undoing of a victim's grant live here once,
so that a policy is nothing but the order in which it asks. A grant reserves its blocks at once, a refusal none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from policies.edges.compiling import mypyc_attr
from policies.edges.errors import PolicyError
from policies.kv_memory.swap import Preemption
from policies.work.batch import Batch, BatchShape, Chunk, Decodes, Verified
from policies.work.cohort import Cohort
from policies.work.request import Ns
from policies.work.speculator import Speculator
from policies.work.track import Track

if TYPE_CHECKING:
    from policies.scheduling.scheduler import Scheduler

UNLIMITED: Final = 1 << 60

# A named tuple made without its own constructor, which costs more than the rest of a grant. Final, as whatever a hot
# path uses of other modules, because compiled code then finds it without looking it up by name.
_new: Final = tuple.__new__
_Chunk: Final = Chunk
_BatchShape: Final = BatchShape


@mypyc_attr(acyclic=True, free_list_len=1)
class Draft:
    """One plan; what it has been granted when the policy returns is the batch.

    budget_left: tokens that may still be granted (below 1: none). preempted: victims of this plan so far. parts,
        chunks: the grants. decodes: requests that decode; draft_tokens: drafts that they verify beside.
    drafting: drafts to be made after this batch for whoever samples in it.
    only_now: the policy said that this plan holds for this moment only.
    """

    __slots__ = (
        "_scheduler",
        "alarm_ns",
        "budget_left",
        "cached_tokens",
        "chunks",
        "decodes",
        "draft_tokens",
        "drafting",
        "dummy_tokens",
        "grown",
        "joins",
        "only_now",
        "parts",
        "planned_ns",
        "preempted",
        "verified",
    )

    def __init__(self, scheduler: Scheduler, now_ns: Ns) -> None:
        self._scheduler = scheduler
        self.planned_ns = now_ns
        self.budget_left = scheduler.token_budget - scheduler.input_slots
        self.parts: list[Chunk | Decodes | Verified] = []
        self.chunks: list[Chunk] = []
        self.grown: list[Decodes] = []
        self.joins: list[tuple[Track, int]] = []
        self.preempted: list[Track] = []
        self.decodes = 0
        self.draft_tokens = 0
        self.drafting = scheduler.drafting
        self.verified: list[Verified] = []
        self.dummy_tokens = 0
        self.cached_tokens = 0
        self.alarm_ns: Ns | None = None
        self.only_now = False

    # What a policy may ask for

    def decode(self, cohort: Cohort, at_most: int | None = None, *, width: int | None = None) -> int:
        """Decode one token for the members of `cohort`; returns the tokens granted: one each, and the drafts that are
        verified beside.

        `at_most`, or a budget smaller than the cohort, splits off the first so many in admission order: `cohort` then
        names these, the rest stand by as a cohort of their own. 0 means that blocks are short (or nothing is left to
        grant); nothing is reserved then. `width`: most tokens of one request, drafts included.
        """
        if cohort.speculates:
            return self._verify(cohort, UNLIMITED if width is None else width) if at_most is None or at_most > 0 else 0
        scheduler = self._scheduler
        if cohort.planned != len(cohort.times):
            self._refuse_if_not_chased(cohort)
        size = cohort.size
        most = self.budget_left
        if at_most is not None and at_most < most:
            most = at_most
        if size > most or not size:
            if most <= 0 or not size:
                return 0
            scheduler.split(cohort, most)
            size = cohort.size
        part = cohort.plan_step(scheduler.ledger)
        if part is None:
            return 0
        self.budget_left -= size
        self.decodes += size
        self.parts.append(part)
        self.grown.append(part)
        return size

    def decode_all(self, at_most: int | None = None, *, first_to_go: Callable[[Track], Any] | None = None) -> int:
        """Decode the cohorts that are free to be planned, in admission order; returns the tokens granted.

        at_most: by default this micro-batch's even share of the running requests, which without a pipeline is all of
        them. Where blocks are short somebody is preempted until the others fit: the last admitted, or whoever has the
        largest `first_to_go` (O(running), in that moment alone).
        """
        scheduler = self._scheduler
        queues = scheduler.queues
        if at_most is None:
            at_most = queues.num_running
            if scheduler.micro_batches > 1:
                at_most = -(-at_most // scheduler.micro_batches)
        for cohort in queues.cohorts:
            # Counted anew each time: a victim may have been granted its decode before.
            while cohort.size and (left := at_most - self.decodes) > 0 and self.budget_left > 0:
                if self.decode(cohort, left):
                    break
                self.preempt(max(queues.running_tracks(), key=first_to_go) if first_to_go is not None else None)
        return self.decodes + self.draft_tokens

    def chunk(self, track: Track, tokens: int) -> int:
        """Prefill up to `tokens` more of a running prompt; returns the tokens granted, 0 if blocks are short."""
        if track.cohort is not None or track.order < 0 or track.closing:
            raise PolicyError(f"request {track.request.id} is {track.status} and has no prompt left to prefill")
        prefix = track.own_context
        granted = track.own_known - prefix
        if tokens < granted:
            granted = tokens
        if self.budget_left < granted:
            granted = self.budget_left
        if granted <= 0:
            return 0
        scheduler = self._scheduler
        ledger = scheduler.ledger
        context = holds = prefix + granted
        if scheduler.lookahead:
            holds = scheduler.with_lookahead(context)
        short = -(-holds // ledger.block_size) - track.blocks
        if short > 0:
            if short > ledger.free_blocks:
                return 0
            ledger.extend(track, holds)
        if ledger.prefix_caching:
            self._grant_chunk(track, granted, prefix)
            return granted
        # What _grant_chunk does, without the call.
        track.own_context = context
        track.chunks_in_flight += 1
        scheduler.queues.prefill_tokens -= granted
        self.budget_left -= granted + scheduler.input_slots
        chunk = _new(_Chunk, (track, granted, prefix, context == track.own_known))
        self.chunks.append(chunk)
        self.parts.append(chunk)
        return granted

    def admit(self, track: Track, tokens: int, *, reserve: int = 0, must_fit: int = 0, placeholders: int = 0) -> int:
        """Start a waiting request with up to `tokens` tokens of its prompt; returns the tokens granted.

        A prefix hit comes first and costs no budget. `reserve`: blocks for so many tokens are taken at once.
        `must_fit`: so many tokens must find free blocks now, but only the chunk's are taken. `placeholders`: one whose
        prefix hit leaves a single token starts as a speculating decode, with so many drafts that are none. Refused (0)
        when slots, budget or blocks are short, or when the watermark would be crossed.
        """
        scheduler = self._scheduler
        if track.order >= 0:
            raise PolicyError(f"request {track.request.id} is {track.status}, not waiting")
        queues = scheduler.queues
        if queues.num_running >= scheduler.max_num_seqs:
            return 0
        ledger = scheduler.ledger
        cached = max(ledger.cached_tokens(track), track.computed)
        granted = min(tokens, track.own_known - cached, self.budget_left)
        if granted <= 0:
            return 0
        admission = scheduler.admission
        if admission is not None:
            if not admission.lets_in(track, scheduler):
                return 0
            reserve = admission.reserve(track, reserve)
        width = granted
        if placeholders and track.own_known - cached == 1:
            width += placeholders
            if width > self.budget_left:
                return 0
        taken = cached + width
        if scheduler.lookahead:
            taken = scheduler.with_lookahead(taken)
        if reserve > taken:
            taken = reserve
        held = track.blocks
        if held:
            # Its KV was handed over and lies here already.
            needed = ledger.blocks_for(max(taken, must_fit)) - held
            if needed > 0 and needed > ledger.free_blocks - scheduler.watermark_blocks:
                return 0
        else:
            needed = ledger.admission_blocks(track, cached, max(taken, must_fit))
            if needed > ledger.free_blocks - scheduler.watermark_blocks:
                return 0
        swap = scheduler.swap
        shared = 0 if swap is None else ledger.shared_blocks(track, cached)
        scheduler.start(track, cached, self.planned_ns)
        if not held:
            ledger.admit(track, cached)
        ledger.extend(track, taken)
        if swap is not None:
            swap.bring_in(track, scheduler, shared)
        if admission is not None:
            admission.entered(track, scheduler)
        self.cached_tokens += cached - track.computed
        if width > granted:
            self._grant_with_placeholders(track, width, cached, taken)
        else:
            self._grant_chunk(track, granted, cached)
        return width

    def to_prefill(self, track: Track) -> int:
        """Tokens that a waiting request would have to prefill if it were admitted now: all but its prefix hit, or but
        what was handed over with it."""
        return track.own_known - max(self._scheduler.ledger.cached_tokens(track), track.computed)

    def resume(self, track: Track) -> int:
        """Bring back a swapped request (`queues.swapped`) and let it go on: its decode, or the rest of its prompt.

        Returns the tokens granted, 0 where slots, budget or blocks are short. `admit` does the same.
        """
        return self.admit(track, self.to_prefill(track), reserve=track.own_known)

    def preempt(self, track: Track | None = None, how: Preemption | None = None) -> Track | None:
        """Stop a running request, by default the last admitted: its blocks are freed, it waits in front of the queue.

        how: what becomes of its KV: `recompute` (prompt and output so far), `swap` (to host memory if there is any with
        room, else as recompute), `auto` (the cheaper), by default what the engine was told. A grant that this plan made
        to it is undone. None: nobody is left.
        """
        scheduler = self._scheduler
        if track is None:
            track = scheduler.last_admitted()
            if track is None:
                return None
        if track.order < 0 or track.closing:
            raise PolicyError(f"request {track.request.id} is {track.status}, not running: it cannot be preempted")
        self._take_back(track, how, set())
        return track

    def propose(self, tokens: int) -> None:
        """Let at most `tokens` tokens be drafted after this batch for everybody who samples in it, instead of the
        engine's k; nothing without speculation."""
        if tokens < self.drafting:
            self.drafting = max(0, tokens)

    def pad(self, multiple: int) -> int:
        """Fill the batch with dummy tokens to a whole number of `multiple` rows; returns how many were added."""
        rows = self.tokens
        self.dummy_tokens = -rows % multiple if rows else 0
        return self.dummy_tokens

    def pad_to(self, rows: int) -> int:
        """Fill the batch with dummy tokens up to `rows` rows; returns how many were added."""
        tokens = self.tokens
        self.dummy_tokens = max(0, rows - tokens) if tokens else 0
        return self.dummy_tokens

    def only_for_now(self) -> None:
        """Say that this plan followed from the time or from an estimate: asked a moment later, with nothing else
        changed, the policy might plan otherwise. It keeps a policy true to its promises."""
        self.only_now = True

    def wait_until(self, at_ns: Ns) -> None:
        """Ask for the next plan at `at_ns` at the latest, even if nothing arrives or ends before."""
        if self.alarm_ns is None or at_ns < self.alarm_ns:
            self.alarm_ns = at_ns

    @property
    def tokens(self) -> int:
        """Useful tokens granted so far, decodes and their drafts among them."""
        return self.decodes + self.draft_tokens + sum([chunk[1] for chunk in self.chunks])

    @property
    def shape(self) -> BatchShape:
        """The batch as it stands, for `host.estimate_ns`."""
        return self._shape_so_far()

    # How it becomes the batch, and how grants are booked and undone

    def _finish(self, number: int) -> Batch:
        """The plan is done: what it was granted as a batch."""
        chunks, grown = self.chunks, self.grown
        if len(chunks) == 1 and len(grown) == 1 and not self.drafting:
            # What _shape_so_far does, for the most common plan.
            _, tokens, prefix, samples = chunks[0]
            _, _, decodes, total, deepest = grown[0]
            shape = _new(
                _BatchShape,
                (((tokens, prefix),), decodes, total, deepest, self.dummy_tokens, decodes + samples, 0, 0, 0, 0),
            )
        else:
            shape = self._shape_so_far()
        batch = Batch(
            number, self.planned_ns, self.parts, chunks, grown, self.joins, self.preempted, self.cached_tokens, shape
        )
        if self.verified:
            batch.verified = self.verified
        return batch

    def _shape_so_far(self) -> BatchShape:
        chunks, grown = self.chunks, self.grown
        sampled = decodes = self.decodes
        if len(chunks) == 1:
            _, tokens, prefix, samples = chunks[0]
            pairs: tuple[tuple[int, int], ...] = ((tokens, prefix),)
            sampled += samples
        elif chunks:
            pairs = tuple([chunk[1:3] for chunk in chunks])
            sampled += sum([chunk[3] for chunk in chunks])
        else:
            pairs = ()
        if len(grown) == 1:
            _, _, _, total, deepest = grown[0]
        elif grown:
            total = sum([part[3] for part in grown])
            deepest = max([part[4] for part in grown])
        else:
            total = deepest = 0
        drafts = self.draft_tokens
        draft_context = 0
        for part in self.verified:
            context = part[3]
            total += context
            draft_context += context * (part[2] - 1)
            if context > deepest:
                deepest = context
        sampled += drafts
        return _new(
            _BatchShape,
            (pairs, decodes, total, deepest, self.dummy_tokens, sampled, 0, drafts, draft_context, self.drafting),
        )

    def _verify(self, cohort: Cohort, width: int) -> int:
        """Plan the next token of a speculating decode and the drafts that it holds, as many as there is room for.

        The model's longest sequence bounds them (vLLM keeps one position for the token to be sampled); drafts that find
        no room are dropped from the end.
        """
        assert isinstance(cohort, Speculator)
        scheduler = self._scheduler
        if cohort.planned != len(cohort.times) and not scheduler.chase_decodes:
            raise PolicyError("a speculating decode in flight cannot be decoded again")
        track = cohort.track
        context = cohort.context_total
        tokens = min(1 + track.drafts, width, self.budget_left, scheduler.max_model_len - context - 1)
        if tokens <= 0 or not cohort.plan_tokens(tokens, scheduler.with_lookahead(context + tokens), scheduler.ledger):
            return 0
        track.drafts = 0
        self._grant_verified(Verified(cohort, track, tokens, context))
        return tokens

    def _grant_with_placeholders(self, track: Track, width: int, cached: int, holds: int) -> None:
        scheduler = self._scheduler
        cohort = scheduler.begin_speculating(track)
        cohort.plan_tokens(width, holds, scheduler.ledger)
        if scheduler.ledger.prefix_caching:
            scheduler.ledger.computed(track, cached + 1)
        scheduler.queues.prefill_tokens -= 1
        self._grant_verified(Verified(cohort, track, width, cached, True))

    def _grant_verified(self, part: Verified) -> None:
        self.parts.append(part)
        self.verified.append(part)
        self.decodes += 1
        self.draft_tokens += part[2] - 1
        self.budget_left -= part[2] + self._scheduler.input_slots

    def _refuse_if_not_chased(self, cohort: Cohort) -> None:
        scheduler = self._scheduler
        granted_here = any(part.cohort is cohort for part in self.grown)
        if granted_here or not scheduler.host.chase_decodes:
            raise PolicyError(
                "a cohort was granted twice in one plan"
                if granted_here
                else "a cohort in flight cannot be decoded again: this host does not chase decodes"
            )

    def _grant_chunk(self, track: Track, tokens: int, prefix: int) -> None:
        scheduler = self._scheduler
        context = prefix + tokens
        if scheduler.ledger.prefix_caching:
            scheduler.ledger.computed(track, context)
        track.own_context = context
        track.chunks_in_flight += 1
        scheduler.queues.prefill_tokens -= tokens
        self.budget_left -= tokens + scheduler.input_slots
        samples = context == track.own_known
        chunk = _new(_Chunk, (track, tokens, prefix, samples))
        self.chunks.append(chunk)
        self.parts.append(chunk)

    def _grant_to(self, track: Track) -> int | None:
        """Index of the part that this plan granted to a track."""
        cohort = track.cohort
        for at, part in enumerate(self.parts):
            if (part.cohort is cohort) if isinstance(part, Decodes) else (part.track is track):
                return at
        return None

    def _take_back(self, track: Track, how: Preemption | None, empty: set[int]) -> None:
        """Undo what this plan granted to a track, and stop it. empty: blocks that will not be filled after all."""
        scheduler = self._scheduler
        at = self._grant_to(track)
        cohort = track.cohort
        context = track.context
        dependents: list[Track] = []
        if at is not None and cohort is None:
            if scheduler.ledger.prefix_caching:
                dependents = self._leave_empty(track, self.parts[at].prefix, context, empty)  # type: ignore[union-attr]
            self._undo_chunk(at)
        scheduler.stop(track, how, empty)
        if at is not None and cohort is not None:
            if cohort.speculates:
                self._undo_verified(at)
            else:
                self._undo_decode(at, cohort, context - 1)
        self.preempted.append(track)
        for dependent in dependents:
            if dependent.order >= 0:
                self._take_back(dependent, how, empty)

    def _leave_empty(self, track: Track, prefix: int, context: int, empty: set[int]) -> list[Track]:
        """Blocks that a chunk of this plan would have filled stay empty: nobody may find them any more.

        Returns those who were admitted in this plan because the blocks would be there: they have to go as well.
        """
        scheduler = self._scheduler
        ledger = scheduler.ledger
        size = ledger.block_size
        taken = ledger.hold_nothing(track, prefix // size, context // size, empty)
        if scheduler.swap is not None:
            first, last = scheduler.swap.coming_in(track, ledger)
            taken |= ledger.hold_nothing(track, first, last, empty)
        if not taken:
            return []
        others = [chunk.track for chunk in self.chunks if chunk.track is not track]
        return [other for other in others if ledger.holds_any(other, taken)]

    def _undo_chunk(self, at: int) -> None:
        part = self.parts.pop(at)
        assert isinstance(part, Chunk)
        track, tokens, prefix, _ = part
        self.budget_left += tokens + self._scheduler.input_slots
        self._scheduler.queues.prefill_tokens += tokens
        track.chunks_in_flight -= 1
        track.own_context = prefix
        self._recount()

    def _undo_verified(self, at: int) -> None:
        part = self.parts.pop(at)
        assert isinstance(part, Verified)
        self.budget_left += part.tokens + self._scheduler.input_slots
        # As in _undo_decode: leaving gave back a promise that the plan has not taken yet.
        self._scheduler.queues.decode_tokens_promised -= 1
        self._recount()

    def _undo_decode(self, at: int, cohort: Cohort, context: int) -> None:
        """A member of a granted cohort has left it: shrink the grant. `context`: its context before the step."""
        part = self.parts[at]
        assert isinstance(part, Decodes)
        self.budget_left += 1
        # Nobody runs that step yet, so its token was neither promised nor lost.
        self._scheduler.queues.decode_tokens_promised -= 1
        left = cohort.lost.pop(part.step) - 1
        if left:
            cohort.lost[part.step] = left
        if cohort.size:
            deepest = part.context_max if context < part.context_max else cohort.context_max - 1
            self.parts[at] = Decodes(cohort, part.step, part.size - 1, part.context_total - context, deepest)
        else:
            cohort.planned = part.step
            del self.parts[at]
        self._recount()

    def _recount(self) -> None:
        """Chunks, decodes and their sum, after a part shrank or went."""
        self.chunks = [part for part in self.parts if isinstance(part, Chunk)]
        self.grown = [part for part in self.parts if isinstance(part, Decodes)]
        self.verified = [part for part in self.parts if isinstance(part, Verified)]
        self.decodes = sum([part.size for part in self.grown]) + len(self.verified)
        self.draft_tokens = sum([part.tokens - 1 for part in self.verified])
