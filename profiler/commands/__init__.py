"""The commands of `python -m profiler`: thin, they parse, call and print.

`specs` asks models and GPUs, `profiles` imports, fits and reports.
"""
