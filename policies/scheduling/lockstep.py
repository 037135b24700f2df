"""How decodes come to move in lockstep: cohorts that begin, take in, split, merge and die, and their equal steps.

The half of the scheduler that keeps `queues.parts`, the running work in admission order: cohorts, and prompts half
done. Whoever samples a first token joins the cohort beside it; cohorts that have become idle together merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from policies.contract.host import Host
from policies.contract.policy import Policy, Promises, Served, StatefulPolicy
from policies.contract.queues import Queues
from policies.contract.speculation import Speculation
from policies.edges.errors import PolicyError
from policies.kv_memory.ledger import KVLedger
from policies.kv_memory.swap import Swap
from policies.scheduling.overload_ladder import AdmissionControl
from policies.work.batch import Batch, BatchShape, Chunk, Decodes
from policies.work.cohort import Cohort
from policies.work.request import Ns
from policies.work.speculator import Speculator
from policies.work.track import Track

# A named tuple made without its own constructor, which costs more than all the rest of a plan. Final, as whatever a hot
# path uses of other modules, because compiled code then finds it without looking it up by name.
_new: Final = tuple.__new__
_BatchShape: Final = BatchShape
_Chunk: Final = Chunk
_Decodes: Final = Decodes

# Who waits beyond so many is not asked for the length of an answer.
FEW: Final = 8


class Lockstep:
    """The running work of one scheduler. retired: cohorts that died, their token times to be taken away.

    micro_batches, chase_decodes, promises: what host and policy say, looked up once.
    """

    policy: Policy
    ledger: KVLedger
    host: Host
    queues: Queues
    admission: AdmissionControl | None
    swap: Swap | None
    alarm_ns: Ns | None
    retired: list[Cohort]
    micro_batches: int
    chase_decodes: bool
    promises: Promises
    max_model_len: int
    # How it speculates, and what follows from it: KV slots beyond a step, budget of a scheduled request beyond its
    # tokens, and drafts made after a step.
    speculation: Speculation | None
    lookahead: int
    input_slots: int
    drafting: int
    # Of a policy that remembers: itself, its memory, and the tokens served since it was told, by `counts_by`.
    stateful: StatefulPolicy | None
    state: Any
    served: dict[object, list[int]]
    # Requests that are done and end with the last of their batch, by id, and the micro-batch that they were in.
    withheld: dict[int, tuple[Track, Cohort | None]]
    _left_out: list[Speculator]
    _cohorts: int
    _batches: int
    _only_now: bool

    # Equal iterations

    def quiet_steps(self, batch: Batch) -> int:
        """How often `batch`, now in flight, will be planned again unchanged if nobody arrives or is withdrawn."""
        grown = batch.grown
        if batch.chunks or len(grown) != 1 or len(self.queues.parts) != 1 or not self.promises.decodes:
            return 0
        if batch.preempted or batch.swap_out or self.alarm_ns is not None or self._only_now:
            return 0
        cohort, _, size, _, _ = grown[0]
        if size != cohort.size or self.queues.in_flight_batches != 1 or self.chase_decodes:
            return 0
        steps = cohort.steps_to_next_end()
        return cohort.steps_within(self.ledger.free_blocks, steps) if steps > 0 else 0

    @property
    def may_repeat(self) -> bool:
        """Whether the last plan did not take back the promises: it named no moment and did not hold for now only."""
        return self.alarm_ns is None and not self._only_now

    def steps_to_an_end(self) -> int:
        """Completions that the first end of anybody takes at least, the batch in flight included, if nobody arrives or
        is withdrawn; 0 where that is not known."""
        queues = self.queues
        if not self.promises.keeps_running or self.chase_decodes or not queues.num_running:
            return 0
        if self.admission is not None or self.swap is not None:
            return 0
        least = 1 << 40
        for part in queues.parts:
            if isinstance(part, Track):
                steps = part.ends_after - part.produced
            else:
                if part.closing:
                    return 0
                steps = part.completions_to_next_end()
            if steps < least:
                least = steps
        waiting = queues.waiting
        if len(waiting) > FEW:
            return 1
        for track in waiting:
            steps = track.ends_after - track.produced
            if steps < least:
                least = steps
        return least

    def leap(self, batch: Batch, ends_ns: Sequence[Ns]) -> list[int]:
        """Complete and plan `batch` again len(ends_ns) times at once, at most `quiet_steps(batch)` times.

        Exactly what that many calls of complete(batch, end) and plan(end) would do; `batch` is then the last of them,
        in flight. Returns the KV blocks that each of these plans took.
        """
        steps = len(ends_ns)
        cohort, step, size, total, longest = batch.grown[0]
        if self.stateful is not None:
            for track in cohort.members():
                self._count(track, 0, steps)
        ledger = self.ledger
        taken = cohort.plan_steps(steps, ledger)
        cohort.times.extend(ends_ns)
        batch.number += steps
        self._batches += steps
        batch.planned_ns = ends_ns[-1]
        if ledger.by_id:
            batch.new_blocks = ledger.take_new_blocks()
        total += steps * size
        longest += steps
        part = _new(_Decodes, (cohort, step + steps, size, total, longest))
        batch.parts = [part]
        batch.grown = [part]
        batch.shape = _new(_BatchShape, ((), size, total, longest, batch.shape[4], size, 0, 0, 0, 0))
        self.queues.decode_tokens_promised -= steps * size
        return taken

    def quiet_steps_ahead(self, older: Batch, newer: Batch) -> int:
        """Where planning runs one batch ahead: how many of the next completions will be followed by the same decodes,
        one token longer, if nobody arrives or is withdrawn. older, newer: the two batches in flight.

        The policy would see what it saw when it planned `newer`, with contexts grown and blocks taken.
        """
        queues = self.queues
        if newer.repeats_at != queues.changes or len(queues.parts) != 1 or queues.in_flight_batches != 2:
            return 0
        cohort = queues.parts[0]
        if not isinstance(cohort, Cohort) or cohort.speculates or cohort.in_flight != 2 or not self.promises.decodes:
            return 0
        if cohort.lost or cohort.closing or self.withheld or self.alarm_ns is not None or self._only_now:
            return 0
        if self.stateful is not None or self.admission is not None or self.swap is not None or self.ledger.by_id:
            return 0
        for batch in (older, newer):
            grown = batch.grown
            if batch.chunks or batch.preempted or len(grown) != 1:
                return 0
            if grown[0][0] is not cohort or grown[0][2] != cohort.size:
                return 0
        steps = cohort.steps_to_next_end()
        return cohort.steps_within(self.ledger.free_blocks, steps) if steps > 0 else 0

    def leap_ahead(self, older: Batch, newer: Batch, ends_ns: Sequence[Ns]) -> list[int]:
        """The next len(ends_ns) completions, at least two, each with the plan that follows it, at once: at most
        `quiet_steps_ahead`. The two batches become those in flight afterwards. Returns the blocks that each plan took.
        """
        steps = len(ends_ns)
        cohort, step, size, total, longest = newer.grown[0]
        taken = cohort.plan_steps(steps, self.ledger)
        cohort.times.extend(ends_ns)
        self._batches += steps
        self.queues.decode_tokens_promised -= steps * size
        number = newer.number
        for batch, further in ((older, steps - 1), (newer, steps)):
            part = _new(_Decodes, (cohort, step + further, size, total + further * size, longest + further))
            batch.number = number + further
            batch.planned_ns = ends_ns[further - 1]
            batch.parts = [part]
            batch.grown = [part]
            batch.shape = _new(_BatchShape, ((), size, part[3], part[4], newer.shape[4], size, 0, 0, 0, 0))
            batch.repeats_at = self.queues.changes
        return taken

    def plan_again(self, batch: Batch, now_ns: Ns) -> bool:
        """Turn `batch`, which has just been delivered, into the next plan, where that is the same with a prefix and
        contexts grown; False, and nothing has changed, where the policy has to be asked.

        For whoever knows that since its plan nobody has arrived, ended or been withdrawn, and nothing is in flight. It
        is what `plan` would do, by the policy's promise (`Promises.chunks`): the same decodes, and a chunk of the same
        size of the same prompt, which still lacks more than that.
        """
        chunks, grown = batch.chunks, batch.grown
        if len(chunks) != 1 or len(grown) > 1 or len(self.queues.parts) != len(grown) + 1:
            return False
        track, tokens, prefix, samples = chunks[0]
        ledger, queues = self.ledger, self.queues
        prefix += tokens
        context = prefix + tokens
        if samples or context >= track.own_known or not self.promises.chunks:
            return False
        if batch.preempted or self.alarm_ns is not None or self._only_now:
            return False
        if ledger.by_id or self.admission is not None or self.swap is not None:
            return False
        # What this chunk computes may be what somebody who waits has in common with it.
        if ledger.prefix_caching and queues.waiting:
            return False
        short = -(-context // ledger.block_size) - track.blocks
        if short < 0:
            short = 0
        free = ledger.free_blocks
        decodes = total = longest = 0
        if grown:
            cohort = grown[0][0]
            if grown[0][2] != cohort.size or (short and short + cohort.growth > free):
                return False
            part = cohort.plan_step(ledger)
            if part is None:
                return False
            _, _, decodes, total, longest = part
            batch.grown = [part]
        elif short > free:
            return False
        if short:
            ledger.extend(track, context)
        if ledger.prefix_caching:
            ledger.computed(track, context)
        track.own_context = context
        track.chunks_in_flight = 1
        chunk = _new(_Chunk, (track, tokens, prefix, False))
        batch.chunks = [chunk]
        batch.parts = [*batch.grown, chunk]
        batch.shape = _new(
            _BatchShape, (((tokens, prefix),), decodes, total, longest, batch.shape[4], decodes, 0, 0, 0, 0)
        )
        batch.number = self._batches
        self._batches += 1
        batch.planned_ns = now_ns
        batch.cached_tokens = 0
        queues.in_flight_batches = 1
        queues.prefill_tokens -= tokens
        queues.decode_tokens_promised -= decodes
        return True

    def mark_repeatable(self, batch: Batch) -> None:
        """Note on a plan of a pipeline that it would be made again while nothing changes, where the policy says so."""
        grown = batch.grown
        if batch.chunks or len(grown) != 1 or batch.preempted or self.alarm_ns is not None or self._only_now:
            return
        if not self.promises.micro_batches or self.host.chase_chunks or self.chase_decodes:
            return
        ledger = self.ledger
        if ledger.by_id or ledger.prefix_caching or self.admission is not None or self.swap is not None:
            return
        if grown[0][2] == grown[0][0].size:
            batch.repeats_at = self.queues.changes

    def plan_decodes_again(self, batch: Batch, now_ns: Ns) -> bool:
        """`plan_again` for one micro-batch of several: `batch`, just delivered, was one whole cohort, and is again.

        It is what `plan` would do, by the policy's promise (`Promises.micro_batches`), as long as nothing has changed
        since and nothing else is free to be planned.
        """
        queues = self.queues
        if batch.repeats_at != queues.changes or self.alarm_ns is not None:
            return False
        cohort = batch.grown[0][0]
        for part in queues.parts:
            if part is not cohort and not part.in_flight:
                return False
        step = cohort.plan_step(self.ledger)
        if step is None:
            return False
        _, _, decodes, total, longest = step
        batch.grown = [step]
        batch.parts = [step]
        batch.shape = _new(_BatchShape, ((), decodes, total, longest, batch.shape[4], decodes, 0, 0, 0, 0))
        batch.number = self._batches
        self._batches += 1
        batch.planned_ns = now_ns
        queues.in_flight_batches += 1
        queues.decode_tokens_promised -= decodes
        return True

    # What a policy that remembers is told

    def _count(self, track: Track, prompt_tokens: int, output_tokens: int) -> None:
        assert self.stateful is not None
        key = getattr(track.request, self.stateful.counts_by)
        tally = self.served.setdefault(key, [0, 0])
        tally[0] += prompt_tokens
        tally[1] += output_tokens

    def _count_served(self, batch: Batch) -> None:
        """Count what a batch delivers, before it is delivered."""
        for chunk in batch.chunks:
            self._count(chunk[0], chunk[1], 0)
        for part in batch.grown:
            cohort, step = part[0], part[1]
            for track in cohort.members():
                if track.segment_start <= step:
                    self._count(track, 0, 1)
            for end, leaving in cohort.closing.items():
                if step < end:
                    for track in leaving:
                        self._count(track, 0, 1)

    def _tell_of_service(self) -> None:
        served = {key: Served(tally[0], tally[1]) for key, tally in self.served.items()}
        self.served = {}
        assert self.stateful is not None
        self.stateful.hear(self.state, served)

    # Cohorts

    def new_cohort(self) -> Cohort:
        ledger = self.ledger
        cohort = Cohort(self._cohorts, ledger.block_size, by_id=ledger.by_id)
        self._cohorts += 1
        return cohort

    def split(self, cohort: Cohort, first: int) -> None:
        """Keep the first members in admission order in `cohort`; the rest stand by as a cohort right after it."""
        if cohort.in_flight:
            raise PolicyError("a cohort in flight cannot be split: give asynchronous scheduling a larger token budget")
        rest = self.new_cohort()
        # Its clock starts at the token that all of them had last; no segment claims that step.
        rest.times.append(cohort.times[-1])
        rest.planned = 1
        for track in list(cohort.members())[first:]:
            cohort.leave(track)
            rest.join(track, 1, 1)
        parts = self.queues.parts
        parts.insert(parts.index(cohort) + 1, rest)
        self.queues.parts_changed()

    def last_admitted(self) -> Track | None:
        """The running track with the highest admission number, in flight or not."""
        latest: Track | None = None
        for part in self.queues.parts:
            if isinstance(part, Track):
                last = part
            elif part.size:
                last = part.last_admitted
            else:
                continue
            if latest is None or last.order > latest.order:
                latest = last
        return latest

    def take_retired(self) -> list[Cohort]:
        """Cohorts that died since the last call and whose token times are complete."""
        if not self.retired:
            return []
        done = [cohort for cohort in self.retired if not cohort.in_flight]
        if done:
            self.retired = [cohort for cohort in self.retired if cohort.in_flight]
        return done

    def begin_speculating(self, track: Track) -> Speculator:
        """A running track that has nothing left to prefill becomes a decode of its own."""
        cohort = Speculator(self._cohorts, self.ledger.block_size, by_id=self.ledger.by_id)
        self._cohorts += 1
        parts = self.queues.parts
        parts[parts.index(track)] = cohort
        self.queues.parts_changed()
        cohort.join(track, 0, 0)
        return cohort

    def with_lookahead(self, tokens: int) -> int:
        """Tokens that need a KV slot where a step computes up to `tokens`: drafting writes some more, none beyond the
        longest sequence."""
        return min(tokens + self.lookahead, self.max_model_len)

    def _deliver_verified(self, batch: Batch, now_ns: Ns) -> list[Track]:
        """Deliver what was accepted of the speculating decodes of a batch; returns those who have all of their tokens.

        Whoever was preempted or withdrawn while the batch was in flight gets nothing.
        """
        finished = []
        for cohort, track, width, _, placeholders in batch.verified:
            if track.cohort is not cohort:
                batch.delivered.append((0, 0))
                continue
            request_id = track.request.id
            before = len(cohort.times)
            accepted = 0 if placeholders else batch.accepted.get(request_id, 0)
            delivered = cohort.receive(accepted, now_ns)
            if not placeholders:
                track.drafts_accepted += accepted
                if accepted < width - 1:
                    track.rejections += 1
            batch.delivered.append((before, delivered))
            if not self.chase_decodes:
                track.drafts = batch.proposed.get(request_id, 0)
            self.queues.decode_tokens_promised -= delivered - 1
            if track.first_token_ns < 0:
                track.first_token_ns = now_ns
            if self.stateful is not None:
                self._count(track, int(placeholders), delivered)
            finished += cohort.ending()
        return finished

    def _join(self, track: Track, batch: Batch) -> None:
        """A prompt is complete with this batch: its track decodes from now on, in lockstep with the batch's decodes."""
        if self.speculation is not None:
            track.own_known = track.own_context
            begun = self.begin_speculating(track)
            # Its first token is a step of a cohort like any other.
            begun.planned = 1
            track.base = begun.longest_base = track.own_context - 1
            batch.grown.append(Decodes(begun, 0, 0, 0, 0))
            batch.joins.append((track, track.epoch))
            return
        queues = self.queues
        parts = queues.parts
        track.own_known = track.own_context
        grown = batch.grown
        cohort: Cohort | None = None
        at = parts.index(track)
        if self.micro_batches > 1:
            cohort = grown[0][0] if grown else None
        elif at and grown and parts[at - 1] is grown[0][0]:
            # The rule: admitted after the only cohort.
            cohort = grown[0][0]
        else:
            # Admission order is batch order: only a neighbour may take it in.
            for neighbour in parts[at - 1 if at else 0 : at + 2]:
                if isinstance(neighbour, Cohort) and any(candidate[0] is neighbour for candidate in grown):
                    cohort = neighbour
                    break
        if cohort is None:
            cohort = self.new_cohort()
            cohort.planned = 1
            parts[at] = cohort
            grown.append(Decodes(cohort, 0, 0, 0, 0))
        else:
            del parts[at]
        queues.parts_changed()
        planned = cohort.planned
        cohort.join(track, planned - 1, planned)
        batch.joins.append((track, track.epoch))

    def _merge(self, cohorts: Sequence[Cohort]) -> None:
        """Cohorts of one batch that are idle now move in lockstep from here on."""
        parts = self.queues.parts
        self._drop_empty_parts()
        if self.micro_batches > 1:
            idle = [cohort for cohort in cohorts if cohort.size and not cohort.in_flight]
            for other in idle[1:]:
                idle[0] = self._merge_two(idle[0], other)
            return
        at = 0
        while at + 1 < len(parts):
            left, right = parts[at], parts[at + 1]
            if (
                isinstance(left, Cohort)
                and isinstance(right, Cohort)
                and not left.in_flight
                and not right.in_flight
                and left.times[-1] == right.times[-1]
            ):
                self._merge_two(left, right)
            else:
                at += 1

    def _merge_two(self, left: Cohort, right: Cohort) -> Cohort:
        parts = self.queues.parts
        large, small = (left, right) if left.size >= right.size else (right, left)
        for track in list(small.members()):
            small.leave(track)
            large.join(track, large.planned, large.planned)
        first, second = sorted((parts.index(left), parts.index(right)))
        parts[first] = large
        del parts[second]
        self.queues.parts_changed()
        self.retired.append(small)
        for request_id, (done, cohort) in self.withheld.items():
            if cohort is small:
                self.withheld[request_id] = done, large
        return large

    def _set_exhausted_aside(self) -> None:
        """Before cohorts in flight are planned again: members whose declared limit that flight reaches leave now.

        They keep slot and blocks until their last token arrives, one plan longer than without planning ahead.
        """
        for cohort in [part for part in self.queues.parts if isinstance(part, Cohort) and part.in_flight]:
            if isinstance(cohort, Speculator):
                if cohort.surely_done:
                    # It stays the decode of its request until its last token arrives, and is asked for no more.
                    cohort.track.closing = True
                    self.queues.parts.remove(cohort)
                    self.queues.parts_changed()
                elif cohort.context_total >= self.max_model_len - 1:
                    # If all in flight is accepted it has come to the longest sequence: this plan leaves it out.
                    self.queues.parts.remove(cohort)
                    self.queues.parts_changed()
                    self._left_out.append(cohort)
                continue
            for track in cohort.exhausted():
                cohort.leave(track, deliver=True)
                track.closing = True
                cohort.closing.setdefault(cohort.planned, []).append(track)
        self._drop_empty_parts()

    def _take_back_in(self) -> None:
        """Those that the plan just made was not to see are running as before."""
        parts = self.queues.parts
        parts += self._left_out
        self._left_out = []
        # Nothing but tracks and decodes of one: all of them have one place in the order of admission.
        parts.sort(key=_place)
        self.queues.parts_changed()

    def _reopen(self, track: Track) -> None:
        """A member set aside for its last token will not receive it after all."""
        for cohort in (*self.retired, *(part for part in self.queues.parts if isinstance(part, Cohort))):
            for end, tracks in cohort.closing.items():
                if track in tracks:
                    tracks.remove(track)
                    cohort.lost[end - 1] = cohort.lost.get(end - 1, 0) + 1
                    track.take_back_token()
                    self.queues.decode_tokens_promised += 1
                    return

    def _drop_empty_parts(self) -> None:
        parts = self.queues.parts
        kept = [part for part in parts if not isinstance(part, Cohort) or part.size]
        if len(kept) == len(parts):
            return
        self.retired += [part for part in parts if isinstance(part, Cohort) and not part.size]
        parts[:] = kept
        self.queues.parts_changed()


def _place(part: Cohort | Track) -> int:
    return part.order if isinstance(part, Track) else part.last_admitted.order
