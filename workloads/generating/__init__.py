"""Synthetic workloads: lengths, arrival processes, rates over time, sessions, and presets of published traces.

Each purpose has its own seeded stream of random numbers, so that changing one leaves the others alone.
"""
