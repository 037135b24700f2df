"""What every tenant was given, when, and how far apart that left those who waited; and how long programs took.

Service is counted as fair schedulers count it (VTC, OSDI 2024): a prompt when its request is admitted, an output
token when it is delivered, each by its weight. All of it follows from a run's tables.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrics.measures.statistics import jain_index, percentiles, statistics
from metrics.measures.token_times import TokenTimes
from metrics.run_folder.tables import RunTables

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""What a prompt token and an output token count, as in VTC's evaluation."""
MOST_COMPARED = 12
"""Of so many tenants, those that asked for most, every two are compared."""
NOBODY = "none"


class Service(NamedTuple):
    """One tenant's service: at_ns, moments in order; tokens, weighted, that were given at each."""

    at_ns: Ints
    tokens: Floats


class Tenants:
    """The tenants of a run, in the order of what they asked for, most first.

    names; rows: of each, its rows in the table of requests; service: of each. asked: weighted tokens that its requests
    would take, answers as long as they were delivered.
    """

    def __init__(self, run: RunTables, *, input_weight: float = INPUT_WEIGHT, output_weight: float = OUTPUT_WEIGHT):
        self.run = run
        self.input_weight, self.output_weight = input_weight, output_weight
        labels = np.array([NOBODY if name is None else name for name in run.column("requests", "tenant")], dtype=object)
        names, part_of = np.unique(labels.astype(str), return_inverse=True)
        prompts, outputs = (
            run.column("requests", name).astype(np.int64) for name in ("prompt_tokens", "output_tokens")
        )
        asked = input_weight * prompts + output_weight * outputs
        wanted = np.bincount(part_of, weights=asked, minlength=len(names))
        order = np.argsort(-wanted, kind="stable")
        self.names = [str(names[at]) for at in order.tolist()]
        self.asked = wanted[order]
        self.rows = [np.flatnonzero(part_of == at) for at in order.tolist()]
        admitted = run.column("requests", "admitted_s")
        self._admitted_ns = np.where(np.isnan(admitted), -1, np.rint(np.nan_to_num(admitted) * 1e9)).astype(np.int64)
        self.service = [
            self._service(rows, prompts[rows], tokens)
            for rows, tokens in zip(self.rows, TokenTimes(run).split(self.rows))
        ]

    def _service(self, rows: Ints, prompts: Ints, tokens: TokenTimes) -> Service:
        admitted = self._admitted_ns[rows]
        started = admitted >= 0
        at = np.concatenate([admitted[started], tokens.times_ns])
        given = np.concatenate([prompts[started] * self.input_weight, tokens.cover() * self.output_weight])
        order = np.argsort(at, kind="stable")
        return Service(at[order], given[order])

    def over_time(self, edges_s: Floats) -> Floats:
        """Weighted tokens of each tenant per second in every bin; shape (tenants, bins)."""
        found = [np.histogram(each.at_ns / 1e9, edges_s, weights=each.tokens)[0] for each in self.service]
        rates: Floats = np.array(found).reshape(len(self.names), len(edges_s) - 1) / np.diff(edges_s)
        return rates

    @property
    def jain(self) -> float:
        """Jain's index over the tenants' service; NaN without any."""
        return jain_index(np.array([each.tokens.sum() for each in self.service])) if self.service else math.nan

    def largest_gap(self) -> float:
        """The most by which the service of two tenants differs over any stretch of time in which both have requests
        waiting (weighted tokens): what VTC bounds. 0 where no two ever wait together."""
        waits = [self._waiting(rows) for rows in self.rows[:MOST_COMPARED]]
        most = 0.0
        for one in range(len(waits)):
            for other in range(one + 1, len(waits)):
                most = max(most, _gap(self.service[one], self.service[other], waits[one], waits[other]))
        return most

    def _waiting(self, rows: Ints) -> tuple[Ints, Ints]:
        """Moments, and whether from each on some request of these rows waits for its first admission."""
        arrival, ended = (self.run.column_ns("requests", name)[rows] for name in ("arrival_s", "finished_s"))
        admitted = self._admitted_ns[rows]
        left = np.where(admitted >= 0, admitted, ended)
        at = np.concatenate([arrival, left])
        change = np.repeat([1, -1], len(rows))
        order = np.argsort(at, kind="stable")
        return at[order], np.cumsum(change[order])

    def table(self) -> list[dict[str, Any]]:
        """One row a tenant: requests, finished, asked and served (weighted tokens), share of all service, TTFT."""
        total = sum(float(each.tokens.sum()) for each in self.service) or math.nan
        first, arrival = (self.run.column("requests", name) for name in ("first_token_s", "arrival_s"))
        finished = self.run.column("requests", "status") == "finished"
        rows = []
        for name, mine, asked, service in zip(self.names, self.rows, self.asked.tolist(), self.service):
            ttft = (first - arrival)[mine][finished[mine]]
            middle, tail = percentiles(ttft, (50, 99)) if len(ttft) else (math.nan, math.nan)
            served = float(service.tokens.sum())
            rows.append(
                {
                    "tenant": name,
                    "requests": len(mine),
                    "finished": int(finished[mine].sum()),
                    "asked_tokens": asked,
                    "served_tokens": served,
                    "share": served / total,
                    "ttft_s_p50": middle,
                    "ttft_s_p99": tail,
                }
            )
        return rows

    def light(self) -> NDArray[np.bool_]:
        """Per request, whether its tenant asked for less than an equal share: whom a flood must not delay."""
        flags = np.zeros(sum(map(len, self.rows)), dtype=bool)
        for rows, asked in zip(self.rows, self.asked.tolist()):
            flags[rows] = asked < self.asked.mean()
        return flags


