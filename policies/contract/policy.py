"""What a policy is: a frozen dataclass of knobs whose `plan` writes on a draft.

It keeps no state and mutates nothing but the draft, so one object drives simulator and executor alike, and a run can be
repeated from its knobs. The class attributes say what a command needs to know of it: a paper, a memory rule, defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

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


class Policy:
    """Base of all policies; a subclass is a frozen dataclass whose fields are its knobs.

    repeats: the promise that opens leaps over equal iterations: if the last plan was one whole cohort, preempted
        nobody, and since then nobody arrived, ended or was freed, it would be planned again. False is always safe.
    repeats_chunks: the same promise for a plan of all that runs, one whole cohort (or none) and a chunk of one prompt:
        with the next chunk of that prompt, of the same size, while the prompt lacks more than that and blocks suffice.
    repeats_in_pipelines: the first promise for one micro-batch of several: if its last plan was one whole cohort,
        nothing else is free to be planned, and since then nobody arrived, was admitted, sampled a first token or ended.
    keeps_running: the promise that as long as anybody is admitted and nothing is in flight, a plan grants something,
        now or at a moment that it names, and leaves somebody admitted: nobody is ended for want of anything to plan.
    paper: where the rule comes from. memory: the memory rule of its system.
    """

    repeats: ClassVar[bool] = False
    repeats_chunks: ClassVar[bool] = False
    repeats_in_pipelines: ClassVar[bool] = False
    keeps_running: ClassVar[bool] = False
    paper: ClassVar[str] = ""
    memory: ClassVar[MemoryRule] = MemoryRule()

    def plan(self, queues: Queues, draft: Draft, kv: KVView, host: Host, now_ns: Ns) -> None:
        """Ask the draft for the next batch. A pure function of its arguments, apart from what it asks for."""
        raise TypeError(f"{type(self).__name__} has no plan(): a policy defines one")

    def reserves(self, track: Track, kv: KVView) -> int:
        """Tokens whose KV blocks `plan` asks for when it admits `track`, where these are more than are known of it.

        A request whose KV comes from a prefill pool is given so much room before the KV is sent.
        """
        return 0

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


def knob(
    default: Any, text: str, *, least: float | None = None, most: float | None = None, choices: Sequence[str] = ()
) -> Any:
    """A dataclass field that is a policy's knob: default, one line of help, and what values make sense."""
    return field(default=default, metadata={"help": text, "least": least, "most": most, "choices": tuple(choices)})
