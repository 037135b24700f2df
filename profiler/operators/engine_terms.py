"""What an engine adds to the kernels it runs: each effect an explicit term that can be switched off and measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    step_us: float = 0.0

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            if isinstance(value, bool):
                continue
            least = -1e5 if key == "step_us" else 0
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
