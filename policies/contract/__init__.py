"""What the author of a policy reads: `Policy`, its `Draft`, the `Queues`, and the `Host` that it runs on.

A policy asks a draft for work and is granted or refused; everything else of the scheduler stays behind this door.
"""
