"""Numbers from tables: latencies, objectives, steady state, utilisation, fleet, memory, and the keys of `summary.json`.

Everything is computed from the tables of a run alone.
"""
