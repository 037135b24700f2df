"""Prediction against live runs: profile, fit, predict, run, compare, in stages that can be resumed.

`comparing` holds the statistics, `pages` the reports; `existing_runs` judges runs that were made before.
"""
