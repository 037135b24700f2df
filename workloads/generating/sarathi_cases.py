"""SARATHI's best and worst case for iteration-level batching, as workloads (section 5.2 there, on Orca).

Both keep a fixed number of clients busy, each sending its next request when its last answer ends (closed loop, no
thinking). They differ in one thing: whether the clients' requests end together.
"""

from __future__ import annotations

import numpy as np

from workloads.trace import Trace, TraceError

_MAX_REQUESTS = 10_000_000


def orca_worst(clients: int, rounds: int, prompt_tokens: int, output_tokens: int) -> Trace:
    """All requests of a round start and end together: prefills meet prefills, decodes meet decodes."""
    return _rounds("orca_worst", clients, rounds, prompt_tokens, np.full(clients, output_tokens))


def orca_best(clients: int, rounds: int, prompt_tokens: int, output_tokens: int) -> Trace:
    """Requests end staggered: a full prefill of one new request at a time runs beside the others' decodes.

    The first answer of client k has ceil(output_tokens * (k + 1) / clients) tokens, so that the clients end one after
    the other, output_tokens / clients iterations apart, and stay so. The first round is the run-up: leave its
    `clients` requests out of the statistics. output_tokens must be at least the number of clients.
    """
    if output_tokens < clients:
        raise TraceError(f"orca_best: found {output_tokens} output tokens, expected at least the {clients} clients")
    first = -(-output_tokens * np.arange(1, clients + 1) // clients)
    return _rounds("orca_best", clients, rounds, prompt_tokens, first, output_tokens)


def _rounds(
    name: str,
    clients: int,
    rounds: int,
    prompt_tokens: int,
    first_outputs: np.ndarray,
    output_tokens: int | None = None,
) -> Trace:
    for what, found in (("clients", clients), ("rounds", rounds), ("prompt tokens", prompt_tokens)):
        if found < 1:
            raise TraceError(f"{name}: found {found} {what}, expected 1 or more")
    count = clients * rounds
    if count > _MAX_REQUESTS:
        raise TraceError(f"{name}: found {count:,} requests, expected at most {_MAX_REQUESTS:,}")
    later = first_outputs if output_tokens is None else np.full(clients, output_tokens)
    outputs = np.concatenate([first_outputs, np.tile(later, rounds - 1)])
    after_row = np.maximum(np.arange(count) - clients, -1)
    return Trace(
        name,
        np.zeros(count, np.int64),
        np.full(count, prompt_tokens),
        outputs,
        outputs,
        after_row=after_row,
        think_ns=np.zeros(count, np.int64),
        source_format="generated",
        notes=(f"Closed loop: {clients} clients, {rounds} requests each, no thinking time.",),
        provenance={
            "generator": {
                "case": name,
                "clients": clients,
                "rounds": rounds,
                "prompt_tokens": prompt_tokens,
                "output_tokens": int(outputs[-1]),
            }
        },
    )
