"""How long studies run: tasks, workers in processes or on Ray, progress, and files that a stage leaves.

A study that is stopped goes on where it was.
"""
