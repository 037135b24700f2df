"""Deadlines decide: earliest slack first over priorities and SLO classes, and what is already lost steps back.

A request's slack is the time left to its deadline once the work before its next token is counted. Serving by slack
keeps the most deadlines while all can be kept; when they cannot, it would waste its effort on requests that are late
anyway, so those are relegated: served with what the others leave.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from policies.batch import BatchShape
from policies.draft import Draft
from policies.errors import PolicyError
from policies.host import Host
from policies.iteration_time import rows_within
from policies.ledger import KVView
from policies.policy import MemoryRule, Policy, knob
from policies.queues import Queues
from policies.request import NS_PER_S, Ns
from policies.track import Track


@dataclass(frozen=True)
class SloAware(Policy):
    """Decodes always run. Prompts fill what the tightest TBT target among the running requests leaves of the iteration:
    first those that can still make their deadline, by priority and then by slack, last what is already late.

    Without a cost model (`host.estimator` None) only `chunk_size` bounds an iteration, and slack counts waiting alone.
    """

    chunk_size: int = knob(2048, "most tokens of one batch, where time sets no tighter limit", least=1)
    classes: str = knob(
        "", "targets per SLO class, seconds, such as chat:ttft=1,tbt=0.1;batch:ttft=60; the rest is ttft_s and tbt_s"
    )
    ttft_s: float = knob(2.0, "TTFT target where `classes` names none, seconds", least=0)
    tbt_s: float = knob(0.2, "TBT target where `classes` names none, seconds", least=0)
    relegate: bool = knob(True, "serve requests that are late already only with what the others leave")
    window: int = knob(32, "waiting requests compared per priority and SLO class, earliest deadlines first", least=1)

    repeats: ClassVar[bool] = True
    paper: ClassVar[str] = "after Niyama (arXiv 2503.22562): slack, chunks sized by time, relegation"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9, watermark=0.01)

    def __post_init__(self) -> None:
        parse_classes(self.classes)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        draft.decode_all(first_to_go=lambda track: (track.request.priority, track.order))
        prompts = self._candidates(queues, draft, host, now_ns)
        if not prompts:
            return
        # Slack runs out and estimates grow while nothing else changes.
        draft.only_for_now()
        left = self._chunk_tokens(prompts[0], queues, draft, host)
        line_stands = False
        for prompt in prompts:
            if left <= 0:
                return
            if prompt.order >= 0:
                left -= draft.chunk(prompt, left)
            elif not line_stands:
                granted = draft.admit(prompt, left, reserve=prompt.known)
                left -= granted
                # The first that memory refuses keeps its turn: nobody behind it may take what it waits for.
                line_stands = not granted

    def _candidates(self, queues: Queues, draft: Draft, host: Host, now_ns: Ns) -> list[Track]:
        """Prompts half done and the most urgent of those waiting, most urgent first."""
        tracks = [*queues.partial]
        if not draft.preempted:
            tracks.extend(self._first_of_each_class(queues, now_ns))
        if len(tracks) < 2:
            return tracks
        token_ns = 0.0
        if host.estimator is not None:
            token_ns = host.estimate_ns(BatchShape(((self.chunk_size, 0),))) / self.chunk_size

        def urgency(track: Track) -> tuple[bool, int, float, int]:
            slack = self.deadline_ns(track) - now_ns - track.lacking * token_ns
            return self.relegate and slack < 0, track.request.priority, slack, track.request.id

        return sorted(tracks, key=urgency)

    def _first_of_each_class(self, queues: Queues, now_ns: Ns) -> Iterator[Track]:
        """Of each (priority, SLO class) the first that can still be in time, and the first of all.

        Within a class the earliest arrival has the earliest deadline, so the ones that are late already stand in
        front, and a search finds where they end, however long the queue.
        """
        targets = parse_classes(self.classes)
        for (_, slo), tracks in queues.waiting_by_class.items():
            late_before = now_ns - self._target_ns(targets, slo)[0] if self.relegate else 0
            in_time = bisect_left(tracks, late_before, key=lambda track: track.request.arrival_ns)
            count = len(tracks)
            for at in range(min(count, self.window)):
                yield tracks[at]
            for at in range(max(in_time, self.window), min(count, in_time + self.window)):
                yield tracks[at]

    def _chunk_tokens(self, first: Track, queues: Queues, draft: Draft, host: Host) -> int:
        """Prefill tokens beside the decodes granted: whole tiles that keep the tightest TBT target, at least one."""
        decodes = draft.shape
        if host.estimator is None or not queues.anybody_decodes:
            return self.chunk_size - decodes.decodes
        targets = parse_classes(self.classes)
        limit_ns = min(self._target_ns(targets, slo)[1] for slo in queues.running_by_slo)
        prefix = first.context
        least = (decodes.decodes // host.tile + 1) * host.tile

        def shape_of(rows: int) -> BatchShape:
            return decodes._replace(chunks=((rows - decodes.decodes, prefix),))

        return rows_within(host, limit_ns, least, max(least, self.chunk_size), shape_of) - decodes.decodes

    def deadline_ns(self, track: Track) -> Ns:
        """When its next token is due: the first after arrival, a preempted request's next after its last one."""
        ttft_ns, tbt_ns = self._target_ns(parse_classes(self.classes), track.request.slo)
        if track.first_token_ns < 0:
            return track.request.arrival_ns + ttft_ns
        return track.last_token_ns + tbt_ns

    def _target_ns(self, targets: Mapping[str | None, Targets], slo: str | None) -> tuple[Ns, Ns]:
        ttft_s, tbt_s = targets.get(slo, _NO_TARGETS)
        return (
            round((self.ttft_s if ttft_s is None else ttft_s) * NS_PER_S),
            round((self.tbt_s if tbt_s is None else tbt_s) * NS_PER_S),
        )


class Targets(NamedTuple):
    """What an SLO class promises, in seconds; None where the policy's own knob holds."""

    ttft_s: float | None = None
    tbt_s: float | None = None


_NO_TARGETS = Targets()


@lru_cache(maxsize=64)
def parse_classes(text: str) -> Mapping[str | None, Targets]:
    """`chat:ttft=1,tbt=0.1;batch:ttft=60` as targets by class; PolicyError says which part is wrong."""
    classes: dict[str | None, Targets] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, bounds = entry.partition(":")
        name = name.strip()
        found: dict[str, float] = {}
        for bound in bounds.split(","):
            key, _, value = bound.partition("=")
            key = key.strip()
            try:
                seconds = float(value)
            except ValueError:
                seconds = -1.0
            if not (colon and name and key in ("ttft", "tbt") and key not in found and 0 <= seconds < 1e9):
                raise PolicyError(
                    f"SLO classes: found {entry!r}, expected NAME:ttft=SECONDS,tbt=SECONDS (either may be left out)"
                )
            found[key] = seconds
        if name in classes:
            raise PolicyError(f"SLO classes: {name!r} is given twice")
        classes[name] = Targets(found.get("ttft"), found.get("tbt"))
    return classes
