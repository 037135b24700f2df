"""What a policy may know about the engine that runs it; the same object whether time is simulated or real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from policies.contract.speculation import Speculation
from policies.edges.errors import PolicyError
from policies.work.batch import BatchShape
from policies.work.request import Ns


@dataclass(frozen=True)
class Host:
    """Given once to the scheduler, by simulator or executor.

    micro_batches: batches that may be in flight at once (the pipeline's depth).
    chase_chunks: a prompt's next chunk may be planned while its last one is in flight (vLLM V1 in a pipeline).
    chase_decodes: the next decode too (asynchronous scheduling: the next step is planned before this one returns).
    tile: the GEMM's M-quantum in rows.
    speculation: how the engine drafts tokens; None where it does not.
    estimator: predicted duration of a batch on this engine, for policies that plan by time.
    """

    micro_batches: int = 1
    chase_chunks: bool = False
    chase_decodes: bool = False
    tile: int = 128
    estimator: Callable[[BatchShape], Ns] | None = None
    speculation: Speculation | None = None

    def estimate_ns(self, shape: BatchShape) -> Ns:
        """Predicted duration of one iteration; PolicyError if this engine has no cost model."""
        if self.estimator is None:
            raise PolicyError("this policy needs an estimate of iteration times: give the engine a cost model")
        return self.estimator(shape)
