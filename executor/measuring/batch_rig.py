"""Planned batches as they would be served: the scheduler, loop and runner of a live run, a script for a policy.

A point is set up without computing its past: its requests say that their keys and values are here already (the pool is
filled with small random numbers once), join in one step, decode once, and then the step that the plan asks for is run,
as warm as a step in the middle of a run. What is noted of it is what a live run notes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from executor.errors import ExecutorError
from executor.kernels.routing_counts import RoutedRows
from executor.machine.speed_gauge import SpeedGauge
from executor.model.cuda_graphs import graph_bytes
from executor.model.loading import Loaded
from executor.model.sampler import GREEDY
from executor.serving.device_memory import blocks_that_fit
from executor.serving.live_engine import Flight, LiveEngine
from executor.serving.request_text import Text
from executor.serving.runner import Result, Runner
from metrics import Recorder
from policies import BatchShape, Ns, Policy, Request, make_scheduler
from profiler.measurements.plan import Point, clipped, longest_context, tokens_held
from workloads.trace import Trace

if TYPE_CHECKING:
    from policies.contract.draft import Draft
    from policies.contract.host import Host
    from policies.contract.queues import Queues
    from policies.kv_memory.ledger import KVView

WARM_STEPS = 12
"""Decodes of a point before its own step. In a run, contexts have been read hundreds of times: with one step in front,
3 to 8 decodes of 1,000 tokens took 15 to 40 % longer than with sixteen."""
NARROW = (0, 1, 0, 4)
"""Different tokens that the prompts of one measurement after the other are drawn from, for a model with experts; 0: of
the whole vocabulary."""
FOLLOWERS = 8
"""Decodes after a point with chunks that are measured too: what it has pushed out of the caches comes back in these."""


class Timing(NamedTuple):
    """One measured iteration, ns; as `LiveEngine` records it. executed_rows: with a graph's padding, 0 without one.
    gauge_ns: what the speed gauge took just before and after, 0 without one. followers: device, processor and wall time
    of each of the decodes right after, where these were measured. experts: touched ones, all layers together."""

    shape: BatchShape
    before_ns: Ns
    device_ns: Ns
    after_ns: Ns
    cpu_ns: int
    wall_ns: Ns
    executed_rows: int = 0
    gauge_ns: int = 0
    followers: tuple[tuple[Ns, int, Ns], ...] = ()
    experts: int = 0


@dataclass
class Script:
    """The next step. wanted: tokens to prefill by request id. rows: of the whole step, its dummy rows included."""

    wanted: Mapping[int, int] = field(default_factory=dict)
    dummies: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Scripted(Policy):
    """Decodes everybody, admits exactly whom the script names and adds its dummy rows. Not a policy to serve with."""

    script: Script = field(default_factory=lambda: Script())

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        draft.decode_all()
        for track in list(queues.waiting):
            tokens = self.script.wanted.get(track.request.id, 0)
            if tokens:
                draft.admit(track, tokens)
        if self.script.dummies:
            draft.pad_to(self.script.rows)


class BatchRig(LiveEngine):
    """A live engine without arrivals: it serves one planned batch at a time."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        most_tokens: int,
        longest: int,
        most_requests: int = 256,
        most_rows: int = 2048,
        block_size: int = 16,
        seed: int = 0,
    ) -> None:
        """most_tokens, most_requests, most_rows: of any point. Points for which there is no memory are clipped."""
        self._script = Script()
        self.loaded = loaded
        if longest > loaded.max_tokens:
            raise ExecutorError(
                f"the plan holds contexts of {longest} tokens, {loaded.spec.name} reaches {loaded.max_tokens}: "
                f"plan with --max-model-len {loaded.max_tokens}"
            )
        longest = min(longest + WARM_STEPS + FOLLOWERS + 4, loaded.max_tokens)
        room = -(-longest // block_size)
        blocks = max(room, most_tokens // block_size + most_requests * _beyond(block_size))
        fit = blocks_that_fit(
            loaded,
            most_rows=most_rows,
            most_sampled=most_requests,
            block_size=block_size,
            graph_bytes=graph_bytes(loaded),
        )
        self.blocks = min(blocks, max(room, fit))
        self._block_size = block_size
        scheduler = make_scheduler(
            Scripted(script=self._script),
            num_blocks=self.blocks,
            block_size=block_size,
            max_model_len=longest,
            by_id=True,
            max_num_seqs=max(256, most_requests),
        )
        cache = loaded.new_cache(scheduler.ledger.total_blocks, block_size)
        generator = torch.Generator(device=cache.pool.device).manual_seed(seed)
        cache.pool.normal_(0.0, 0.5, generator=generator)
        runner = Runner(loaded, cache, scheduler.ledger, longest, rows=max(256, most_requests))
        super().__init__(
            scheduler,
            runner,
            Recorder(),
            _no_arrivals(),
            lambda row: np.zeros(1, np.int64),
            sampling=lambda row: GREEDY,
        )
        self._rng = np.random.default_rng(seed)
        self._words = np.arange(loaded.spec.vocab)
        self._measured = 0
        self._routed_widely = RoutedRows(loaded.spec)
        self._next_request = 0
        self._origin = time.perf_counter_ns()
        self._timing: Timing | None = None
        # On a CPU: sampled after a point's last step, as in a live run, so that it costs the measured one no caches.
        self.gauge = SpeedGauge() if cache.pool.device.type == "cpu" else None
        self._last_gauge_ns = self.gauge.sample() if self.gauge is not None else 0

    @classmethod
    def for_points(cls, loaded: Loaded, points: Sequence[Point], *, block_size: int = 16, seed: int = 0) -> BatchRig:
        """One for these points and no larger ones."""
        return cls(
            loaded,
            most_tokens=max(tokens_held(point.shape) for point in points),
            longest=max(longest_context(point.shape) for point in points),
            most_requests=max(len(point.shape.chunks) + point.shape.decodes for point in points),
            most_rows=max(point.shape.rows for point in points),
            block_size=block_size,
            seed=seed,
        )

    def fits(self, shape: BatchShape) -> bool:
        """Whether the pool holds such a batch, with the steps before and after it."""
        lengths = [tokens + prefix for tokens, prefix in shape.chunks] + Point(shape, "visited").contexts
        size = self._block_size
        return sum([-(-length // size) + _beyond(size) - 1 for length in lengths]) <= self.blocks

    def fitting(self, points: Sequence[Point]) -> tuple[list[Point], str]:
        """The points as the memory here holds them, contexts shortened where need be, and a sentence about those.

        A point that does not fit without any context is left out.
        """
        found, shorter = [], 0
        for point in points:
            shape = clipped(point.shape, self.fits)
            if shape is not None:
                found.append(point if shape == point.shape else Point(shape, point.why))
                shorter += shape != point.shape
        gone = len(points) - len(found)
        if not shorter and not gone:
            return found, ""
        text = f"KV pool: {self.blocks} blocks of {self._block_size} tokens fit beside the model: {shorter} of "
        text += f"{len(points)} planned batches are measured with shorter contexts"
        return found, text + (f", {gone} are left out" if gone else "")

    def warm(self, points: Sequence[Point]) -> None:
        """Capture the graphs that these points will run through, so that no measurement pays for one."""
        if self.runner.graphs is not None:
            self.runner.graphs.warm_for([point.shape for point in points])

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Kernel by kernel, as who times operators needs it: a graph calls none of them."""
        graphs, self.runner.graphs = self.runner.graphs, None
        try:
            yield
        finally:
            self.runner.graphs = graphs

    def measure(
        self,
        point: Point,
        before_step: Callable[[], Any] | None = None,
        *,
        followers: int = 0,
        vary_experts: bool = False,
    ) -> Timing:
        """Set the point's requests up, lead them in, and run the step it asks for (`before_step` right before it).

        followers: after a step with chunks, also time so many decodes of whoever can decode then. vary_experts: draw
        prompts as NARROW says, so that batches of one shape touch more experts and fewer.
        """
        shape = clipped(point.shape, self.fits)
        if shape is None:
            raise ExecutorError(f"a planned batch of {point.shape.rows} rows does not fit into {self.blocks} KV blocks")
        point = Point(shape, point.why)
        self._choose_words(vary_experts)
        most = self.scheduler.max_model_len - WARM_STEPS - FOLLOWERS - 3
        contexts = [min(context, most) for context in point.contexts]
        warm = max(1, min([WARM_STEPS, *(context - 1 for context in contexts)]))  # a context starts with a token
        decodes = [self._enter(max(1, context - warm), 1, 1 << 12) for context in contexts]
        try:
            if decodes:
                self._step(dict.fromkeys(decodes, 1))
                for _ in range(warm):
                    self._step({})
            sampling = point.shape.sampled - point.shape.decodes
            chunks = {}
            for number, (tokens, prefix) in enumerate(point.shape.chunks):
                # A chunk that samples ends its prompt; any other leaves one token of it.
                rest = 0 if number < sampling else 1
                prefix = min(prefix, most - tokens)
                chunks[self._enter(prefix + tokens + rest, tokens + rest, 8 + FOLLOWERS)] = tokens
            if before_step is not None:
                before_step()
            timing = self._step(chunks, point.shape)
            steps = [self._step({}) for _ in range(followers if chunks and point.shape.sampled else 0)]
            after = tuple((step.device_ns, step.cpu_ns, step.wall_ns) for step in steps)
            return timing._replace(gauge_ns=self._gauged_ns(), followers=after)
        finally:
            self._withdraw(list(self.scheduler.tracks), "measured", "aborted")
            for cohort in self.scheduler.take_retired():
                self.recorder.cohort_times(0, cohort.number, cohort.times)
            self._idle = True

    def _choose_words(self, vary: bool) -> None:
        """With experts, prompts of few different tokens every other time: what one more touched expert costs can then
        be told from what one more row costs."""
        vocab = self.loaded.spec.vocab
        few = NARROW[self._measured % len(NARROW)] if vary and self.loaded.spec.experts else 0
        self._words = self._rng.integers(0, vocab, few) if few else np.arange(vocab)
        self._measured += 1

    def routing_facts(self) -> dict[str, Any]:
        """What a profile says of how rows spread over experts; nothing without experts.

        Counted while prompts came from the whole vocabulary.
        """
        spec, trims = self.loaded.spec, self.loaded.model.trim_last_layer
        facts = self._routed_widely.facts()
        if not facts or not all(facts["routing"]["rows"]):
            return {}
        return {"routing": {**facts["routing"], "trimmed": trims and spec.has_experts(spec.layers - 1)}}

    def _gauged_ns(self) -> int:
        """The gauge on both sides of a point, 0 without one. Never two samples in a row: what a step leaves in the
        caches is part of what a live run's samples see, and the first one tells the speed best."""
        if self.gauge is None:
            return 0
        before_ns, self._last_gauge_ns = self._last_gauge_ns, self.gauge.sample()
        return round(math.sqrt(before_ns * self._last_gauge_ns))

    def _enter(self, prompt: int, lacking: int, most_output: int) -> int:
        """Queue a request of which all but `lacking` prompt tokens are computed; returns its id."""
        number = self._next_request
        self._next_request += 1
        request = Request(number, self.now_ns(), prompt, min(most_output, self.scheduler.max_model_len - prompt))
        track = self.scheduler.add(request, request.arrival_ns, computed=max(0, prompt - lacking))
        if track.status == "rejected":
            raise ExecutorError(f"a planned batch cannot be set up: {track.reason}")
        ids = self._rng.choice(self._words, prompt)
        self.runner.texts[number] = Text.of(ids, request.max_output_tokens, GREEDY, ())
        return number

    def _step(self, wanted: Mapping[int, int], shape: BatchShape | None = None) -> Timing:
        script = self._script
        script.wanted = wanted
        script.dummies, script.rows = (0, 0) if shape is None else (shape.dummy_tokens, shape.rows)
        batch = self.scheduler.plan(self._admit())
        if batch is None:
            raise ExecutorError("a planned batch cannot be set up: nothing was granted")
        if len(batch.shape.chunks) < len(wanted):
            raise ExecutorError(
                f"a planned batch cannot be set up: {len(wanted)} chunks were asked for beside {batch.shape.decodes} "
                f"decodes, {len(batch.shape.chunks)} were granted (at most {self.scheduler.max_num_seqs} requests)"
            )
        self._launch(batch, None)
        self._complete(self._flights.popleft())
        assert self._timing is not None
        return self._timing

    def _record(self, flight: Flight, result: Result, now: Ns) -> None:
        since, cpu_since = self._since_ns, self._cpu_since_ns
        super()._record(flight, result, now)
        start, end = result.start_ns - self._origin, result.end_ns - self._origin
        if self.loaded.spec.experts and len(self._words) == self.loaded.spec.vocab:
            self._routed_widely.add(self.runner.routed.last)
        self._timing = Timing(
            flight.prepared.batch.shape,
            max(0, start - since),
            end - start,
            now - end,
            self._cpu_since_ns - cpu_since,
            now - since,
            result.executed_rows,
            experts=self.runner.routed.last_touched,
        )


def _beyond(block_size: int) -> int:
    """Blocks of one request beyond those that its tokens fill: the last one, and what it decodes after its step."""
    return 2 + (FOLLOWERS + 2) // block_size


def probe(rig: BatchRig, points: Sequence[Point], repeats: int) -> list[Timing]:
    """Each point `repeats` times, interleaved: what drift is told by."""
    return [rig.measure(point) for _ in range(repeats) for point in points]


def _no_arrivals() -> Trace:
    none = np.zeros(0, np.int64)
    return Trace("nothing", none, none, none, none)
