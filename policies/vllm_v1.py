"""vLLM's current scheduler, step-exact: no phases, every request just takes what it lacks from the token budget."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Policy, Promises, knob
from policies.contract.queues import Queues
from policies.contract.speculation import Speculation
from policies.kv_memory.ledger import KVView
from policies.work.cohort import Cohort
from policies.work.request import Ns
from policies.work.track import Track


@dataclass(frozen=True)
class VllmV1(Policy):
    """Running requests first, in admission order, each min(what it lacks, budget left); waiting ones only in a step
    that preempted nothing."""

    long_prefill_token_threshold: int = knob(
        0, "most tokens of one prompt in one step, 0 for no limit; ignored while only one request exists", least=0
    )
    reserve_full: bool = knob(True, "admit only if the whole prompt and output so far fit in the free blocks (0.19 on)")
    prefix_caching: bool = knob(False, "share full KV blocks of equal prefixes, also with one's own past self")
    free_order: str = knob(
        "0.32", "where freed blocks go: 0.19 all to the tail, 0.32 unhashed ones to the head", choices=("0.19", "0.32")
    )
    async_scheduling: bool | None = knob(
        None, "plan the next step before this one returns; by default as vLLM of that version does on such an engine"
    )
    engine_version: str = knob("0.32", "vLLM's version, which decides whether it plans ahead (on GPUs from 0.14 on)")
    scheduling: str = knob(
        "fcfs", "priority: the trace's lowest priority value first, its highest preempted", choices=("fcfs", "priority")
    )

    promises: ClassVar[Promises] = Promises(decodes=True, chunks=True, micro_batches=True, keeps_running=True)
    paper: ClassVar[str] = "vLLM 0.19 to 0.32, v1/core/sched/scheduler.py"
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=0.9)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        alone = queues.num_running + len(queues.waiting) == 1
        limit = self.long_prefill_token_threshold if self.long_prefill_token_threshold and not alone else 1 << 60
        by_priority = self.scheduling == "priority"
        prefills = False
        for part in queues.running:
            while draft.budget_left > 0 and (part.size if isinstance(part, Cohort) else part.context):
                if isinstance(part, Cohort):
                    granted = draft.decode(part, width=limit)
                else:
                    granted = draft.chunk(part, min(part.lacking, limit))
                    prefills = prefills or granted > 0
                if granted:
                    break
                victim = max(queues.running_tracks(), key=_least_urgent, default=None) if by_priority else None
                # Who has to give way to itself ends the step's look at the running ones: nobody behind it is asked.
                if (by_priority and victim is None) or draft.preempt(victim) is None or victim is part:
                    return
        running = len(draft.parts)
        while queues.waiting and draft.budget_left > 0 and not draft.preempted:
            head = queues.most_urgent if by_priority else queues.waiting[0]
            fits = head.known if self.reserve_full else 0
            drafts = 0 if host.speculation is None or prefills else placeholders(head, running, kv, host.speculation)
            if not draft.admit(head, min(head.known, limit), must_fit=fits, placeholders=min(drafts, limit - 1)):
                break

    def __post_init__(self) -> None:
        version_of(self.engine_version)

    def plans_ahead(self, *, on_gpu: bool, stages: int, speculation: str = "") -> bool:
        """As vLLM's release notes have it: by default since 0.14, except on CPUs, in pipelines, and with drafts that do
        not come from heads of the model (EAGLE, MTP). In pipelines it does since 0.16, which is not built here."""
        if self.async_scheduling is not None:
            return self.async_scheduling
        drafted = speculation not in ("", "eagle", "eagle3", "mtp")
        return on_gpu and stages == 1 and not drafted and version_of(self.engine_version) >= (0, 14)

    def default_token_budget(self, max_model_len: int) -> int | None:
        return 2048


def placeholders(head: Track, running: int, kv: KVView, speculation: Speculation) -> int:
    """Drafts that are none with which a waiting request is filled up to a whole width if it lacks one token alone, so
    that a step of decodes stays uniform; 0 where that does not fit into the longest sequence, or where nothing else
    runs and nothing of it is cached."""
    cached = kv.cached_tokens(head)
    fits = not kv.longest or cached + 1 + speculation.tokens + 1 <= kv.longest
    return speculation.tokens if fits and (running or cached) else 0


def _least_urgent(track: Track) -> tuple[int, Ns, int]:
    request = track.request
    return request.priority, request.arrival_ns, request.id


def version_of(text: str) -> tuple[int, int]:
    """(major, minor) of a version such as 0.14 or 0.19.1; ValueError for anything else."""
    found = re.fullmatch(r"(\d{1,4})\.(\d{1,4})(\..*)?", text)
    if found is None:
        raise ValueError(f"engine_version: found {text!r}, expected a version such as 0.14 or 0.19.1")
    return int(found[1]), int(found[2])
