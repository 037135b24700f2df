"""How the layers of a model are dealt to the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from policies.edges.settings import shown, whole_number
from profiler.errors import ProfileError


def split_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers per stage: even, spare layers to the first stages, because the last one carries the output head."""
    if not 1 <= pp <= layers:
        raise ProfileError(f"pp: found {pp}, expected 1 to {layers}, the number of layers")
    return tuple(layers // pp + (1 if stage < layers % pp else 0) for stage in range(pp))


def check_split(split: Sequence[int], layers: int, pp: int) -> None:
    """Raise unless `split` gives each of `pp` stages at least one of exactly `layers` layers."""
    if len(split) != pp or sum(split) != layers or min(split) < 1:
        found = ",".join(str(count) for count in split)
        raise ProfileError(f"layer_split: found {found}, expected {pp} counts of at least 1 that sum to {layers}")


def parse_split(text: str | None) -> tuple[int, ...] | None:
    """ "20,12" -> (20, 12); None and "" -> None, the even split."""
    if not text:
        return None
    counts = [whole_number(part.strip()) for part in text.split(",")]
    if None in counts:
        raise ProfileError(f"layer split: found {shown(text)}, expected whole numbers such as 20,12")
    return tuple(count for count in counts if count is not None)
