"""The simulator that a reader can read: SimPy processes around plain books of every request, and nothing clever.

It is what `simulator replay --reference` runs, slowly, and what property tests hold the fast path against, to the
nanosecond and the row. `run.py` plays a trace into replicas, `replica.py` is one engine as processes, `books.py` and
`blocks.py` say who waits, runs and holds what, `plan.py` and `pages.py` write a batch as the policies' papers do,
`clock.py` orders what happens at one moment, `recording.py` keeps the tables. It shares no scheduler, cohort, ledger
or recorder with the fast path: only what is asked for (configs, knobs, cost models, routers) and the form of a run.
"""

from simulator.reference.run import Cluster, refuse

__all__ = ["Cluster", "refuse"]
