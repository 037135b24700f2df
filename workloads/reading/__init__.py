"""Trace files of any known format become a `Trace`: `read_trace` finds the format by content.

CSV, JSON lines, Parquet and ServeGen folders go through one reader and are assembled in one place.
"""
