"""The profile of a pipeline's stages: planned batches streamed through all of them, each stage's time noted.

As many batches as there are stages are in flight all the time, as in a run under load, because stages that work at once
slow each other down. Batches come in random order over a pool of small random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from executor.batches.batch_arrays import Step
from executor.distributed.sharded_replay import ShardedModel, run_steps
from executor.measuring.profile_rows import iteration_rows
from profiler.measurements.plan import MeasurementPlan, Point
from profiler.measurements.profile import Profile, make_profile, write_profile

Progress = Callable[[float, float, str], None]

WARM_STEPS = 5
"""Times that a batch of decodes runs before it is measured. In a run its contexts have been read many times; read
for the first time, such batches took 15 to 17 % longer than live ones."""


def measure_stages(
    model: ShardedModel, plan: MeasurementPlan, out: Path, *, block_size: int = 16, progress: Progress | None = None
) -> list[Profile]:
    """One profile per stage, written as OUT.stageN.parquet. At least one round; more while the budget lasts."""
    ranks = model.ranks
    assert ranks is not None
    points = [*plan.points, *plan.noise]
    width = max(sum(-(-tokens // block_size) for tokens in _lengths(point)) for point in points)
    ranks.new_pools(width, block_size, fill_seed=plan.seed)
    rng = np.random.default_rng([plan.seed, 3])
    began = time.monotonic()
    entries: list[list[dict[str, Any]]] = [[] for _ in range(ranks.layout.pp)]
    number = 0
    while True:
        for round_points in plan.rounds():
            _one_round(model, round_points, number, plan, rng, width, block_size, entries, began)
            number += 1
            spent = time.monotonic() - began
            if progress is not None:
                progress(spent, plan.budget_s, f"round {number}, {len(entries[0])} batches")
            if spent >= plan.budget_s:
                return [_profile(model, stage, rows, plan, out, spent) for stage, rows in enumerate(entries)]


def _one_round(
    model: ShardedModel,
    points: list[Point],
    number: int,
    plan: MeasurementPlan,
    rng: np.random.Generator,
    blocks: int,
    block_size: int,
    entries: list[list[dict[str, Any]]],
    began: float,
) -> None:
    ranks = model.ranks
    assert ranks is not None
    order = np.concatenate([rng.permutation(len(points)) for _ in range(plan.repeats)]).tolist()
    # The first batches fill the pipeline: they are led in by some that do not count.
    lead = order[-2 * ranks.layout.pp :]
    steps: list[Step] = []
    measured: dict[int, int] = {}  # batch -> its place in the order
    for place, at in enumerate([*lead, *order], start=-len(lead)):
        step = step_of(points[at], rng, blocks, block_size, model.source.spec.vocab)
        if place >= 0:
            steps += [step] * (0 if points[at].shape.chunks else WARM_STEPS)
            measured[len(steps)] = place
        steps.append(step)
    run_steps(ranks, steps, block_size, first_number=0)
    logs = ranks.logs()
    since = int(logs[0][0, 2])
    at_s = time.monotonic() - began - (int(logs[0][-1, 3]) - since) / 1e9
    order_of_stage_0 = logs[0][:, 2].tolist()
    for stage, rows in enumerate(entries):
        log = logs[ranks.layout.ranks_of(stage)[0]]
        for batch, _, start, end, cpu, *_ in log.tolist():
            at = measured.get(batch)
            if at is None:
                continue
            rows.append(
                {
                    "key": (number, order[at], at),
                    "shape": points[order[at]].shape,
                    "device_ns": end - start,
                    "wall_ns": end - start,
                    "cpu_ns": cpu,
                    "before_ns": float("nan"),
                    "after_ns": float("nan"),
                    "at_s": at_s + (order_of_stage_0[batch] - since) / 1e9,
                }
            )


def _profile(
    model: ShardedModel, stage: int, measured: list[dict[str, Any]], plan: MeasurementPlan, out: Path, spent_s: float
) -> Profile:
    import pandas as pd

    assert model.ranks is not None
    layout = model.ranks.layout
    rows = iteration_rows(measured, model)
    for row in rows:
        row["backend"] += f" stage {stage} of {layout.pp}"
        row["tensor_parallel"] = layout.tp
    provenance = {
        "source": "measured by this project's executor, all stages at work",
        "stage": stage,
        "tp": layout.tp,
        "pp": layout.pp,
        "layer_split": list(layout.split),
        "measuring_s": round(spent_s, 1),
        "plan": {"seed": plan.seed, "repeats": plan.repeats, "budget_s": plan.budget_s, **plan.provenance},
    }
    profile = make_profile(pd.DataFrame(rows), provenance)
    write_profile(profile, out.with_name(f"{out.stem}.stage{stage}.parquet"))
    return profile


def _lengths(point: Point) -> list[int]:
    """Tokens that each of a point's requests holds after it: chunks, then decodes."""
    return [tokens + prefix for tokens, prefix in point.shape.chunks] + [context + 1 for context in point.contexts]


def step_of(point: Point, rng: np.random.Generator, blocks: int, block_size: int, vocab: int) -> Step:
    """A planned batch over blocks 1 to `blocks`, in random places. Chunks that sample come first."""
    shape, lengths = point.shape, _lengths(point)
    counts = [-(-length // block_size) for length in lengths]
    places = 1 + rng.permutation(blocks)[: sum(counts)].astype(np.int32)
    tables = np.zeros((max(len(lengths), 1), max(counts, default=1)), np.int32)
    for row, part in enumerate(np.split(places, np.cumsum(counts)[:-1]) if counts else []):
        tables[row, : len(part)] = part
    chunks = np.array(shape.chunks, np.int32).reshape(-1, 2)
    contexts = np.array(point.contexts, np.int32)
    count, decodes = len(chunks), len(contexts)
    ends = np.cumsum(chunks[:, 0], dtype=np.int32)
    rows_of_chunks = int(ends[-1]) if count else 0
    positions = np.concatenate(
        [*(np.arange(prefix, prefix + tokens) for tokens, prefix in chunks.tolist()), contexts]
    ).astype(np.int32)
    owner = np.concatenate((np.repeat(np.arange(count), chunks[:, 0]), np.arange(count, count + decodes))).astype(int)
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    dummies = shape.dummy_tokens
    sampling = shape.sampled - shape.decodes
    decode_row = np.arange(rows_of_chunks, rows_of_chunks + decodes, dtype=np.int32)
    decode_table = np.arange(count, count + decodes, dtype=np.int32)
    rows = len(positions) + dummies
    return Step(
        rows=rows,
        token_ids=rng.integers(0, vocab, rows),
        positions=np.append(positions, np.zeros(dummies, np.int32)),
        slots=np.append(slots, np.full(dummies, -1)),
        tables=tables,
        chunk_row=(ends - chunks[:, 0]).astype(np.int32),
        chunk_tokens=chunks[:, 0].copy(),
        chunk_prefix=chunks[:, 1].copy(),
        chunk_table=np.arange(count, dtype=np.int32),
        decode_row=decode_row,
        decode_context=contexts,
        decode_table=decode_table,
        sampled_rows=np.concatenate((ends[:sampling] - 1, decode_row)).astype(np.int32),
        sampled_table=np.concatenate((np.arange(sampling, dtype=np.int32), decode_table)),
    )
