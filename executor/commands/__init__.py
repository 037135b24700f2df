"""The commands of `python -m executor`: thin, they parse, call and print.

Replay, profile, bench, generate and compression each have their file or function.
"""
