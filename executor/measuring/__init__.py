"""What a batch costs on this machine: planned batches, operators alone, and judged aims.

Results are profile tables; fits are made in `profiler`.
"""
