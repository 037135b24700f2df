"""Whether a policy keeps its promises of repetition: some of the plans that they spare are made all the same.

For policies that are not the project's own. Of the first hundred leaps, and of one in a hundred after those, one inner
step is planned plainly; the same for chunks and micro-batches that are planned again. A plan that differs from what
was promised ends the run: its times would be wrong from there on, and nothing else would tell.
"""

from __future__ import annotations

from random import Random

from policies import Batch, BatchShape, Ns, Policy, Scheduler
from simulator.errors import SimulationError

FIRST, SHARE_AFTER = 100, 0.01
"""So many repetitions are all checked, and this share of those after them."""


def is_own(policy: Policy) -> bool:
    """Whether a policy comes with the project, whose tests hold it to its promises."""
    return type(policy).__module__.partition(".")[0] == "policies"


class PromiseChecks:
    """The checks of one replica. made: how many plans have been compared."""

    def __init__(self, scheduler: Scheduler, replica: int) -> None:
        self.scheduler = scheduler
        self.replica = replica
        self.made = 0
        self._rng = Random(f"promises {replica}")
        self._repetitions = 0

    def leap(self, batch: Batch, ends_ns: list[Ns]) -> list[int]:
        """`Scheduler.leap`, with one of its plans made by the policy where a check is due."""
        scheduler = self.scheduler
        if not self._due():
            return scheduler.leap(batch, ends_ns)
        inner = self._rng.randrange(len(ends_ns))
        taken = scheduler.leap(batch, ends_ns[:inner]) if inner else []
        promised = _one_longer(batch.shape)
        scheduler.deliver(batch, ends_ns[inner])
        free = scheduler.ledger.free_blocks
        self._plan(batch, ends_ns[inner], promised, "decodes")
        taken.append(free - scheduler.ledger.free_blocks)
        rest = ends_ns[inner + 1 :]
        return taken + scheduler.leap(batch, rest) if rest else taken

    def plan_again(self, batch: Batch, now_ns: Ns) -> bool:
        """`Scheduler.plan_again`, its plan made by the policy where a check is due."""
        promised = self._next_chunk(batch) if self._due() else None
        if promised is None:
            return self.scheduler.plan_again(batch, now_ns)
        self._plan(batch, now_ns, promised, "chunks")
        return True

    def plan_decodes_again(self, batch: Batch, now_ns: Ns) -> bool:
        """`Scheduler.plan_decodes_again`, its plan made by the policy where a check is due."""
        scheduler = self.scheduler
        queues = scheduler.queues
        if batch.repeats_at != queues.changes or scheduler.alarm_ns is not None or not self._due():
            return scheduler.plan_decodes_again(batch, now_ns)
        cohort = batch.grown[0][0]
        others = any(part is not cohort and not part.in_flight for part in queues.parts)
        if others or cohort.growth > scheduler.ledger.free_blocks:
            return scheduler.plan_decodes_again(batch, now_ns)
        self._plan(batch, now_ns, _one_longer(batch.shape), "micro_batches")
        batch.repeats_at = queues.changes
        return True

    def _due(self) -> bool:
        self._repetitions += 1
        return self._repetitions <= FIRST or self._rng.random() < SHARE_AFTER

    def _next_chunk(self, batch: Batch) -> BatchShape | None:
        """The shape of a plan of decodes and one chunk if it is made again, None where no promise covers that."""
        scheduler, chunks, grown = self.scheduler, batch.chunks, batch.grown
        if len(chunks) != 1 or len(grown) > 1 or len(scheduler.queues.parts) != len(grown) + 1:
            return None
        track, tokens, prefix, samples = chunks[0]
        prefix += tokens
        ledger = scheduler.ledger
        if samples or prefix + tokens >= track.known or not scheduler.promises.chunks or batch.preempted:
            return None
        if not scheduler.may_repeat or ledger.by_id or scheduler.admission is not None or scheduler.swap is not None:
            return None
        if ledger.prefix_caching and scheduler.queues.waiting:
            return None
        short = max(0, ledger.blocks_for(prefix + tokens) - track.blocks)
        if grown:
            cohort = grown[0][0]
            if grown[0][2] != cohort.size:
                return None
            short += cohort.growth
        if short > ledger.free_blocks:
            return None
        return _one_longer(batch.shape)._replace(chunks=((tokens, prefix),))

    def _plan(self, batch: Batch, now_ns: Ns, promised: BatchShape, promise: str) -> None:
        """Let the policy plan, and make `batch` that plan if it is what was promised."""
        scheduler = self.scheduler
        members = [part[0] for part in batch.grown], [chunk[0] for chunk in batch.chunks]
        plan = scheduler.plan(now_ns)
        self.made += 1
        if plan is None:
            found = "nothing"
        elif ([part[0] for part in plan.grown], [chunk[0] for chunk in plan.chunks]) != members:
            found = f"other requests ({_words(plan.shape)})"
        elif plan.shape != promised:
            found = _words(plan.shape)
        elif plan.preempted:
            found = f"the same, but preempted {len(plan.preempted)}"
        elif not scheduler.may_repeat:
            found = "the same for that moment only (only_for_now or wait_until, which the plan before had not said)"
        else:
            for name in ("number", "planned_ns", "parts", "chunks", "grown", "shape", "cached_tokens", "new_blocks"):
                setattr(batch, name, getattr(plan, name))
            return
        raise SimulationError(
            f"policy {type(scheduler.policy).__name__} does not keep its promise {promise!r}: at {now_ns / 1e9:.6f} s "
            f"on replica {self.replica} it was to plan {_words(promised)} again, and planned {found}. Without "
            "promises, which is always right, every plan is made; draft.only_for_now() takes them back for one plan"
        )


def _one_longer(shape: BatchShape) -> BatchShape:
    """A batch of decodes once more, every context one longer."""
    return shape._replace(
        decode_context_total=shape.decode_context_total + shape.decodes,
        decode_context_max=shape.decode_context_max + (1 if shape.decodes else 0),
        sampled=shape.decodes,
    )


def _words(shape: BatchShape) -> str:
    chunks = "".join(f", a chunk of {tokens} on {prefix}" for tokens, prefix in shape.chunks)
    dummies = f", {shape.dummy_tokens} dummy tokens" if shape.dummy_tokens else ""
    return f"{shape.decodes} decodes with contexts of {shape.decode_context_total} in all{chunks}{dummies}"
