"""The columns of a run folder: the one place that knows their names, types and meanings.

A run is a folder of tidy tables. A live run and a simulated run of the same trace write the same columns, so whatever
reads one reads the other. Times are float64 seconds since the trace's start, computed as nanoseconds / 1e9: the
integer comes back exactly through `to_ns` for runs of up to 26 days.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from policies.edges.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

RUN_MARKER = "charioteer_run"
"""Key in config.json that makes a folder a run folder; its value is the version of the layout."""

RUN_VERSION = 1

FIGURES = (
    "ttft_cdf", "tbt_cdf", "load_over_time", "batch_composition", "pipeline_gantt", "bubble_shares",
    "request_bubble_cdf", "frontier", "service_by_tenant",
)  # fmt: skip
"""What commands draw into RUN/figures (PDF and PNG); a run that is replaced takes these with it and nothing else."""

STATUSES = ("finished", "rejected", "failed", "aborted")
"""How a request can end. There is no fifth way: no request is ever lost."""


class MetricsError(InputError):
    """A run folder, table or option that makes no sense; one line that says what was found and what was expected."""


class Column(NamedTuple):
    """One column: its name, its type (a pyarrow type name, or a key of NESTED) and one line that says what it holds."""

    name: str
    type: str
    description: str


RANK = "rank"
"""Which of its replica's ranks a row is of."""

LATER: dict[str, float | tuple[()] | None] = {
    RANK: 0, "tenant": None, "program": None, "activated_experts": math.nan,
    "draft_tokens": 0, "draft_context_total": 0, "drafting": 0, "drafts": (),
}  # fmt: skip
"""Columns that run folders of earlier versions do not have, and what stands for them there."""

NESTED = {
    "chunks": (("request", "int64"), ("tokens", "int32"), ("prefix", "int32"), ("samples", "bool")),
    "cohorts": (("cohort", "int64"), ("step", "int32"), ("size", "int32")),
    "drafts": (("request", "int64"), ("verified", "int32"), ("accepted", "int32"), ("delivered", "int32")),
}
"""Fields of the list<struct> columns: who was in the batch. A decode is in it through its cohort."""

REQUESTS = (
    Column("request", "int64", "row of the trace; unique"),
    Column("replica", "int32", "replica that served it (-1 if none ever did)"),
    Column("rank", "int32", "data-parallel rank of that replica that served it (0 without ranks)"),
    Column("arrival_s", "float64", "arrival"),
    Column("prompt_tokens", "int32", "prompt length"),
    Column("output_tokens", "int32", "tokens delivered when it ended, in whatever way it ended"),
    Column("max_output_tokens", "int32", "declared output limit, which is all that a policy sees"),
    Column("status", "string", "finished, rejected, failed or aborted"),
    Column("reason", "string", "why it did not finish; empty if it did"),
    Column("admitted_s", "float64", "planned for the first time (NaN if never)"),
    Column("first_token_s", "float64", "first token delivered (NaN if never)"),
    Column("finished_s", "float64", "end of any kind: last token, rejection, failure or abort"),
    Column("preemptions", "int32", "how often it was thrown back to the queue"),
    Column("cached_tokens", "int32", "prompt tokens found in the prefix cache on the first admission"),
    Column("priority", "int32", "lower is more urgent"),
    Column("session", "string", "conversation it belongs to (null if none)"),
    Column("slo", "string", "SLO class (null if none)"),
    Column("tenant", "string", "on whose behalf it was served (null if nobody is named)"),
    Column("program", "string", "tree of calls it belongs to, where the trace names one (null if none)"),
)


ITERATIONS = (
    Column("replica", "int32", "replica that ran it"),
    Column("rank", "int32", "data-parallel rank of that replica (0 without ranks)"),
    Column("iteration", "int64", "number of the batch in its replica and rank, in plan order; of a step for all ranks"),
    Column("planned_s", "float64", "the scheduler planned it"),
    Column("start_s", "float64", "stage 0 begins; host time before it excluded"),
    Column("end_s", "float64", "completed: its tokens are delivered"),
    Column("chunk_tokens", "int32", "prefill tokens, all chunks together"),
    Column("num_chunks", "int32", "prefill chunks"),
    Column("decodes", "int32", "requests that decode one token each"),
    Column("decode_context_total", "int64", "sum of their contexts before this iteration"),
    Column("decode_context_max", "int32", "largest of their contexts before this iteration"),
    Column("dummy_tokens", "int32", "padding rows planned by the policy"),
    Column("sampled", "int32", "rows that went through the output head and the sampler"),
    Column("executed_rows", "int32", "rows really executed once graph padding is counted (0: no such padding)"),
    Column("preempted", "int32", "requests that this plan threw back to the queue"),
    Column("running", "int32", "requests admitted and not ended, after planning"),
    Column("waiting", "int32", "requests in the queue, after planning"),
    Column("free_blocks", "int64", "free KV blocks, after planning"),
    Column("cached_tokens", "int32", "prompt tokens that this plan took from the prefix cache"),
    Column("host_before_s", "float64", "host time before stage 0"),
    Column("host_after_s", "float64", "host time after the last stage"),
    Column("device_s", "float64", "device time, summed over the stages"),
    Column("inside", "bool", "the batch shape lies in the cost model's measured region"),
    Column("wall_s", "float64", "wall-clock time of the iteration (live runs; NaN in simulated ones)"),
    Column("cpu_s", "float64", "CPU time of the iteration (live runs; NaN in simulated ones)"),
    Column(
        "activated_experts",
        "float64",
        "experts that at least one row went to, mean over layers with experts: counted in live runs, expected in "
        "simulated ones (NaN where unknown or without experts)",
    ),
    Column("chunks", "chunks", "prefill chunks in batch order: request, tokens, prefix already in the cache, samples"),
    Column("cohorts", "cohorts", "cohorts in batch order: cohort, step that this iteration completes, decodes"),
    Column("draft_tokens", "int32", "drafts verified: rows of decodes beyond one each"),
    Column("draft_context_total", "int64", "contexts of their decodes, once for every draft"),
    Column("drafting", "int32", "tokens drafted afterwards for every request that sampled"),
    Column("drafts", "drafts", "speculating decodes: request, drafts verified, accepted, tokens delivered"),
)

