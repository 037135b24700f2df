"""What asks to be served: one request, as production sees it.

A policy sees the *declared* output limit. How long the answer really becomes is known to the trace alone and is
given to the scheduler's oracle (`Scheduler.add(..., ends_after=...)`), never to a policy.
"""

from __future__ import annotations

from typing import NamedTuple

Ns = int
"""Time in integer nanoseconds: sums are associative, so leaps, bubbles and reruns are equal, not merely close."""

NS_PER_S = 1_000_000_000


class Request(NamedTuple):
    """One request of a trace. A named tuple, because nothing else that cannot be changed is made as fast.

    id: row of the trace (unique, also the tie-breaker after arrival order).
    prompt_tokens, max_output_tokens: at least 1 each; the second is the declared limit.
    prefix_hashes: one hash per `hash_tokens` prompt tokens, each naming the whole prefix up to its end
        (Mooncake's form, 512 tokens a hash); empty when nothing is known to be shared.
    tenant: on whose behalf it is served (a user, a customer, an API key).
    program: the tree of calls that it belongs to; its session where the trace names none.
    predicted_tokens: how long somebody predicts its answer to be; 0 where nobody does.
    """

    id: int
    arrival_ns: Ns
    prompt_tokens: int
    max_output_tokens: int
    prefix_hashes: tuple[int, ...] = ()
    hash_tokens: int = 0
    session: str | None = None
    priority: int = 0
    slo: str | None = None
    tenant: str | None = None
    program: str | None = None
    predicted_tokens: int = 0
