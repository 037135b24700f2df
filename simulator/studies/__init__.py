"""Questions that take several runs: advice, comparisons over draws, and prediction intervals.

Each is a Python call first and a command second.
"""
