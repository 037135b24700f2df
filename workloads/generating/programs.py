"""Programs: agents that call a model, wait for their tools, fork sub-agents and join them, with stated distributions.

A program is a main agent of so many rounds. In a round it calls the model once; then, without a fan-out, its tools run
for a while and the next round begins. With a fan-out so many sub-agents begin, each a chain of calls with tools between
them, and the next round waits for all of them. An agent's prompt is all it has read and written so far: a system prompt
that all agents share, its task, and before every further call what its tools (or its sub-agents, each as long as its
last answer) returned. Hashes say what agrees, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from workloads.cells import MAX_TOKENS
from workloads.generating import arrival_processes
from workloads.generating import lengths as length_distributions
from workloads.generating.random_streams import random_stream
from workloads.generating.sessions import durations_ns
from workloads.ragged import RaggedColumn
from workloads.trace import Trace, TraceError

_STARTS, _SHAPE, _TOKENS, _TOOLS = 21, 22, 23, 24
MOST_CALLS = 2_000_000


@dataclass(frozen=True)
class ProgramKind:
    """What programs look like: distributions of counts (`workloads.generating.lengths`) and of spans (`.sessions`).

    rounds: calls of the main agent. fanout: sub-agents after a call of it, all but the last; 0 for none. calls: of a
    sub-agent. system, task, returned, output: tokens of the system prompt (one draw for all), of an agent's task, of
    what tools return before a further call, of an answer. tool: how long tools run. source: where that comes from.
    """

    rounds: str = "geometric:10"
    fanout: str = "0"
    calls: str = "geometric:3"
    system: str = "fixed:2000"
    task: str = "lognormal:1000,0.8"
    returned: str = "lognormal:800,1.2"
    output: str = "lognormal:200,0.9"
    tool: str = "lognormal:5,1.2"
    source: str = ""


PROGRAMS = {
    "agent": ProgramKind(
        rounds="quantiles:0=4,10=5,25=9,50=34,75=66,90=102,100=146",
        system="fixed:8000",
        task="quantiles:0=1925,10=9446,25=12537,50=44144,75=109548,90=164722,100=244252",
        returned="quantiles:0=1,10=25,25=90,50=406,75=1153,90=3364,95=6692,99=17283,100=60000",
        output="quantiles:0=9,10=101,25=128,50=199,75=376,90=725,95=1158,99=2667,100=5482",
        tool="lognormal:11,1.7",
        source="quantiles of 28 recorded agents (callanjfox/kv-cache-tester, 1,245 calls): calls, first "
        "prompt, growth of prompts, answers; of waits median and log deviation; the shared system prompt is assumed",
    ),
    "research": ProgramKind(
        rounds="uniform:2,4",
        fanout="uniform:2,6",
        calls="geometric:4",
        task="lognormal:600,0.5",
        returned="lognormal:2500,0.8,100,20000",
        output="lognormal:350,0.7",
        tool="lognormal:2,0.8",
        source="assumed: a planner that forks two to six searchers a round and joins them; nothing of it was measured",
    ),
    "map_reduce": ProgramKind(
        rounds="fixed:2",
        fanout="uniform:4,16",
        calls="fixed:1",
        system="fixed:500",
        task="lognormal:3000,0.4",
        output="lognormal:250,0.4",
        tool="fixed:0",
        source="assumed: one call splits a document, one reads each part, one joins the answers",
    ),
}
"""Ready-made kinds, by name."""


class Call(NamedTuple):
    """One call. earliest_ns: after the program's start, if answers took no time. after: places of the calls that it
    waits for. agent: whose text its prompt is."""

    earliest_ns: int
    after: tuple[int, ...]
    think_ns: int
    prompt: int
    output: int
    agent: int


def generate_programs(
    kind: ProgramKind | str,
    *,
    programs: int,
    arrivals: str = "poisson:0.1",
    hash_tokens: int = 16,
    context_limit: int | None = None,
    seed: int = 0,
) -> Trace:
    """A trace of so many programs that begin by an arrival process; calls follow from answers, in a closed loop.

    context_limit: an agent ends before the call whose prompt and answer would exceed it. Raises TraceError.
    """
    if isinstance(kind, str):
        if kind not in PROGRAMS:
            raise TraceError(f"programs: found {kind[:40]!r}, expected one of {', '.join(PROGRAMS)}")
        name, kind = kind, PROGRAMS[kind]
    else:
        name = "programs"
    if not 1 <= programs <= MOST_CALLS:
        raise TraceError(f"programs: found {programs}, expected 1 to {MOST_CALLS:,}")
    if not 1 <= hash_tokens <= 1_000_000:
        raise TraceError(f"hash_tokens: found {hash_tokens}, expected tokens per prefix hash, 1 to 1,000,000")
    process = arrival_processes.parse(arrivals)
    if process.kind not in ("poisson", "gamma", "uniform", "burst"):
        raise TraceError(f"programs: found {process.kind} arrivals, expected poisson, gamma, uniform or burst")
    starts = np.zeros(programs, np.int64)
    if process.kind != "burst":
        starts = process.times_ns(programs, random_stream(seed, _STARTS)) // 1000 * 1000
    drawing = _Drawing(kind, seed, MAX_TOKENS if context_limit is None else context_limit)
    rows: list[tuple[int, int, int, Call]] = []
    for number, start in enumerate(starts.tolist()):
        calls = drawing.program()
        rows += [(start + call.earliest_ns, number, place, call) for place, call in enumerate(calls)]
        if len(rows) > MOST_CALLS:
            raise TraceError(f"programs: found more than {MOST_CALLS:,} calls, expected fewer; ask for fewer programs")
    if not rows:
        raise TraceError(f"programs: found no call within {context_limit} tokens, expected a higher context_limit")
    rows.sort(key=lambda row: row[:3])
    row_of = {(number, place): row for row, (_, number, place, _) in enumerate(rows)}
    waits = [sorted(row_of[number, before] for before in call.after) for _, number, _, call in rows]
    prompts = np.array([call.prompt for *_, call in rows])
    outputs = np.array([call.output for *_, call in rows])
    return Trace(
        name,
        np.array([row[0] for row in rows]),
        prompts,
        outputs,
        outputs,
        prefix_hashes=RaggedColumn.of(_hashes(rows, drawing.system, hash_tokens)),
        hash_tokens=hash_tokens,
        session=[f"p{number}.{call.agent}" for _, number, _, call in rows],
        program=[f"p{number}" for _, number, _, _ in rows],
        turn=_turns(rows),
        after_row=np.array([before[-1] if before else -1 for before in waits]),
        joins=[tuple(before[:-1]) for before in waits],
        think_ns=np.array([call.think_ns for *_, call in rows]),
        source_format="generated",
        notes=(f"{programs} programs, {len(rows)} calls: {kind.source or 'distributions as given'}.",),
        provenance={"programs": vars(kind), "count": programs, "arrivals": arrivals, "seed": seed},
    )


@dataclass
class _Agent:
    number: int
    text: int
    last: int = -1


@dataclass
class _Drawing:
    """Draws programs one after another, each purpose from a stream of its own."""

    kind: ProgramKind
    seed: int
    limit: int
    system: int = 0
    _calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._shape, self._token, self._tool = (random_stream(self.seed, s) for s in (_SHAPE, _TOKENS, _TOOLS))
        names = ("rounds", "fanout", "calls", "system", "task", "returned", "output")
        self._of = {
            name: None if (text := getattr(self.kind, name)) == "0" else length_distributions.parse(text)
            for name in names
        }
        self.system = self._draw("system", self._token)

    def _draw(self, name: str, rng: np.random.Generator) -> int:
        distribution = self._of[name]
        return 0 if distribution is None else int(distribution.of(rng.random(1))[0])

    def program(self) -> list[Call]:
        self._calls = []
        agents = 1
        main = _Agent(0, self.system + self._draw("task", self._token))
        joined: list[int] = []
        rounds = max(1, self._draw("rounds", self._shape))
        for number in range(rounds):
            if number and not joined:
                main.text += self._draw("returned", self._token)
            if not self._call(main, joined or ([main.last] if number else []), tools=bool(number) and not joined):
                break
            joined = []
            for _ in range(self._draw("fanout", self._shape) if number < rounds - 1 else 0):
                helper = _Agent(agents, self.system + self._draw("task", self._token))
                agents += 1
                for step in range(max(1, self._draw("calls", self._shape))):
                    helper.text += self._draw("returned", self._token) if step else 0
                    if not self._call(helper, [helper.last if step else main.last], tools=step > 0):
                        break
                if helper.last >= 0:
                    joined.append(helper.last)
            main.text += sum(self._calls[last].output for last in joined)
        return self._calls

    def _call(self, agent: _Agent, after: list[int], *, tools: bool) -> bool:
        """Append the agent's next call; False where it would exceed the limit."""
        output = self._draw("output", self._token)
        wait_ns = int(durations_ns(self.kind.tool, 1, self._tool)[0]) if tools else 0
        if agent.text + output > self.limit:
            return False
        earliest = max((self._calls[before].earliest_ns for before in after), default=0) + wait_ns
        self._calls.append(Call(earliest, tuple(after), wait_ns, max(1, agent.text), output, agent.number))
        agent.last = len(self._calls) - 1
        agent.text += output
        return True


def _turns(rows: list[tuple[int, int, int, Call]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    seen: dict[tuple[int, int], int] = {}
    turns = np.zeros(len(rows), np.int64)
    for row, (_, number, _, call) in enumerate(rows):
        turns[row] = seen.get((number, call.agent), 0)
        seen[number, call.agent] = turns[row] + 1
    return turns


def _hashes(rows: list[tuple[int, int, int, Call]], system: int, size: int) -> Iterator[list[int]]:
    """Whole blocks: those of the system prompt have one name everywhere, others one in all calls of their agent."""
    shared = system // size
    longest: dict[tuple[int, int], int] = {}
    for _, number, _, call in rows:
        key = number, call.agent
        longest[key] = max(longest.get(key, 0), call.prompt // size - shared)
    first, begins = {}, shared
    for key, blocks in longest.items():
        first[key], begins = begins, begins + max(0, blocks)
    for _, number, _, call in rows:
        blocks = call.prompt // size
        own = first[number, call.agent]
        yield [*range(min(shared, blocks)), *range(own, own + blocks - min(shared, blocks))]
