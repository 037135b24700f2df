"""How a model lies on devices: tensor parallel, data-parallel ranks, and what that means for experts (vLLM's rule)."""

from __future__ import annotations

from dataclasses import dataclass

from profiler.errors import ProfileError
from profiler.specs.model_spec import ModelSpec


@dataclass(frozen=True)
class ParallelLayout:
    """tp: devices that everything but experts is split over. dp: data-parallel ranks, each of tp devices, whose expert
    layers work together. ep: whole experts on each of the tp * dp devices; otherwise each expert is split over all of
    them (vLLM's --tensor-parallel-size, --data-parallel-size, --enable-expert-parallel). routing: how tokens spread
    over experts (`profiler.experts.routing.Spread`).
    """

    tp: int = 1
    dp: int = 1
    ep: bool = False
    routing: str = "uniform"

    @property
    def expert_ways(self) -> int:
        """Devices that the experts of a layer lie on."""
        return self.tp * self.dp

    @property
    def sequence_parallel(self) -> bool:
        """Whether the tokens of a rank are cut over its tp devices before experts (vLLM's use_sequence_parallel_moe:
        expert parallel with both tp and dp above 1), so that none is sent twice."""
        return self.ep and self.tp > 1 and self.dp > 1

    def words(self, model: ModelSpec) -> str:
        """What the name of a cost model says beside tp and pp: ranks and experts, where the model has some."""
        if not model.experts:
            return ""
        ranks = f" dp{self.dp}" if self.dp > 1 else ""
        return f"{ranks}{' ep' if self.ep else ''} {self.routing}"

    def check(self, model: ModelSpec) -> None:
        """ProfileError where the model does not split so."""
        if self.dp < 1:
            raise ProfileError(f"dp: found {self.dp}, expected at least 1")
        if not model.experts:
            if self.ep:
                raise ProfileError(f"ep: {model.name} has no experts; leave it out")
            model.check_tp(self.tp)
            return
        model.check_tp(self.tp, expert_ways=self.expert_ways, whole_experts=self.ep)
