"""The live half of an experiment: one model loaded once, and what is done with it: serve, measure a plan, probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.errors import ExperimentError

if TYPE_CHECKING:
    from executor.machine.speed_gauge import SpeedGauge
    from executor.model.loading import Loaded
    from executor.serving.replay import LiveRun
    from profiler.cost_model import CostModel
    from profiler.measurements.plan import MeasurementPlan, Point
    from profiler.measurements.profile import Profile
    from workloads import Trace


@dataclass(frozen=True)
class PolicyChoice:
    """A policy with its knobs, as written: `chunked`, `chunked:chunk_size=256`, `file.py:Class:knob=value`."""

    label: str
    name: str
    knobs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> PolicyChoice:
        """Raises ExperimentError or PolicyError for what is none."""
        from policies import make_policy

        name, *settings = text.strip().split(":")
        if name.endswith(".py") and settings and "=" not in settings[0]:
            name = f"{name}:{settings.pop(0)}"
        knobs = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals:
                raise ExperimentError(f"policy {text!r}: found {setting!r}, expected knob=value")
            knobs[key.strip().replace("-", "_")] = value
        make_policy(name, knobs)
        return cls(text.strip(), name, knobs)


@dataclass(frozen=True)
class EngineChoice:
    """The engine that both worlds are about. threads: None for PyTorch's own number. tp, pp: a process a rank."""

    model: str = "nano"
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kernels: str = "auto"
    attention: str = "auto"
    graphs: str = "auto"
    streams: bool = False
    nvtx: bool = False
    allocator: str = "default"
    threads: int | None = None
    block_size: int = 16
    max_num_seqs: int = 32
    token_budget: int | None = None
    seed: int = 0
    tp: int = 1
    pp: int = 1

    @property
    def is_sharded(self) -> bool:
        return self.tp * self.pp > 1


