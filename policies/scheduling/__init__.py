"""What the author of a policy never opens: `Scheduler` plans and delivers batches, with the life of its requests and
its repeated plans. `make_scheduler` builds one from a policy, a pool size and a host.
"""
