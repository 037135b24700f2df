"""What an engine adds to the kernels it runs: each effect an explicit term that can be switched off and measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.edges.errors import InputError
from profiler.errors import ProfileError


@dataclass(frozen=True)
class EngineTerms:
    """Terms beside the kernels' own times.

    graph_padding: batches of up to `largest_graph` rows run in a CUDA graph captured for the next of 1, 2, 4, then
        multiples of 8 to 256, then of 16 (vLLM's sizes), so their linear layers pay for the padded rows.
    compiled: norms, activations and rotary embeddings as fused kernels: where a profile measured them slower than one
        pass over their bytes would be, the pass is charged. Kernels that were fused already keep their times.
    fused_batches: a chunk and decodes in one attention kernel, as measured; off: their sum.
    uneven_contexts: what a batch's longest context adds beyond its mean; off: all contexts equal.
    typical_contexts: contexts lie anywhere between the multiples of 128 that a kernel steps by; off: all just above
        one, as profiles measure them.
    cold_keys: decodes read their keys from memory, since the other layers' have been through the cache; off: as in a
        kernel table that repeats one call and finds those of small batches in the cache.
    sampler: the sampler after the output head.
    kernel_gap_us: idle time between two kernels of a layer (0: the profile's kernels run back to back).
    host_before_us, host_before_sequence_us: planning and input preparation, per step and per sequence (hidden when
        planning runs ahead). host_after_us, host_after_sample_us: output handling, per step and per sampled sequence.
        Defaults: linear fits over step logs of real vLLM runs on a CPU (see `profiler.roofline.constants`).
    host_tp_step_us, host_tp_sequence_us: what an engine with a process for every device adds before each step where it
        has more than one: sending the step's inputs round and gathering its outputs.
    launch_us: what it takes to launch one kernel. A step that no captured graph holds (more rows than the largest, or
        graphs off) takes at least its launches; 0: kernels alone.
    sustained_clocks: dense products run no faster than the card keeps up for seconds (`Hardware.sustained_share`; cards
        without one are unchanged). Kernel tables are measured in bursts, before a card reaches its power limit.
    front_before_us, front_after_us: delay of a request on its way to the engine, and of each token on its way back
        (HTTP, IPC): nobody waits for it but the client.
    front_request_us, front_prompt_token_us, front_token_us: time of the front end's one processor for a request and
        each of its prompt tokens on the way in, and for every token on the way out: they queue where it is busy.
    prefill_scale, decode_scale: device time of steps with chunks, and of decodes alone, is this many times what the
        kernels say; 1 unless an engine was calibrated from outside.
    step_us: time a step takes that nothing above explains (negative: less); 0 unless a live run was calibrated on.
    """

    graph_padding: bool = True
    largest_graph: int = 512
    compiled: bool = True
    fused_batches: bool = True
    uneven_contexts: bool = True
    typical_contexts: bool = True
    cold_keys: bool = True
    sampler: bool = True
    kernel_gap_us: float = 0.0
    host_before_us: float = 65.0
    host_before_sequence_us: float = 12.0
    host_after_us: float = 40.0
    host_after_sample_us: float = 8.0
    host_tp_step_us: float = 0.0
    host_tp_sequence_us: float = 0.0
    launch_us: float = 0.0
    sustained_clocks: bool = False
    front_before_us: float = 0.0
    front_after_us: float = 0.0
    front_request_us: float = 0.0
    front_prompt_token_us: float = 0.0
    front_token_us: float = 0.0
    prefill_scale: float = 1.0
    decode_scale: float = 1.0
    step_us: float = 0.0

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            if isinstance(value, bool):
                continue
            least = -1e5 if key == "step_us" else 1e-3 if key.endswith("_scale") else 0
            if not isinstance(value, int | float) or not least <= value < 1e6:
                raise ProfileError(f"term {key}: found {value!r}, expected a number from {least:g} to 1,000,000")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "terms") -> EngineTerms:
        """Terms from plain data (a model file, `key=value` options); raises ProfileError for an unknown key."""
        kinds = {field.name: type(getattr(cls(), field.name)) for field in fields(cls)}
        clean: dict[str, Any] = {}
        for key, value in values.items():
            if key not in kinds:
                raise ProfileError(f"{where}: unknown term {key!r}, expected one of {', '.join(kinds)}")
            if kinds[key] is bool and not isinstance(value, bool):
                raise ProfileError(f"{where}: {key}: found {value!r}, expected true or false")
            if kinds[key] is not bool and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ProfileError(f"{where}: {key}: found {value!r}, expected a number")
            clean[key] = value
        return cls(**clean)

    def padded(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows that are executed: the captured graph's size, or the rows themselves beyond the largest graph."""
        if not self.graph_padding:
            return rows
        size = np.where(rows > 256, -(-rows // 16) * 16, -(-rows // 8) * 8)
        size = np.where(rows <= 4, np.where(rows == 3, 4, rows), size)
        return np.where(size <= self.largest_graph, size, rows)


def parse_terms(texts: Iterable[str], error: type[InputError]) -> dict[str, Any]:
    """Terms of a command line, each as name=value; raises `error` for one that is no such pair."""
    terms: dict[str, Any] = {}
    for text in texts:
        key, mark, value = text.partition("=")
        try:
            terms[key.strip()] = json.loads(value)
        except (ValueError, RecursionError):
            mark = ""
        if not mark:
            raise error(f"--term: found {text!r}, expected name=value, e.g. uneven_contexts=false")
    return terms
