"""What runs next: requests, batches, the KV ledger, the scheduler, and one file per policy.

Standard library only: no clock, no torch, no numpy, no simpy, so the same objects drive simulator and executor.
"""

from policies.batch import Batch, BatchShape, Chunk, Decodes
from policies.block_ledger import BlockLedger
from policies.cohort import Cohort
from policies.draft import Draft
from policies.engine import largest_batch, make_scheduler
from policies.errors import PolicyError
from policies.host import Host
from policies.ledger import CountingLedger, KVLedger, KVView
from policies.policy import MemoryRule, Policy, knob
from policies.queues import Queues
from policies.registry import knobs_of, make_policy, policy_class, policy_names
from policies.request import NS_PER_S, Ns, Request
from policies.scheduler import Outcome, Scheduler
from policies.track import Track

__all__ = [
    "NS_PER_S", "Batch", "BatchShape", "BlockLedger", "Chunk", "Cohort", "CountingLedger", "Decodes", "Draft", "Host",
    "KVLedger", "KVView", "MemoryRule", "Ns", "Outcome", "Policy", "PolicyError", "Queues", "Request", "Scheduler",
    "Track", "knob", "knobs_of", "largest_batch", "make_policy", "make_scheduler", "policy_class", "policy_names",
]  # fmt: skip
