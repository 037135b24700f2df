"""Another trace like this one: blocks of it drawn with replacement (moving-block bootstrap, Künsch 1989).

A single recorded trace says nothing about chance. Blocks of some length keep what is short-range in it (bursts, ties,
which prompts come together) and shuffle the rest, so the spread over several draws is the spread to expect between one
hour and the next of the same service.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from policies.work.request import NS_PER_S
from workloads.generating.random_streams import random_stream
from workloads.trace import Trace, TraceError


def resample(trace: Trace, seed: int, block_s: float = 30.0) -> Trace:
    """A trace of about the same span and rate, made of blocks of `block_s` seconds drawn from `trace`.

    Raises TraceError for a closed-loop trace, whose requests depend on each other.
    """
    if trace.closed_loop:
        raise TraceError(f"{trace.name}: found a closed-loop trace, whose requests cannot be drawn apart")
    if not 0 < block_s < 1e9:
        raise TraceError(f"block: found {block_s}, expected seconds above 0")
    if len(trace) < 2:
        return trace
    rng = random_stream(seed)
    block = round(block_s * NS_PER_S)
    start = int(trace.arrival_ns[0])
    span = int(trace.arrival_ns[-1]) - start + 1
    block = min(block, span)
    count = -(-span // block)
    rows, arrivals = [], []
    for position in range(count):
        # Blocks wrap around the end, so every request is as likely to be drawn as any other.
        offset = int(rng.integers(span))
        length = min(block, span - position * block)
        lag = (trace.arrival_ns - start - offset) % span
        inside = np.flatnonzero(lag < length)
        order = inside[np.argsort(lag[inside], kind="stable")]
        rows.append(order)
        arrivals.append(lag[order] + position * block + start)
    picked, arrival_ns = np.concatenate(rows), np.concatenate(arrivals)
    if not len(picked):
        return trace
    drawn = trace.rearranged(picked, arrival_ns)
    return replace(drawn, name=f"{trace.name} (draw {seed})", provenance={**trace.provenance, "resampled": seed})
