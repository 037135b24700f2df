"""Which prompts begin alike, said in one form: prefix hashes, whatever the trace has to say it with.

A trace may carry hashes of its blocks, the prompts' token ids, or sessions whose prompts hold the conversation so far.
A cache, a router and random prompts only know hashes, so ids and sessions become hashes here, in both worlds alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads.generating.sessions import names_of_histories
from workloads.ragged import RaggedColumn
from workloads.trace import Trace


def caches_prefixes(flag: bool, knobs: Mapping[str, Any]) -> bool:
    """Whether a run's flag or its policy's knob switches a prefix cache on."""
    return flag or str(knobs.get("prefix_caching", "")).lower() in ("true", "yes", "1", "on")


def with_prefix_hashes(trace: Trace, block_size: int) -> Trace:
    """The trace with a prefix hash for every whole block of `block_size` tokens that its token ids or its sessions
    tell; unchanged where they tell nothing. Token ids are exact and go before hashes, hashes before sessions."""
    if trace.prompt_ids is not None and any(map(len, trace.prompt_ids)):
        return replace(trace, prefix_hashes=_names_of_ids(trace, block_size), hash_tokens=block_size)
    if trace.prefix_hashes is not None or trace.session is None or trace.history != "in_prompt":
        return trace
    names, _, _ = names_of_histories(trace, block_size)
    return trace if names is None else replace(trace, prefix_hashes=names, hash_tokens=block_size)


def _names_of_ids(trace: Trace, block_size: int) -> RaggedColumn:
    """A number for each whole block and all that goes before it: two prompts share it where they agree so far."""
    assert trace.prompt_ids is not None
    numbers: dict[tuple[int, bytes], int] = {}
    rows = []
    for ids in trace.prompt_ids:
        tokens: NDArray[np.int64] = np.asarray(ids, np.int64)
        row, number = [], -1
        for start in range(0, len(tokens) // block_size * block_size, block_size):
            number = numbers.setdefault((number, tokens[start : start + block_size].tobytes()), len(numbers))
            row.append(number)
        rows.append(row)
    return RaggedColumn.of(rows)


def what_prompts_share(trace: Trace) -> str:
    """One sentence on how it is known which prompts begin alike; "" where nothing in the trace says so."""
    if trace.prompt_ids is not None and any(map(len, trace.prompt_ids)):
        beside = " (its prefix hashes are not needed)" if trace.prefix_hashes is not None else ""
        return f"equal beginnings are those of the trace's prompt token ids{beside}"
    if trace.prefix_hashes is not None and any(map(len, trace.prefix_hashes)):
        return f"equal beginnings are those of the trace's prefix hashes, {trace.hash_tokens} tokens each"
    if trace.session is None or trace.history != "in_prompt":
        return ""
    _, holding, later = names_of_histories(trace, 1)
    if not holding:
        return ""
    return (
        f"{holding:,} of {later:,} later turns are taken to hold their session so far, since their prompts are longer "
        "than prompt and answer before them (--history none where they do not, add where they lack it)"
    )
