"""A live engine that speculates: decodes of several rows, verified on the host, and drafts for the next batch.

Every row of a decode is a decode of its own to attention: all keys of the batch are stored before attention reads, so
the row at position p sees the rows before it. What is rejected leaves keys and values behind that nobody reads and the
next batch overwrites.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from executor.config import LiveConfig
from executor.errors import ExecutorError
from executor.model.loading import Loaded, load_model
from executor.model.sampler import INVALID
from executor.serving.live_engine import LiveEngine
from executor.serving.request_text import Text
from executor.serving.runner import Prepared, Result, Runner, Wanted, _Decodes
from executor.speculation.drafters import ModelDrafter, Next, NGramDrafter
from executor.speculation.verifying import Wide, accept
from policies import Batch, Chunk, Speculation, Track, Verified


@dataclass
class PreparedWide(Prepared):
    """A batch with speculating decodes. The last rows of `wanted` are theirs, one for each of their rows."""

    wides: list[Wide] = field(default_factory=list)


class SpeculatingRunner(Runner):
    """drafter: a small model that drafts, None for n-grams. drafts: tokens held for the next batch, by request.

    delivered: of the batch that has just run, each speculating decode and its tokens; proposed: what the drafting model
    drafted after it.
    """

    def __init__(self, *arguments: Any, speculation: Speculation, drafter: ModelDrafter | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.speculation, self.drafter = speculation, drafter
        self.ngrams = NGramDrafter()
        self.drafts: dict[int, list[int]] = {}
        self.delivered: list[tuple[Wide, list[int]]] = []
        self.proposed: dict[int, list[int]] = {}

    def release(self, track: Track) -> None:
        self.drafts.pop(track.request.id, None)
        super().release(track)

    def prepare(self, batch: Batch) -> Prepared:
        for victim in batch.preempted:
            self.release(victim)
        chunks: list[tuple[Chunk, int]] = []
        wides: list[Wide] = []
        fresh = set()
        for part in batch.parts:
            assert isinstance(part, Chunk | Verified)
            track = part.track
            row = self._row_of.get(track)
            if row is None:
                row = self._take_row(track)
                fresh.add(track.request.id)
            if isinstance(part, Chunk):
                chunks.append((part, row))
            else:
                drafts = [] if part.placeholders else self.drafts.pop(track.request.id, [])[: part.drafts]
                text = self.texts[track.request.id]
                wides.append(Wide(track, track.epoch, text, part.context, row, drafts, part.tokens))
        of_wides = [Wanted(wide.track, wide.epoch, wide.text) for wide in wides for _ in range(wide.width)]
        if batch.new_blocks:
            self._apply_new_blocks(batch, chunks, of_wides, fresh)
        first = [Wanted(p.track, p.track.epoch, self.texts[p.track.request.id]) for p, _ in chunks if p.samples]
        wanted = first + of_wides
        greedy = all(each.text.sampling.temperature == 0.0 for each in wanted)
        widths = [wide.width for wide in wides]
        context = [wide.context + at for wide in wides for at in range(wide.width)]
        decodes = _Decodes(
            [],
            self._changes,
            np.repeat(np.array([wide.row for wide in wides], np.int32), widths),
            np.arange(len(context), dtype=np.int32),
            np.array(context, np.int32),
            of_wides,
            greedy,
        )
        step = (
            self._mixed(batch, chunks, decodes) if chunks or batch.shape.dummy_tokens else self._decodes_only(decodes)
        )
        at = int(step.decode_row[0]) if len(step.decode_row) else 0
        for wide in wides:
            step.token_ids[at] = wide.text.ids[wide.context]
            step.token_ids[at + 1 : at + wide.width] = 0
            step.token_ids[at + 1 : at + 1 + len(wide.drafts)] = wide.drafts
            at += wide.width
        self._prepared += 1
        poison, self._to_poison = self._to_poison, []
        left, self._left = self._left, []
        sampling = None if greedy else [each.text.sampling for each in wanted]
        return PreparedWide(batch, step, wanted, sampling, poison, left, wides)

    def _fill_in_decodes(self, token_ids: torch.Tensor, prepared: Prepared) -> None:
        """The host has put all tokens there."""

    def _run(self, prepared: Prepared) -> Result:
        assert isinstance(prepared, PreparedWide)
        result = super()._run(prepared)
        at = len(prepared.wanted) - sum(wide.width for wide in prepared.wides)
        ends = [
            Next(part.track.request.id, self._row_of[part.track], part.prefix + part.tokens, token)
            for part, token in zip([part for part in prepared.batch.chunks if part.samples], result.ids)
            if part.track in self._row_of
        ]
        self.delivered = []
        for wide in prepared.wides:
            tokens = accept(result.ids[at : at + wide.width], wide.drafts)
            at += wide.width
            self.delivered.append((wide, tokens))
            ends.append(Next(wide.track.request.id, wide.row, wide.context + len(tokens), tokens[-1]))
        self.proposed = {}
        if self.drafter is None:
            return result
        step = prepared.step
        wanted = [each for each in ends if each.token != INVALID]
        self.proposed = self.drafter.draft(step, step.tensor(step.token_ids), wanted, prepared.batch.shape.drafting)
        return result._replace(end_ns=time.perf_counter_ns())

    def draft(self, request: int, text: Text, most: int) -> int:
        """Hold drafts for a request whose new tokens are in its text; returns how many."""
        if self.drafter is None:
            drafts = self.ngrams.draft(request, text, most)
        else:
            drafts = self.proposed.get(request, [])[:most]
        self.drafts[request] = drafts
        return len(drafts)


class SpeculatingEngine(LiveEngine):
    """A live engine whose decodes deliver several tokens at once."""

    runner: SpeculatingRunner

    def _deliver(self, prepared: Prepared, ids: list[int]) -> list[int]:
        assert isinstance(prepared, PreparedWide)
        runner, batch = self.runner, prepared.batch
        rows = sum(wide.width for wide in prepared.wides)
        first = prepared.wanted[: len(prepared.wanted) - rows]
        everything = prepared.wanted
        prepared.wanted = first
        stopped = super()._deliver(prepared, ids[: len(first)])
        prepared.wanted = everything
        accepted: dict[int, int] = {}
        failed = []
        delivered = runner.delivered if len(ids) == len(everything) and INVALID not in ids[len(first) :] else []
        if not delivered:
            # A row without a token: the batch could not be run, or its logits held NaN.
            at = len(first)
            for wide in prepared.wides:
                tokens = accept(ids[at : at + wide.width], wide.drafts)
                at += wide.width
                delivered = [*delivered, (wide, tokens)]
        for wide, tokens in delivered:
            track, request = wide.track, wide.track.request.id
            if track.epoch != wide.epoch:
                continue
            if INVALID in tokens:
                failed.append(request)
                continue
            accepted[request] = len(tokens) - 1
            for count, token in enumerate(tokens[: track.ends_after - track.delivered], 1):
                wide.text.append(token)
                if self.on_token is not None:
                    self.on_token(request, token)
                if wide.text.stop_ids and token in wide.text.stop_ids:
                    stopped.append(request)
                    accepted[request] = count - 1
                    break
        if failed:
            self._withdraw(failed, "the model's logits held NaN", "failed")
        batch.accepted = accepted
        sampled = [(each.track, each.epoch, each.text) for each in first]
        sampled += [(wide.track, wide.epoch, wide.text) for wide in prepared.wides]
        batch.proposed = {
            track.request.id: runner.draft(track.request.id, text, batch.shape.drafting)
            for track, epoch, text in sampled
            if track.epoch == epoch and track.request.id in self.scheduler.tracks
        }
        return stopped

    def _end(self, track: Track) -> None:
        self.runner.ngrams.forget(track.request.id)
        super()._end(track)


def speculation_of(config: LiveConfig) -> Speculation | None:
    """How a live engine speculates; ExecutorError for what does not go together with it, by name."""
    if config.speculation is None:
        if config.draft_model is not None:
            raise ExecutorError("--draft-model without --speculation: expected --speculation draft:K")
        return None
    speculation = Speculation.parse(config.speculation)
    if speculation.method == "eagle":
        raise ExecutorError("--speculation eagle: no live engine here has such a head; expected ngram:K or draft:K")
    if (speculation.method == "draft") != (config.draft_model is not None):
        expected = "--draft-model beside it" if config.draft_model is None else "draft:K beside --draft-model"
        raise ExecutorError(f"--speculation {speculation}: expected {expected}")
    for flag, used in (
        ("--async", bool(config.ahead)),
        ("--tp or --pp", config.tp * config.pp > 1),
        ("--kv-compression", config.kv_compression is not None),
        ("--ladder", config.ladder not in (None, "none")),
    ):
        if used:
            raise ExecutorError(f"{flag} with --speculation: no live engine here does both; leave one of them out")
    return speculation


def load_drafter(config: LiveConfig, target: Loaded, blocks: int, longest: int) -> ModelDrafter | None:
    """The model that drafts, loaded beside `target`, with a pool of as many blocks; None for n-grams."""
    if config.draft_model is None:
        return None
    loaded = load_model(
        config.draft_model,
        device=str(target.device),
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        kernels=config.kernels,
        attention=config.attention,
        seed=config.seed,
        max_tokens=longest,
        clip_max_tokens=True,
        trim_last_layer=config.trim_last_layer,
        graphs="off",
        block_size=config.block_size,
    )
    if loaded.spec.vocab != target.spec.vocab:
        raise ExecutorError(
            f"--draft-model {config.draft_model}: found a vocabulary of {loaded.spec.vocab} tokens, expected the "
            f"{target.spec.vocab} of {target.spec.name}: drafts are verified token by token"
        )
    if loaded.max_tokens < longest:
        raise ExecutorError(
            f"--draft-model {config.draft_model}: reaches {loaded.max_tokens} tokens, expected the {longest} of the "
            "run; --max-model-len makes it shorter"
        )
    return ModelDrafter(loaded, loaded.new_cache(blocks, config.block_size), longest)
