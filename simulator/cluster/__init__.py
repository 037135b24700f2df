"""Many replicas: routing, pools of prefill and decode, failures, autoscaling, networks, and the shared KV store.

Replicas that cannot feel each other are simulated in turn or in their own time.
"""
