"""Serve a real model to real clients: a config in, a run folder out, as a live replay gives it."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from executor.config import LiveConfig
from executor.door.served_engine import ServedEngine
from executor.errors import ExecutorError
from executor.kv_memory.block_names import TextNames
from executor.machine.threads import set_threads
from executor.model.loading import Loaded, find_model
from executor.model.sampler import GREEDY
from executor.model.tokenizer import load_tokenizer
from executor.serving.memory_measures import MeasuredCosts
from executor.serving.replay import LiveRun, OneRank, finish, load_for, scheduler_of
from metrics import Recorder, read_run
from policies import make_policy
from profiler.cost_model import CostModel
from workloads.door.app import Door
from workloads.door.listening import Server
from workloads.door.options import DoorOptions
from workloads.door.session import Visitors, Wire, leave, said_of
from workloads.door.words import Words, built_in_words, words_of_folder
from workloads.trace import Trace

NAME = "served"
PART_ROWS = 256
"""Iterations that are turned into columns at once: more of them would make the next ones late."""
POOL_REQUESTS, POOL_TOKENS = 32, 1024
"""The pool holds so many requests of so many tokens where nobody says how large it is, and the longest one at least."""


class ServedModel:
    """One session: `run` serves until it is told to stop (`server.stop`, a signal, or the options' own time).

    cost: what iterations are expected to take, for policies that plan by time. out: a run folder, written at the end.

    Raises ExecutorError, PolicyError or DoorError for whatever cannot be served as asked.
    """

    def __init__(
        self,
        config: LiveConfig,
        options: DoorOptions,
        *,
        loaded: Loaded | None = None,
        cost: CostModel | None = None,
        out: Path | None = None,
        ready: Callable[[str], None] | None = None,
    ) -> None:
        if config.tp * config.pp > 1:
            raise ExecutorError(f"serve: found --tp {config.tp} --pp {config.pp}, expected one rank")
        if out is not None:
            from metrics.run_folder.folder import check_run_place

            check_run_place(out)
        self.policy = make_policy(config.policy, config.knobs)
        set_threads(config.threads)
        source = find_model(config.model)
        longest = min(config.max_model_len or source.spec.max_position, source.spec.max_position)
        self.config = config = replace(config, max_model_len=longest)
        self.options, self.out = options, out
        words = options.words(_own_words(config.model))
        loaded = load_for(config, longest) if loaded is None else loaded
        self.longest = min(longest, loaded.max_tokens)
        names, costs, devices = TextNames(), MeasuredCosts(), OneRank(loaded)
        self.scheduler = scheduler_of(
            self.policy, config, loaded, _expected(self.longest), self.longest, cost, costs, names
        )
        if config.poison and self.scheduler.ledger.prefix_caching:
            raise ExecutorError("--poison: freed blocks of a prefix cache may be read again; switch one of them off")
        rows = min(self.scheduler.max_num_seqs, 256)
        most_tokens = min(self.scheduler.token_budget, self.longest * rows)
        self.runner = devices.make_runner(config, self.scheduler, self.longest, rows, most_tokens)
        names.texts = self.runner.texts
        self._scratch: Path | None = None
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent))
        Recorder().tables()  # whatever a recorder imports when it writes is imported now
        self.recorder = Recorder(stream_to=self._scratch, part_rows=PART_ROWS)
        nobody = np.zeros(0, np.int64)
        self.engine = ServedEngine(
            self.scheduler,
            self.runner,
            self.recorder,
            Trace(NAME, nobody, nobody, nobody, nobody),
            lambda row: nobody,
            sampling=lambda row: GREEDY,
            stop_ids=words.stop_ids,
            inside=None if cost is None else cost.inside,
            model=Path(config.model).name,
            forget=names.forget,
        )
        devices.make_ready(self.runner, self.scheduler, costs)
        self.wire = Wire(self._scratch)
        self.visitors = Visitors(keeps_ids=True)
        self.door = Door(self.engine, words, options, wire=self.wire, visitors=self.visitors)
        self.server = Server(self.door, ready=ready)

    def run(self) -> LiveRun | None:
        """Serve; returns the run, or None where nobody has asked anything. Written to `out` by then."""
        gc.collect()
        gc.freeze()  # what is alive now stays: collections while serving need not walk it
        try:
            self.server.run()
            return self._finish()
        finally:
            gc.unfreeze()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _finish(self) -> LiveRun | None:
        wire = self.wire.close()
        if self.server.failure:
            raise ExecutorError(self.server.failure)
        if not len(self.visitors):
            return None
        trace = self.visitors.trace(NAME)
        said = said_of(self.door, self.server)
        facts = {"served": said}
        run = finish(
            trace,
            self.config,
            self.policy,
            self.scheduler,
            self.runner,
            self.recorder,
            self.engine.outcome,
            self.longest,
            facts,
        )
        if self.out is not None:
            run.write(self.out)
            leave(self.out, trace, wire)
            run.tables = read_run(self.out)  # the records were streamed into a folder that goes with this session
        return run


def _own_words(model: str) -> Words:
    """The model's tokenizer; one with random weights speaks in the built-in words."""
    source = find_model(model)
    if source.kind == "gguf":
        return load_tokenizer(source).words()
    if source.path is not None and (source.path / "tokenizer.json").is_file():
        return words_of_folder(source.path)
    words = built_in_words()
    return Words(words.inner, special=words.special, speaks=True)


def _expected(longest: int) -> Trace:
    """What a pool of default size is made for."""
    lengths = np.array([longest, *[min(longest, POOL_TOKENS)] * POOL_REQUESTS], np.int64)
    ones = np.ones(len(lengths), np.int64)
    return Trace(NAME, np.zeros(len(lengths), np.int64), np.maximum(lengths - 1, 1), ones, ones)
