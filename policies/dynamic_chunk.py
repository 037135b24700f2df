"""Decode-maximal batching with a chunk size that follows the load, the time an iteration may take, or the prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Policy, Promises, knob
from policies.contract.queues import Queues
from policies.decode_maximal import (
    ALIGNMENTS,
    chunk_beside_decodes,
    decode_beside_a_prompt,
    prefill_beside_decodes,
    rows_of_slots,
    slot_tokens,
)
from policies.kv_memory.ledger import KVView
from policies.sized_by_time import ChunkTime, rows_within
from policies.work.batch import BatchShape
from policies.work.request import NS_PER_S, Ns
from policies.work.track import Track


@dataclass(frozen=True)
class DynamicChunk(Policy):
    """Decode-maximal with C chosen anew for every batch: by the prefill share of the work at hand (pd_ratio), by the
    time a running decode may wait (tbt_slo), or so that chunks deep in a prompt take no longer (prefix_aware)."""

    rule: str = knob(
        "pd_ratio",
        "pd_ratio: by p, the prefill share of the tokens of work at hand; tbt_slo: the most tiles whose estimated time "
        "keeps the TBT target; prefix_aware: smaller as the prompt's prefix grows, so that chunks take equal time",
        choices=("pd_ratio", "tbt_slo", "prefix_aware"),
    )
    prefill_heavy: float = knob(0.7, "pd_ratio: above this p the large chunk size is used", least=0, most=1)
    decode_heavy: float = knob(0.3, "pd_ratio: below this p the small chunk size is used", least=0, most=1)
    large: int = knob(256, "pd_ratio: chunk size of a prefill-heavy load", least=1)
    middle: int = knob(192, "pd_ratio: chunk size in between", least=1)
    small: int = knob(128, "pd_ratio: chunk size of a decode-heavy load", least=1)
    tbt_target_s: float = knob(0.2, "tbt_slo: longest iteration while anybody decodes, seconds", least=0)
    largest: int = knob(2048, "tbt_slo: chunk size where time sets no limit", least=1)
    first: int = knob(1024, "prefix_aware: chunk size at the start of a prompt", least=1)
    c_ns: float = knob(0.0, "prefix_aware: c of t(L, x) = c + g L + b x + a (2 L x + x^2), ns an iteration", least=0)
    g_ns: float = knob(0.0, "prefix_aware: g, ns per prefix token", least=0)
    b_ns: float = knob(0.0, "prefix_aware: b, ns per chunk token", least=0)
    a_ns: float = knob(
        0.0, "prefix_aware: a, ns per pair of tokens; with a and b 0, all four follow from the cost model", least=0
    )
    merge: bool = knob(False, "give what one prompt leaves of the chunk to the next ones, instead of padding it")
    align: str = knob("pad", "what fills the last tile, as in decode_maximal", choices=ALIGNMENTS)

    promises: ClassVar[Promises] = Promises(decodes=True, keeps_running=True)
    paper: ClassVar[str] = (
        "SARATHI (arXiv 2308.16369), Sec. 4.4, made to follow the load; prefix_aware: dynamic chunking for pipelines "
        "(SGLang, ATOM)"
    )
    memory: ClassVar[MemoryRule] = MemoryRule(utilisation=1.0, headroom=0.2)

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        prompt = decode_beside_a_prompt(queues, draft, kv, host)
        if prompt is None:
            return
        if self.rule == "tbt_slo":
            rows = self.rows_by_tbt(prompt, queues, draft, kv, host)
        elif self.rule == "prefix_aware":
            rows = self.rows_by_prefix(prompt, draft, kv, host)
        else:
            rows = self.rows_by_load(queues)
        prefill_beside_decodes(queues, draft, kv, host, rows, self.align, merge=self.merge)

    def rows_by_load(self, queues: Queues) -> int:
        """C for the work at hand: prompt tokens not yet prefilled against output tokens still promised."""
        prefill = queues.prefill_tokens
        work = prefill + queues.decode_tokens_promised
        share = prefill / work if work else 0.0
        if share > self.prefill_heavy:
            return self.large
        if share < self.decode_heavy:
            return self.small
        return self.middle

    def rows_by_tbt(self, prompt: Track, queues: Queues, draft: Draft, kv: KVView, host: Host) -> int:
        """C: the most tiles that keep the TBT target beside the decodes granted; one that holds a chunk at least."""
        least = _fewest_rows(kv, host)
        most = max(least, self.largest)
        if not queues.anybody_decodes:
            return most
        slots = rows_of_slots(kv, host)
        decodes = draft.shape
        prefix, lacking = _progress(prompt, draft)

        def shape_of(rows: int) -> BatchShape:
            tokens = min(lacking, chunk_beside_decodes(rows, slots, decodes.decode_rows, host.tile))
            dummies = 0 if self.align == "none" else -(decodes.decode_rows + tokens) % host.tile
            return decodes._replace(chunks=((tokens, prefix),), dummy_tokens=dummies)

        return rows_within(host, round(self.tbt_target_s * NS_PER_S), least, most, shape_of)

    def rows_by_prefix(self, prompt: Track, draft: Draft, kv: KVView, host: Host) -> int:
        """C such that this chunk on its prefix takes as long as the first one took on none."""
        beside = rows_of_slots(kv, host) - 1
        least = _fewest_rows(kv, host)
        most = max(least, self.first)
        prefix, _ = _progress(prompt, draft)
        if not prefix:
            return most
        first = most - beside
        time = ChunkTime(self.c_ns, self.g_ns, self.b_ns, self.a_ns)
        if not (time.a or time.b):
            time = ChunkTime.from_estimates(host, prefix, first)
        tokens = time.tokens_within(time.ns(0, first), prefix)
        # A hair more, lest rounding turn a whole tile into the one below.
        rows = int(tokens + beside + 1e-6) // host.tile * host.tile
        return min(most, max(least, rows))

    def largest_chunk(self) -> int:
        if self.rule == "pd_ratio":
            return max(self.large, self.middle, self.small)
        return self.first if self.rule == "prefix_aware" else self.largest

    def reserves(self, track: Track, kv: KVView) -> int:
        return slot_tokens(track, kv)

    def default_max_num_seqs(self) -> int | None:
        return None


def _fewest_rows(kv: KVView, host: Host) -> int:
    """The whole number of tiles just above B - 1 decodes: no smaller batch has room for a chunk."""
    return ((rows_of_slots(kv, host) - 1) // host.tile + 1) * host.tile


def _progress(prompt: Track, draft: Draft) -> tuple[int, int]:
    """(tokens cached, tokens lacking) of a prompt, half done or about to be admitted."""
    lacking = prompt.lacking if prompt.order >= 0 else draft.to_prefill(prompt)
    return prompt.known - lacking, lacking