class LiveSide:
    """Loads the model when it is first needed. most_length: prompt + output of the longest request to be served."""

    def __init__(self, choice: EngineChoice, most_length: int) -> None:
        self.choice = choice
        self._most_length = most_length
        self._loaded: Loaded | None = None
        self._rig: Any = None

    @property
    def loaded(self) -> Loaded:
        if self._loaded is None:
            from executor.config import LiveConfig
            from executor.machine.threads import set_threads
            from executor.serving.replay import load_for

            choice = self.choice
            set_threads(choice.threads)
            self._loaded = load_for(
                LiveConfig(
                    model=choice.model,
                    device=choice.device,
                    dtype=choice.dtype,
                    kv_dtype=choice.kv_dtype,
                    kernels=choice.kernels,
                    attention=choice.attention,
                    seed=choice.seed,
                    threads=choice.threads,
                    block_size=choice.block_size,
                    tp=choice.tp,
                    pp=choice.pp,
                    graphs=choice.graphs,
                    streams=choice.streams,
                    nvtx=choice.nvtx,
                    allocator=choice.allocator,
                ),
                self._most_length,
            )
        return self._loaded

    @property
    def max_model_len(self) -> int:
        return min(self._most_length, self.loaded.max_tokens)

    def serve(
        self,
        trace: Trace,
        policy: PolicyChoice,
        *,
        cost: CostModel | None = None,
        num_blocks: int | None = None,
        at_once: bool = False,
        progress: Callable[[int, int], None] | None = None,
        gauge: SpeedGauge | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> LiveRun:
        """One live run; a signal that stops it raises KeyboardInterrupt, so that no half run is taken for a whole.

        more: settings of the run that differ from the engine's.
        """
        from executor.config import LiveConfig
        from executor.serving.replay import replay_live

        choice = self.choice
        config = LiveConfig(
            policy=policy.name,
            knobs=policy.knobs,
            model=choice.model,
            device=choice.device,
            dtype=choice.dtype,
            kv_dtype=choice.kv_dtype,
            kernels=choice.kernels,
            attention=choice.attention,
            threads=choice.threads,
            block_size=choice.block_size,
            max_num_seqs=choice.max_num_seqs,
            token_budget=choice.token_budget,
            graphs=choice.graphs,
            streams=choice.streams,
            nvtx=choice.nvtx,
            allocator=choice.allocator,
            max_model_len=self.max_model_len,
            num_blocks=num_blocks,
            seed=choice.seed,
            as_fast_as_possible=at_once,
            tp=choice.tp,
            pp=choice.pp,
        )
        config = replace(config, **(more or {}))
        run = replay_live(trace, config, loaded=self.loaded, cost=cost, progress=progress, between=gauge)
        if run.outcome.stopped_by:
            raise KeyboardInterrupt
        return run

    def new_gauge(self) -> SpeedGauge | None:
        """Tells the machine's speed beside a live run; None where a device does the work, or several processes."""
        from executor.machine.speed_gauge import SpeedGauge

        if self.choice.is_sharded or self.loaded.device.type != "cpu":
            return None
        return SpeedGauge()

    def close(self) -> None:
        """End the other ranks, where there are any."""
        if self._loaded is not None:
            self._loaded.__exit__(None, None, None)
            self._loaded = self._rig = None

    def measure_stages(self, plan: MeasurementPlan, out: Path, progress: Any = None) -> list[Profile]:
        """The profile of every stage of a pipeline, all of them at work."""
        from executor.distributed import ShardedModel
        from executor.distributed.stage_profile import measure_stages

        assert isinstance(self.loaded, ShardedModel)
        return measure_stages(self.loaded, plan, out, block_size=self.choice.block_size, progress=progress)

    def measure(self, plan: MeasurementPlan, out: Path, progress: Any = None, note: Any = None) -> Profile:
        """The profile of a plan; goes on where an earlier call was interrupted."""
        from executor.measuring.measure_plan import measure_plan, unsure_by_fit

        return measure_plan(
            self.loaded, plan, out, block_size=self.choice.block_size, adapt=unsure_by_fit, progress=progress, note=note
        )

    def probe(self, plan: MeasurementPlan, fit: Any, when: str, began: float) -> Any:
        """How fast the machine is now, by the plan's noise points (see
        experiments.validation.comparing.machine_drift).
        """
        from executor.measuring.batch_rig import BatchRig
        from experiments.validation.comparing.machine_drift import take_probe

        points: Sequence[Point] = plan.noise
        if self._rig is None:
            self._rig = BatchRig.for_points(self.loaded, points, block_size=self.choice.block_size)
            self._rig.warm(points)
        return take_probe(self._rig, points, fit, when, began)

    def ceilings(self) -> tuple[Any, str]:
        """What the device can do at most (`executor.machine.ceilings`), and the same as a hardware table."""
        from executor.machine.ceilings import measure_ceilings
        from executor.serving.device_memory import free_memory_bytes

        found = measure_ceilings(self.loaded.device, self.loaded.dtype)
        processor = "cpu" if self.loaded.device.type == "cpu" else "gpu"
        return found, hardware_table(found, free_memory_bytes(self.loaded.device), processor)


def hardware_table(ceilings: Any, memory_bytes: int, processor: str) -> str:
    """Measured ceilings as a hardware table that `--gpu FILE.toml` reads."""
    return (
        f'title = "{ceilings.device}"\n'
        f"peak_flops = {{ {ceilings.dtype} = {ceilings.matrix_flops:.4g} }}\n"
        f"memory_bytes = {memory_bytes}\n"
        f"memory_bandwidth = {ceilings.copy_bytes_per_s:.4g}\n"
        "sms = 1\n"
        f'processor = "{processor}"\n'
        'link = "none"\n'
        f"link_bandwidth = {ceilings.copy_bytes_per_s:.4g}\n"
        'source = "measured here: a copy and a matrix product"\n'
    )
