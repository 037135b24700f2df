"""What an engine does when requests want more KV memory than there is: a ladder of measures, one admission control.

It stands between the queue and whatever policy runs, in both worlds. Rung by rung, each on or off: running requests are
*preempted*; batches fall back to *plain* ones, prompts or decodes but never both, while memory is short; victims'
KV is *offloaded* to host memory; memory is *oversubscribed*, on the length that answers are expected to have instead of
the longest allowed; and requests that would wait too long are *rejected* with the time after which to retry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from policies.edges.errors import PolicyError
from policies.work.request import NS_PER_S, Ns, Request
from policies.work.track import Track

if TYPE_CHECKING:
    from policies.contract.draft import Draft
    from policies.contract.queues import Queues
    from policies.kv_memory.ledger import KVView
    from policies.scheduling.lifecycle import Roster

RUNGS = ("preempt", "plain", "offload", "oversubscribe", "reject")

OVERLOADED = "overloaded"
"""How the reason of a request that rung 5 rejects begins."""

_EASED = 0.1
_LEAST_MEASURED_NS = NS_PER_S


@dataclass(frozen=True)
class Ladder:
    """Which rungs are on, and their knobs.

    rungs: of RUNGS. Without `preempt` (and without `oversubscribe`) admission counts on every answer's longest allowed
        length, so that nobody has to be preempted; with it the policy's own rule decides.
    trouble_from: share of the KV blocks in use from which memory is short, while requests wait (rung 2).
    plain_tokens: most prefill tokens of a plain batch.
    risk: 0 counts on the longest allowed answers, 1 on those expected from the requests that have ended (rung 4).
    max_wait_s: longest expected wait for the first token; beyond it a request is rejected (rung 5).
    """

    rungs: frozenset[str] = frozenset({"preempt"})
    trouble_from: float = 0.9
    plain_tokens: int = 8192
    risk: float = 1.0
    max_wait_s: float = 60.0

    @classmethod
    def of(cls, rungs: str | Iterable[str], **knobs: float) -> Ladder:
        """A ladder from the names of its rungs, as `preempt,plain,reject`; `all` or `none` for all or none of them."""
        names = [name.strip() for name in rungs.split(",")] if isinstance(rungs, str) else list(rungs)
        if names == ["all"]:
            names = list(RUNGS)
        if names in (["none"], [""]):
            names = []
        return cls(frozenset(names), **knobs)  # type: ignore[arg-type]

    @classmethod
    def of_settings(cls, settings: Any) -> Ladder | None:
        """The ladder of a run's settings (of either world); None for the policy's own behaviour alone."""
        if settings.ladder is None:
            return None
        return cls.of(
            settings.ladder,
            trouble_from=settings.trouble_from,
            plain_tokens=settings.plain_tokens,
            risk=settings.risk,
            max_wait_s=settings.max_wait_s,
        )

    def __post_init__(self) -> None:
        for name in sorted(self.rungs):
            if name not in RUNGS:
                raise PolicyError(f"ladder: found rung {name!r}, expected some of {', '.join(RUNGS)}, or all, or none")
        if "oversubscribe" in self.rungs and "preempt" not in self.rungs:
            raise PolicyError("ladder: found oversubscribe without preempt: who outgrows it must give way")
        if "offload" in self.rungs and "preempt" not in self.rungs:
            raise PolicyError("ladder: found offload without preempt: only who is preempted is offloaded")
        if not 0 < self.trouble_from <= 1:
            raise PolicyError(f"trouble_from: found {self.trouble_from:g}, expected above 0 and at most 1")
        if not 0 <= self.risk <= 1:
            raise PolicyError(f"risk: found {self.risk:g}, expected 0 (longest answers) to 1 (expected ones)")
        if not self.max_wait_s > 0:
            raise PolicyError(f"max_wait: found {self.max_wait_s:g} s, expected above 0")
        if self.plain_tokens < 1:
            raise PolicyError(f"plain_tokens: found {self.plain_tokens}, expected at least 1")


@dataclass(slots=True)
class LadderCounts:
    """What the rungs did. held_back: requests that had to wait, once a stay in the queue, for the sake of what running
    ones may still grow to; beyond_longest: admissions that the longest allowed answers would not have let in."""

    plain_plans: int = 0
    held_back: int = 0
    beyond_longest: int = 0
    rejected: int = 0


class AdmissionControl:
    """The ladder of one scheduler. first_rate: prefill tokens per second expected before any were measured."""

    def __init__(self, ladder: Ladder, first_rate: float | None = None) -> None:
        self.ladder = ladder
        self.counts = LadderCounts()
        self.in_trouble = False
        self.rate = first_rate
        self._plain = "plain" in ladder.rungs
        self._counts_lengths = "preempt" not in ladder.rungs or "oversubscribe" in ladder.rungs
        self._risk = ladder.risk if "oversubscribe" in ladder.rungs else 0.0
        self._promised: dict[int, tuple[int, int]] = {}
        # Who is held back now, and whose prompt a plain batch has begun: a policy that knows whole prompts only would
        # leave it half done.
        self._held_back: set[int] = set()
        self._begun: set[int] = set()
        self._expected_blocks = self._longest_blocks = 0
        self._ended = self._ended_tokens = self._ended_limits = 0
        self._busy_since: Ns = -1
        self._prefilled = 0

    # Rung 5: at the door

    def why_not(self, request: Request, scheduler: Roster, now_ns: Ns) -> str:
        """Why a request that arrives now is not taken; empty if it is."""
        if "reject" not in self.ladder.rungs:
            return ""
        rate = self._measured_rate(now_ns)
        if not rate:
            return ""
        wait_s = (scheduler.queues.prefill_tokens + request.prompt_tokens) / rate
        longest = self.ladder.max_wait_s
        if wait_s <= longest:
            return ""
        self.counts.rejected += 1
        return (
            f"{OVERLOADED}: first token expected after {wait_s:.0f} s, {longest:g} s allowed; "
            f"retry after {ceil(wait_s - longest)} s"
        )

    def _measured_rate(self, now_ns: Ns) -> float | None:
        """Prefill tokens per second since work began to queue, decodes that ran beside them included."""
        if self._busy_since >= 0 and self._prefilled and now_ns - self._busy_since >= _LEAST_MEASURED_NS:
            self.rate = self._prefilled * NS_PER_S / (now_ns - self._busy_since)
        return self.rate

    # Rung 2: what is planned

    def plan(self, scheduler: Roster, draft: Draft, now_ns: Ns) -> None:
        """Let the policy write the batch, or write a plain one while memory is short."""
        queues, ledger = scheduler.queues, scheduler.ledger
        if not queues.prefill_tokens:
            self._measured_rate(now_ns)
            self._busy_since, self._prefilled = -1, 0
        elif self._busy_since < 0:
            self._busy_since = now_ns
        if self._plain and self._short(queues, ledger):
            self.counts.plain_plans += 1
            self._plan_plain(queues, draft)
        elif not (self._begun and self._go_on(queues, draft)):
            scheduler.ask_policy(draft, now_ns)
        if self._plain and queues.waiting:
            # Whether memory is short has a memory of its own: every plan has to be looked at.
            draft.only_for_now()
        for chunk in draft.chunks:
            self._prefilled += chunk[1]

    def _short(self, queues: Queues, kv: KVView) -> bool:
        used = 1 - kv.free_blocks / kv.total_blocks
        least = self.ladder.trouble_from - (_EASED if self.in_trouble else 0.0)
        self.in_trouble = bool(queues.waiting) and used >= least
        return self.in_trouble

    def _plan_plain(self, queues: Queues, draft: Draft) -> None:
        """Prompts half done as whole as they come, else decodes, else one new prompt; never two of these."""
        left = self.ladder.plain_tokens
        for prompt in queues.partial:
            if left > 0:
                left -= draft.chunk(prompt, left)
        if draft.chunks or draft.decode_all():
            return
        if queues.waiting and not draft.preempted:
            head = queues.waiting[0]
            if draft.admit(head, left, reserve=head.known) and not draft.chunks[0][3]:
                self._begun.add(head.request.id)

    def _go_on(self, queues: Queues, draft: Draft) -> bool:
        """Memory is no longer short: a batch of what plain ones have begun, if anything of it can be granted."""
        left = self.ladder.plain_tokens
        for prompt in queues.partial:
            if left > 0 and prompt.request.id in self._begun:
                left -= draft.chunk(prompt, left)
        return bool(draft.chunks)

    # Rungs 1 and 4: who is let in

    def promised_tokens(self, track: Track) -> int:
        """The length that is counted on for a request, prompt and answer together."""
        request = track.request
        limit = request.max_output_tokens
        if self._risk and self._ended:
            expected = limit * self._ended_tokens / self._ended_limits
            limit = ceil(limit - self._risk * (limit - expected))
        return max(request.prompt_tokens + limit, track.own_known + 1)

    def reserve(self, track: Track, asked: int) -> int:
        """What a policy that reserves `asked` tokens gets: no more than what is counted on."""
        return min(asked, self.promised_tokens(track)) if self._risk else asked

    def lets_in(self, track: Track, scheduler: Roster) -> bool:
        """Whether what running requests may grow to leaves room for one more. Alone anybody is let in."""
        if not self._counts_lengths:
            return True
        ledger = scheduler.ledger
        room = ledger.total_blocks - scheduler.watermark_blocks
        expected = ledger.blocks_for(self.promised_tokens(track) - 1)
        if self._promised and self._expected_blocks + expected > room:
            if track.request.id not in self._held_back:
                self._held_back.add(track.request.id)
                self.counts.held_back += 1
            return False
        return True

    def entered(self, track: Track, scheduler: Roster) -> None:
        """A request was admitted."""
        if not self._counts_lengths:
            return
        self._held_back.discard(track.request.id)
        request, ledger = track.request, scheduler.ledger
        expected = ledger.blocks_for(self.promised_tokens(track) - 1)
        longest = ledger.blocks_for(request.prompt_tokens + request.max_output_tokens - 1)
        if self._promised and self._longest_blocks + longest > ledger.total_blocks - scheduler.watermark_blocks:
            self.counts.beyond_longest += 1
        self._promised[request.id] = expected, longest
        self._expected_blocks += expected
        self._longest_blocks += longest

    def left(self, track: Track) -> None:
        """A request runs or waits no more: it ended, was preempted or withdrawn."""
        self._held_back.discard(track.request.id)
        self._begun.discard(track.request.id)
        expected, longest = self._promised.pop(track.request.id, (0, 0))
        self._expected_blocks -= expected
        self._longest_blocks -= longest

    def ended(self, track: Track) -> None:
        """A request has finished: the next ones are expected to use the same share of their limits."""
        self._ended += 1
        self._ended_tokens += track.produced
        self._ended_limits += track.limit_after