def _gap(one: Service, other: Service, waits: tuple[Ints, Ints], waits_too: tuple[Ints, Ints]) -> float:
    """Over every stretch in which both wait, how far their difference in service moves."""
    at = np.unique(np.concatenate([one.at_ns, other.at_ns, waits[0], waits_too[0]]))
    both = (_level(waits, at) > 0) & (_level(waits_too, at) > 0)
    if not both.any():
        return 0.0
    ahead = _given(one, at) - _given(other, at)
    starts = np.flatnonzero(both & ~np.concatenate([[False], both[:-1]]))
    ends = np.flatnonzero(both & ~np.concatenate([both[1:], [False]])) + 1
    return max(float(np.ptp(ahead[start:end])) for start, end in zip(starts, ends))


def _level(steps: tuple[Ints, Ints], at: Ints) -> Ints:
    moments, level = steps
    position = np.searchsorted(moments, at, side="right")
    return np.concatenate([[0], level])[position]


def _given(service: Service, at: Ints) -> Floats:
    total = np.concatenate([[0.0], np.cumsum(service.tokens)])
    given: Floats = total[np.searchsorted(service.at_ns, at, side="right")]
    return given


def vtc_bound(run: RunTables) -> float | None:
    """2 max(w_p longest prompt, w_q tokens of the KV pool), for a run under vtc; None for any other, or for several
    replicas, each of which has counters of its own."""
    config = run.config
    knobs, blocks = config.get("knobs"), config.get("num_blocks")
    replicas = np.unique(run.column("iterations", "replica"))
    if config.get("policy") != "vtc" or not isinstance(knobs, dict) or not blocks or len(replicas) > 1:
        return None
    size = config.get("block_size") or config.get("replay", {}).get("block_size")
    if not size or knobs.get("weights"):
        return None
    longest = float(np.max(run.column("requests", "prompt_tokens"), initial=0))
    return 2 * max(float(knobs["input_weight"]) * longest, float(knobs["output_weight"]) * float(blocks) * float(size))


def tenant_summary(run: RunTables) -> dict[str, Any]:
    """What a summary says of tenants; null where no request names one."""
    found: dict[str, Any] = {"tenants": None, "fairness_jain_tenants": None, "light_tenants_ttft_s_p99": None}
    if not any(name is not None for name in run.column("requests", "tenant")):
        return found
    tenants = Tenants(run)
    light = tenants.light() & (run.column("requests", "status") == "finished")
    ttft = (run.column("requests", "first_token_s") - run.column("requests", "arrival_s"))[light]
    found |= {"tenants": len(tenants.names), "fairness_jain_tenants": tenants.jain}
    if len(ttft):
        found["light_tenants_ttft_s_p99"] = percentiles(ttft, (99,))[0]
    return found


PROGRAM_TIMES = ("mean", "p50", "p90", "p99")


def program_times_s(run: RunTables) -> tuple[Floats, int]:
    """How long each program took whose calls all finished, from its first arrival to its last end, waits for tools
    included (s); and how many programs there are. A session is a program where the trace names none."""
    programs, sessions = run.column("requests", "program"), run.column("requests", "session")
    labels = [session if program is None else program for program, session in zip(programs, sessions)]
    rows = np.array([row for row, name in enumerate(labels) if name is not None], np.int64)
    if not len(rows):
        return np.empty(0), 0
    names, part_of = np.unique(np.array([str(labels[row]) for row in rows.tolist()]), return_inverse=True)
    begun, ended = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(begun, part_of, run.column("requests", "arrival_s")[rows])
    np.maximum.at(ended, part_of, run.column("requests", "finished_s")[rows])
    unfinished = (run.column("requests", "status") != "finished")[rows]
    whole = np.bincount(part_of, weights=unfinished, minlength=len(names)) == 0
    return (ended - begun)[whole], len(names)


def program_summary(run: RunTables) -> dict[str, Any]:
    """What a summary says of programs; null where no request belongs to one."""
    times, count = program_times_s(run)
    found: dict[str, Any] = {"programs": count or None, "programs_finished": len(times) if count else None}
    found |= {f"program_s_{name}": None for name in PROGRAM_TIMES}
    if len(times):
        found |= {f"program_s_{name}": value for name, value in statistics(times).items() if name in PROGRAM_TIMES}
    return found
