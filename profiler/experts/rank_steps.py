"""Steps of data-parallel ranks whose expert layers work together: `profiler.cost_model.RankedCostModel`.

What a rank does by itself depends on its own batch; experts, and what is sent around them, on the tokens of all ranks.
A cost model that takes part charges `stage_ns` as if every rank ran the same batch, and tells how much of that is
shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from policies.work.batch import BatchShape
from policies.work.request import Ns

if TYPE_CHECKING:
    from profiler.roofline.row_table import RowTable


class RankSteps:
    """Mixed into a cost model that has `_shared`: ns of what all ranks do together, by the rows of all of them."""

    ranks: int
    graph_rows: int = 0
    _shared: RowTable
    stage_ns: Any
    repeat_ns: Any

    def run_rows(self, rows: int) -> int:
        """Rows that are run for so many, padding included."""
        return rows

    def ranks_ns(self, shapes: Sequence[BatchShape]) -> list[Ns]:
        """Device time of each rank's part of one step."""
        rows = [self.run_rows(shape.rows) for shape in shapes]
        together = self._shared.at(sum(rows))
        alike = self._shared.at
        return [self.stage_ns(shape) - alike(self.ranks * own) + together for shape, own in zip(shapes, rows)]

    def repeat_ranks_ns(self, shapes: Sequence[BatchShape], steps: int) -> NDArray[np.int64]:
        """[ranks, steps]: ranks_ns of steps in which every decode's context grows by one a step."""
        rows = [self.run_rows(shape.rows) for shape in shapes]
        together = self._shared.at(sum(rows))
        each = [self.repeat_ns(shape, steps) - self._shared.at(self.ranks * own) for shape, own in zip(shapes, rows)]
        return np.stack(each) + together
