"""Virtual time: integer nanoseconds on SimPy's queue, order within one moment, and arrivals.

SimPy's internals are used in this room alone.
"""
