"""The machine at hand: threads, huge pages, clocks, its speed now, and its ceilings in FLOPs and bytes.

What is measured here tells how far a live run can be trusted.
"""
