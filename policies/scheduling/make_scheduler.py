"""One way to set up a scheduler, for simulator and executor alike: policy, ledger, host and limits that agree."""

from __future__ import annotations

from collections.abc import Callable

from policies.contract.host import Host
from policies.contract.policy import Policy
from policies.contract.speculation import Speculation
from policies.kv_memory.block_ledger import BlockLedger, FreeOrder
from policies.kv_memory.block_names import BlockNames
from policies.kv_memory.extent_ledger import ExtentLedger
from policies.kv_memory.ledger import CountingLedger, KVLedger
from policies.kv_memory.swap import Swap
from policies.scheduling.overload_ladder import AdmissionControl
from policies.scheduling.scheduler import Scheduler
from policies.work.batch import BatchShape
from policies.work.request import Ns

LEAST_ROOM = 2048
"""Tokens that an engine warms up with at least, whatever it is asked to run (vLLM's default budget)."""


def largest_batch(policy: Policy, token_budget: int | None, max_model_len: int) -> int:
    """Tokens of the batch that memory has to leave room for: the budget, or one whole prompt where there is none.

    Without a budget several whole prompts may meet and need more; who fears that gives a budget.
    """
    budget = policy.default_token_budget(max_model_len) if token_budget is None else token_budget
    limits = [limit for limit in (budget, policy.largest_chunk()) if limit is not None]
    return max(LEAST_ROOM, min(limits, default=max_model_len))


def make_scheduler(
    policy: Policy,
    *,
    num_blocks: int,
    block_size: int = 16,
    max_model_len: int,
    longest_by: str = "",
    token_budget: int | None = None,
    max_num_seqs: int | None = None,
    watermark: float | None = None,
    micro_batches: int = 1,
    chase_chunks: bool = False,
    tile: int = 128,
    estimator: Callable[[BatchShape], Ns] | None = None,
    by_id: bool = False,
    ahead: bool | None = None,
    on_gpu: bool = False,
    prefix_caching: bool = False,
    names: BlockNames | None = None,
    swap: Swap | None = None,
    admission: AdmissionControl | None = None,
    speculation: Speculation | None = None,
) -> Scheduler:
    """A scheduler for one engine.

    num_blocks: usable blocks of the pool. max_model_len: longest prompt + declared output; longest_by: whose limit
    that is, for the reason of a rejection. token_budget, max_num_seqs, watermark: the policy's own defaults where None.
    micro_batches: pipeline depth. by_id: give out block ids, which an executor needs. prefix_caching: share equal
    prefixes, whatever the policy (one that has such a knob may switch it on as well). names: what tells equal prefixes,
    by id; a trace's hashes and sessions by default. swap: host memory for preempted requests. admission: what to do
    when memory runs short. speculation: how tokens are drafted, if they are.

    ahead: plan one batch ahead of the running one (see `Scheduler.depth`); None: as the policy's system does on such an
    engine (`Policy.plans_ahead`). on_gpu: the engine runs on GPUs.
    """
    if ahead is None:
        method = "" if speculation is None else speculation.method
        ahead = policy.plans_ahead(on_gpu=on_gpu, stages=micro_batches, speculation=method)
    caching = prefix_caching or bool(getattr(policy, "prefix_caching", False))
    ledger: KVLedger
    free_order: FreeOrder = getattr(policy, "free_order", "0.32")
    drops_last_hit = speculation is not None and speculation.drops_last_hit
    if by_id or names is not None:
        ledger = BlockLedger(
            num_blocks,
            block_size,
            max_model_len,
            prefix_caching=caching,
            free_order=free_order,
            names=names,
            drops_last_hit=drops_last_hit,
        )
    elif caching:
        ledger = ExtentLedger(
            num_blocks, block_size, max_model_len, free_order=free_order, drops_last_hit=drops_last_hit
        )
    else:
        ledger = CountingLedger(num_blocks, block_size, max_model_len)
    host = Host(
        micro_batches=micro_batches,
        chase_chunks=chase_chunks or ahead,
        chase_decodes=ahead,
        tile=tile,
        estimator=estimator,
        speculation=speculation,
    )
    return Scheduler(
        policy,
        ledger,
        host,
        token_budget=policy.default_token_budget(max_model_len) if token_budget is None else token_budget,
        max_num_seqs=policy.default_max_num_seqs() if max_num_seqs is None else max_num_seqs,
        max_model_len=max_model_len,
        longest_by=longest_by,
        watermark=watermark,
        swap=swap,
        admission=admission,
    )
