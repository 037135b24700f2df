"""What a policy is: a frozen dataclass of knobs whose `plan` writes on a draft.

The object never changes, so it drives simulator and executor, all replicas and all draws, and a run can be repeated
from its knobs. What a policy remembers is a value of its own (`StatefulPolicy`), made anew for each of these. The class
attributes say what a command needs to know of it: a paper, a memory rule, defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from policies.contract.draft import Draft
    from policies.contract.host import Host
    from policies.contract.queues import Queues
    from policies.kv_memory.ledger import KVView
    from policies.work.request import Ns
    from policies.work.track import Track


@dataclass(frozen=True)
class MemoryRule:
    """How a system sizes and guards its KV pool; set as that system has it, never all at once.

    utilisation: share of the GPU's memory that may be used at all (vLLM: 0.9).
    headroom: share of it kept free for activations and fragmentation (SARATHI: 0.2).
    watermark: share of the pool's blocks that admission leaves free (vLLM before V1: 0.01).
    """

    utilisation: float = 0.9
    headroom: float = 0.0
    watermark: float = 0.0


@dataclass(frozen=True)
class Promises:
    """What a policy promises of plans that repeat, which then need not be made one by one. No promise is always right.

    decodes: if the last plan was one whole cohort, preempted nobody, and since then nobody arrived, ended or was freed,
        it would be planned again. This opens leaps over equal iterations.
    chunks: the same for a plan of all that runs, one whole cohort (or none) and a chunk of one prompt: with the next
        chunk of that prompt, of the same size, while the prompt lacks more than that and blocks suffice.
    micro_batches: the first promise for one micro-batch of several: if its last plan was one whole cohort, nothing else
        is free to be planned, and since then nobody arrived, was admitted, sampled a first token or ended.
    keeps_running: as long as anybody is admitted and nothing is in flight, a plan grants something, now or at a moment
        that it names, and leaves somebody admitted: nobody is ended for want of anything to plan.
    """

    decodes: bool = False
    chunks: bool = False
    micro_batches: bool = False
    keeps_running: bool = False


UNCONCERNED = frozenset(
    ("answers_together", "default_max_num_seqs", "default_token_budget", "largest_chunk", "new_state", "plans_ahead")
)
"""Methods that a subclass may define without losing the promises that it would inherit: no plan depends on them."""


class Policy:
    """Base of all policies; a subclass is a frozen dataclass whose fields are its knobs.

    promises: what it promises of plans that repeat. A class that defines `plan`, or another method that a plan may
        depend on, inherits none: it states its own.
    paper: where the rule comes from. memory: the memory rule of its system.
    decides_by: the column of a trace (tenant, program, ...) without which it has nothing to go by; a run says so.
    """

    promises: ClassVar[Promises] = Promises()
    decides_by: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    memory: ClassVar[MemoryRule] = MemoryRule()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in cls.__mro__:
            if "promises" in vars(base):
                return
            if any(_matters(name, value) for name, value in vars(base).items()):
                cls.promises = Promises()
                return

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        """Ask the draft for the next batch. A pure function of its arguments, apart from what it asks for."""
        raise TypeError(f"{type(self).__name__} has no plan(): a policy defines one")

    def reserves(self, track: Track, kv: KVView) -> int:
        """Tokens whose KV blocks `plan` asks for when it admits `track`, where these are more than are known of it.

        A request whose KV comes from a prefill pool is given so much room before the KV is sent.
        """
        return 0

    def plans_ahead(self, *, on_gpu: bool, stages: int, speculation: str = "") -> bool:
        """Whether its system plans the next batch before the running one returns, on such an engine.

        stages: of its pipeline. speculation: the method that drafts tokens (`ngram`, `eagle`, ...); empty for none.
        """
        return False

    @property
    def answers_together(self) -> bool:
        """Whether the requests of a batch end together, with the last of them, as request-level engines return them."""
        return False

    def default_token_budget(self, max_model_len: int) -> int | None:
        """Token budget where the user gives none; None for no limit beyond the policy's own knobs."""
        return None

    def largest_chunk(self) -> int | None:
        """Most rows of a batch by the policy's own knobs; None where whole prompts are taken as they come."""
        return getattr(self, "chunk_size", None)

    def default_max_num_seqs(self) -> int | None:
        """Most admitted requests where the user gives none; None for no limit but memory."""
        return 256


def _matters(name: str, value: object) -> bool:
    """Whether a plan may depend on what a class defines under a name: methods and properties, but for a few."""
    return not name.startswith("__") and name not in UNCONCERNED and (callable(value) or hasattr(value, "__get__"))


class Served(NamedTuple):
    """Work done since the last plan: prompt tokens computed (those computed again too), output tokens delivered."""

    prompt_tokens: int
    output_tokens: int


class StatefulPolicy(Policy):
    """A policy that remembers: `new_state` makes its memory anew for every replica, draw and run, and `plan` gets it as
    its last argument and may change it.

    counts_by: the field of a request (slo, tenant, program, session, priority) by which served work is counted for it.
    """

    counts_by: ClassVar[str] = "slo"

    def new_state(self) -> Any:
        """What it remembers, as it is before the first plan."""
        raise TypeError(f"{type(self).__name__} has no new_state(): a policy with a state makes it")

    def plan(  # type: ignore[override]
        self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns, state: Any
    ) -> None:
        """`Policy.plan`, with its state."""
        raise TypeError(f"{type(self).__name__} has no plan(): a policy defines one")

    def queued(self, state: Any, queues: Queues, track: Track) -> None:
        """Called when a request joins the queue (it arrived, was preempted, or its KV was handed over), before it
        stands in `queues.waiting`; `hear` has been called with all that was served until then."""

    def hear(self, state: Any, served: Mapping[Any, Served]) -> None:
        """Called before a plan with what was served since the last one, by the requests' `counts_by`.

        Plans that a promise covers are not made, so many iterations may be heard of at once: hearing of two one after
        the other has to come to the same as hearing of their sum.
        """


def knob(
    default: Any, text: str, *, least: float | None = None, most: float | None = None, choices: Sequence[str] = ()
) -> Any:
    """A dataclass field that is a policy's knob: default, one line of help, and what values make sense."""
    return field(default=default, metadata={"help": text, "least": least, "most": most, "choices": tuple(choices)})
