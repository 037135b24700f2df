"""From an unknown machine to a cost model: profile in stages, fit, and judge against aims.

`command` is `python -m experiments calibrate`.
"""
