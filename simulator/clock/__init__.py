"""Virtual time: integer nanoseconds on SimPy's queue, order within one moment, and arrivals.

SimPy's private names are used in virtual_time.py alone.
"""
