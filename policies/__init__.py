"""What runs next: requests, batches, the KV ledger, the scheduler, and one file per policy.

Standard library only: no clock, no torch, no numpy, no simpy, so the same objects drive simulator and executor.
"""

from policies.contract.draft import Draft
from policies.contract.host import Host
from policies.contract.policy import MemoryRule, Policy, Promises, Served, StatefulPolicy, knob
from policies.contract.queues import Queues
from policies.contract.speculation import Speculation
from policies.edges.errors import PolicyError
from policies.kv_memory.block_ledger import BlockLedger
from policies.kv_memory.extent_ledger import ExtentLedger
from policies.kv_memory.ledger import CountingLedger, KVLedger, KVView
from policies.registry import knobs_of, make_policy, policy_class, policy_names
from policies.scheduling.make_scheduler import largest_batch, make_scheduler
from policies.scheduling.scheduler import Outcome, Scheduler
from policies.work.batch import Batch, BatchShape, Chunk, Decodes, Verified
from policies.work.cohort import Cohort
from policies.work.request import NS_PER_S, Ns, Request
from policies.work.track import Track

__all__ = [
    "NS_PER_S",
    "Batch",
    "BatchShape",
    "BlockLedger",
    "Chunk",
    "Cohort",
    "CountingLedger",
    "Decodes",
    "Draft",
    "ExtentLedger",
    "Host",
    "KVLedger",
    "KVView",
    "MemoryRule",
    "Ns",
    "Outcome",
    "Policy",
    "PolicyError",
    "Promises",
    "Queues",
    "Request",
    "Scheduler",
    "Served",
    "Speculation",
    "StatefulPolicy",
    "Track",
    "Verified",
    "knob",
    "knobs_of",
    "largest_batch",
    "make_policy",
    "make_scheduler",
    "policy_class",
    "policy_names",
]
