"""Deadlines decide: earliest slack first over priorities and SLO classes, and what is already lost steps back.

A request's slack is the time left to its deadline once the work before its next token is counted. Serving by slack
keeps the most deadlines while all can be kept; when they cannot, it would waste its effort on requests that are late
anyway, so those are relegated: served with what the others leave.

Without a cost model (`host.estimator` None) only `chunk_size` bounds an iteration, and slack counts waiting alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Policy, Promises, knob
from policies.contract.queues import Queues
from policies.edges.errors import PolicyError
from policies.edges.settings import shown
from policies.kv_memory.ledger import KVView
from policies.sized_by_time import rows_within
from policies.work.batch import BatchShape
from policies.work.request import NS_PER_S, Ns
from policies.work.track import Track


@dataclass(frozen=True)
class SloAware(Policy):
    """Decodes always run. Prompts fill what the tightest TBT target among the running requests leaves of the iteration:
    first those that can still make their deadline, by priority and then by slack, last what is already late."""

    chunk_size: int = knob(2048, "most tokens of one batch, where time sets no tighter limit", least=1)
    classes: str = knob(
        "", "targets per SLO class, seconds, such as chat:ttft=1,tbt=0.1;batch:ttft=60; the rest is ttft_s and tbt_s"
    )
    ttft_s: float = knob(2.0, "TTFT target where `classes` names none, seconds", least=0)
    tbt_s: float = knob(0.2, "TBT target where `classes` names none, seconds", least=0)
    relegate: bool = knob(True, "serve requests that are late already only with what the others leave")
    window: int = knob(
        16,
        "waiting requests compared per priority and SLO class with targets of its own, earliest deadlines first",
        least=1,
    )

    promises: ClassVar[Promises] = Promises(decodes=True, keeps_running=True)
    paper: ClassVar[str] = "after Niyama (arXiv 2503.22562): slack, chunks sized by time, relegation"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9, watermark=0.01)

    def __post_init__(self) -> None:
        parse_classes(self.classes)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        draft.decode_all(first_to_go=lambda track: (track.request.priority, track.order))
        if not queues.partial and not queues.waiting:
            return
        # Slack runs out and estimates grow while nothing else changes.
        draft.only_for_now()
        left, iteration_ns = self._room(0, queues, draft, host)
        prompts = self._most_urgent_first(queues, draft, left, iteration_ns, now_ns)
        if prompts and prompts[0].context:
            left, _ = self._room(prompts[0].context, queues, draft, host)
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

    def _room(self, prefix: int, queues: Queues, draft: Draft, host: Host) -> tuple[int, Ns]:
        """Prefill tokens beside the decodes granted, and how long that iteration takes: as many whole tiles as keep the
        tightest TBT target of the running requests, at least one."""
        decodes = draft.shape
        if host.estimator is None:
            return self.chunk_size - decodes.decode_rows, 0

        def shape_of(rows: int) -> BatchShape:
            return decodes._replace(chunks=((rows - decodes.decode_rows, prefix),))

        least = (decodes.decode_rows // host.tile + 1) * host.tile
        rows = max(least, self.chunk_size)
        if queues.anybody_decodes:
            limit_ns = min(self._targets_ns(slo)[1] for slo in queues.running_by_slo)
            rows = rows_within(host, limit_ns, least, rows, shape_of)
        return rows - decodes.decode_rows, host.estimate_ns(shape_of(rows))

    def _most_urgent_first(
        self, queues: Queues, draft: Draft, tokens: int, iteration_ns: Ns, now_ns: Ns
    ) -> list[Track]:
        """Prompts half done, and of those waiting the most urgent of every class.

        Late is who would be: one iteration prefills `tokens`, and whoever is more urgent goes first.
        """
        # Classes without targets of their own share deadlines, and so a queue.
        named = parse_classes(self.classes)
        classes: dict[tuple[int, str | None], list[Track]] = {}
        for track in queues.partial:
            slo = track.request.slo
            classes.setdefault((track.request.priority, slo if slo in named else None), []).append(track)
        if not draft.preempted:
            for key, waiting in queues.waiting_by(named).items():
                late_before = now_ns - self._targets_ns(key[1])[0] if self.relegate else 0
                classes.setdefault(key, []).extend(self._first_of(waiting, queues.in_front, late_before))
        tokens = max(1, tokens)
        ranked: list[tuple[int, Ns, int, Ns, Track]] = []
        for (priority, slo), tracks in classes.items():
            ttft_ns, tbt_ns = self._targets_ns(slo)
            for track in tracks:
                request = track.request
                # A request that has its first token already was preempted: its next one is due after its last.
                due_ns = request.arrival_ns + ttft_ns if track.first_token_ns < 0 else track.last_token_ns + tbt_ns
                work_ns = -(-track.lacking // tokens) * iteration_ns
                # The latest start orders as the slack does: that is what remains until then.
                ranked.append((priority, due_ns - work_ns, request.id, due_ns, track))
        ranked.sort()
        in_time: list[Track] = []
        late: list[Track] = []
        ahead = 0
        for _, _, _, due_ns, track in ranked:
            done = ahead + track.lacking
            if self.relegate and now_ns + -(-done // tokens) * iteration_ns > due_ns:
                late.append(track)
            else:
                in_time.append(track)
                ahead = done
        return in_time + late

    def _first_of(self, waiting: deque[Track], in_front: set[Track], late_before: Ns) -> Iterator[Track]:
        """Of the waiting requests of one class: the preempted, the first in time, and if these are few the first late.

        Within a class the earliest arrival has the earliest deadline. Behind those put in front, `waiting_by_class`
        keeps a class sorted by arrival, so the late ones stand first there, and a search finds where they end, however
        long the queue.
        """
        count, preempted = len(waiting), 0
        while preempted < count and waiting[preempted] in in_front:
            if preempted < self.window:
                yield waiting[preempted]
            preempted += 1
        in_time = bisect_left(waiting, late_before, preempted, key=_arrival_ns)
        end = min(count, in_time + self.window)
        for at in range(in_time, end):
            yield waiting[at]
        for at in range(preempted, min(in_time, preempted + self.window - (end - in_time))):
            yield waiting[at]

    def _targets_ns(self, slo: str | None) -> tuple[Ns, Ns]:
        """(TTFT, TBT) target of a class."""
        ttft_s, tbt_s = parse_classes(self.classes).get(slo, _NO_TARGETS)
        return (
            round((self.ttft_s if ttft_s is None else ttft_s) * NS_PER_S),
            round((self.tbt_s if tbt_s is None else tbt_s) * NS_PER_S),
        )


def _arrival_ns(track: Track) -> Ns:
    return track.request.arrival_ns


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
                    f"SLO classes: found {shown(entry)}, expected NAME:ttft=SECONDS,tbt=SECONDS (or only one of them)"
                )
            found[key] = seconds
        if name in classes:
            raise PolicyError(f"SLO classes: {shown(name)} is given twice")
        classes[name] = Targets(found.get("ttft"), found.get("tbt"))
    return classes
