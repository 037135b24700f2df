"""The commands of `python -m simulator`: thin, they parse, call and print.

Options are declared by topic, for a run, its cluster and its memory.
"""