TOKENS = (
    Column("replica", "int32", "replica that the cohort lives on"),
    Column("rank", "int32", "data-parallel rank of that replica (0 without ranks)"),
    Column("cohort", "int64", "number of the cohort, unique within its replica"),
    Column("step", "int32", "step of the cohort, from 0"),
    Column("time_s", "float64", "the tokens of this step were delivered"),
)

SEGMENTS = (
    Column("request", "int64", "request that the tokens belong to; its segments are in order"),
    Column("replica", "int32", "replica that the cohort lives on"),
    Column("rank", "int32", "data-parallel rank of that replica (0 without ranks)"),
    Column("cohort", "int64", "cohort that the request decoded in"),
    Column("from_step", "int32", "first step that gave it a token"),
    Column("to_step", "int32", "one past the last step that gave it a token"),
)

STAGES = (
    Column("replica", "int32", "replica"),
    Column("rank", "int32", "data-parallel rank of that replica (0 without ranks)"),
    Column("stage", "int32", "pipeline stage, from 0"),
    Column("iteration", "int64", "number of the batch within its replica and rank"),
    Column("start_s", "float64", "the stage starts on the batch"),
    Column("end_s", "float64", "the stage is done with the batch"),
    Column("send_s", "float64", "time to move its output to the next stage (0 on the last)"),
)

SERVED = ("trace", "wire")
"""Tables that only a served session has (workloads.door.session): the requests as a trace, and when
each token was written."""

TABLES: dict[str, tuple[Column, ...]] = {
    "requests": REQUESTS,
    "iterations": ITERATIONS,
    "tokens": TOKENS,
    "segments": SEGMENTS,
    "stages": STAGES,
}
"""Table name -> columns. The table `name` lies in the run folder as `name.parquet`."""


@cache
def schema(table: str) -> pa.Schema:
    """The pyarrow schema of one table, column descriptions included as field metadata."""
    import pyarrow as pa

    def arrow_type(name: str) -> pa.DataType:
        if name in NESTED:
            return pa.list_(pa.struct([(field, arrow_type(kind)) for field, kind in NESTED[name]]))
        return {
            "int64": pa.int64(),
            "int32": pa.int32(),
            "float64": pa.float64(),
            "bool": pa.bool_(),
            "string": pa.string(),
        }[name]

    return pa.schema(
        [pa.field(c.name, arrow_type(c.type), metadata={"description": c.description}) for c in TABLES[table]]
    )


def columns_table(table: str) -> str:
    """The columns of one table as Markdown, for docs/reference/metrics.md."""

    def kind(column: Column) -> str:
        fields = NESTED.get(column.type)
        return f"list of ({', '.join(f'{name} {type_}' for name, type_ in fields)})" if fields else column.type

    rows = [f"| `{column.name}` | {kind(column)} | {column.description} |" for column in TABLES[table]]
    return "\n".join(["| column | type | meaning |", "|---|---|---|", *rows])


def to_seconds(ns: NDArray[np.int64], never: int | None = None) -> NDArray[np.float64]:
    """Integer nanoseconds as float64 seconds; `never` (such as -1) becomes NaN."""
    import numpy as np

    seconds = np.asarray(ns, dtype=np.int64) / 1e9
    if never is not None:
        seconds[np.asarray(ns) == never] = np.nan
    return seconds


def to_ns(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """The integer nanoseconds that `to_seconds` was given. NaN raises MetricsError: there is no such moment."""
    import numpy as np

    if np.isnan(seconds).any():
        raise MetricsError("time: found NaN, expected a moment in seconds")
    return np.rint(np.asarray(seconds) * 1e9).astype(np.int64)
