"""Serve predicted costs to real clients: a config in, a run folder out, as a replay of the same requests gives it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from metrics import Recorder, read_run
from profiler import load_model_spec
from simulator.cluster.pools import ClusterPlan, make_cluster_plan
from simulator.config import ReplayConfig
from simulator.errors import SimulationError
from simulator.serving.real_time import RealTimeCluster
from simulator.simulation import Run, finish, simulate
from workloads import Trace
from workloads.door.app import Door
from workloads.door.listening import Server
from workloads.door.options import DoorOptions
from workloads.door.session import Visitors, Wire, leave, said_of
from workloads.generating.lengths import parse as parse_lengths

NAME = "served"


class ServedSimulation:
    """One session: `run` serves until it is told to stop (`server.stop`, a signal, or the options' own time).

    answer_lengths: how long answers are where a request does not say ignore_eos, as `workloads.generating.lengths`
    spells it; as long as allowed without. out: a run folder, written at the end.

    Raises SimulationError, PolicyError, ProfileError or DoorError for whatever cannot be served as asked.
    """

    def __init__(
        self,
        config: ReplayConfig,
        options: DoorOptions,
        *,
        answer_lengths: str | None = None,
        out: Path | None = None,
        ready: Callable[[str], None] | None = None,
    ) -> None:
        if config.reference:
            raise SimulationError(
                "--reference: has no clock of its own to serve by; replay the session's trace with it"
            )
        model = load_model_spec(config.model)
        config = replace(config, leaps=False, max_model_len=config.max_model_len or model.context_length)
        self.options, self.out = options, out
        nobody = np.zeros(0, np.int64)
        self.plan = make_cluster_plan(config, Trace(NAME, nobody, nobody, nobody, nobody))
        words = options.words()
        self._scratch: Path | None = None
        if out is not None:
            from metrics.run_folder.folder import check_run_place

            check_run_place(out)
            out.parent.mkdir(parents=True, exist_ok=True)
            self._scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent))
        self.engine = RealTimeCluster(
            self.plan,
            answers=words.answers,
            vocab=max(model.vocab, max(words.answers) + 1),
            lengths=parse_lengths(answer_lengths, "output_tokens") if answer_lengths else None,
            scratch=self._scratch,
        )
        _warm_up(self.plan)
        self.wire = Wire(self._scratch)
        self.visitors = Visitors(keeps_ids=self.engine.finds_prefixes)
        self.door = Door(self.engine, words, options, wire=self.wire, visitors=self.visitors)
        self.server = Server(self.door, ready=ready)

    def run(self) -> Run | None:
        """Serve; returns the run, or None where nobody has asked anything. Written to `out` by then."""
        try:
            self.server.run()
            return self._finish()
        finally:
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _finish(self) -> Run | None:
        engine = self.engine
        wire = self.wire.close()
        if self.server.failure and not len(self.visitors):
            raise SimulationError(self.server.failure)
        tables = engine.recorder.tables()
        if not len(self.visitors):
            return None
        if engine.front is not None:
            tables = engine.front.seen_by_clients(tables)
        trace = self.visitors.trace(NAME)
        run = finish(trace, self.plan, engine.cluster.facts(), tables)
        run.config["served"] = said_of(self.door, self.server)
        run.notes[:] = run.config["served"]["notes"]
        if self.out is not None:
            run.write(self.out)
            leave(self.out, trace, wire)
            run.tables = read_run(self.out)  # the records were streamed into a folder that goes with this session
        if self.server.failure:
            raise SimulationError(self.server.failure)
        return run


def _warm_up(plan: ClusterPlan) -> None:
    """Whatever is read and computed at its first use is, before time counts: one request is simulated."""
    longest = min(pool.engine.max_model_len for pool in plan.pools)
    length = np.array([max(1, min(64, longest // 2))])
    once = ClusterPlan(replace(plan.config, failures=(), autoscale={}), plan.pools)
    recorder = Recorder()
    simulate(Trace("warm-up", np.zeros(1, np.int64), length, length, length), once, recorder)
    recorder.tables()
