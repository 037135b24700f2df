"""What a prediction of a fitted cost model costs: `python -m benchmarks.costs [GPU ...]`.

Batches are drawn once (seeded): decodes alone, a chunk alone, a chunk beside decodes, four, eight, and one to eight
chunks beside decodes, four chunks alone, and all of these in turn. Best of seven passes over 4,000 of them, CPU time in
microseconds a call (`stage_ns`, and `iteration_ns` with host times and region), and in nanoseconds a batch from columns
of 40,000 (`predict_ns`, which keeps nothing from one pass to the next).
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

from policies.work.batch import BatchShape
from profiler.load import load_cost_model
from profiler.specs.shape_columns import ShapeColumns

KINDS = {
    "decodes": (0, 0),
    "a chunk": (1, 1),
    "a chunk, decodes": (1, 1),
    "4 chunks": (4, 4),
    "4 chunks, decodes": (4, 4),
    "8 chunks, decodes": (8, 8),
    "1 to 8 chunks, decodes": (1, 8),
}
"""Least and most chunks of each kind of batch."""
MIXTURE = "all of these in turn"
BATCHES, PASSES, TIMES = 4000, 7, 10


def batches(kind: str) -> list[BatchShape]:
    """BATCHES shapes of a kind: up to 256 decodes of up to 4,000 tokens, 2,048 tokens of chunks on up to 8,000."""
    if kind == MIXTURE:
        each = [batches(one) for one in KINDS]
        return [each[at % len(each)][at] for at in range(BATCHES)]
    draw = random.Random(0)
    found = []
    for _ in range(BATCHES):
        count = draw.randint(*KINDS[kind])
        chunks = tuple((draw.randint(1, 2048 // max(count, 1)), draw.randint(0, 8000)) for _ in range(count))
        decodes, context = (0, 0) if "decodes" not in kind else (draw.randint(1, 256), draw.randint(50, 4000))
        total, longest = decodes * context + draw.randint(0, decodes), min(2 * context, context + 800)
        found.append(BatchShape(chunks, decodes, total, longest, 0, decodes + 1))
    return found


def seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(PASSES):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def timed(cost: Any, kind: str) -> tuple[float, float, float]:
    """Microseconds of stage_ns and iteration_ns, nanoseconds a batch of predict_ns."""
    shapes = batches(kind)
    columns = ShapeColumns.of(shapes * TIMES)

    def each(call: Callable[[BatchShape], object]) -> float:
        return seconds(lambda: [call(shape) for shape in shapes]) / len(shapes) * 1e6

    return each(cost.stage_ns), each(cost.iteration_ns), seconds(lambda: cost.predict_ns(columns)) / len(columns) * 1e9


def main() -> None:
    for gpu in sys.argv[1:] or ["rtx4090", "h100"]:
        cost = load_cost_model("llama-3.1-8b", gpu)
        print(f"{cost.name:40}   stage_ns   iteration_ns   predict_ns")
        for kind in (*KINDS, MIXTURE):
            one, whole, many = timed(cost, kind)
            print(f"  {kind:40}{one:6.2f} us{whole:12.2f} us{many:10.0f} ns")


if __name__ == "__main__":
    main()
