"""Costs fitted operator by operator: GEMMs, attention and the rest, composed into an engine's iteration.

`fitted_model` predicts; `laws` state how times grow; `fitting` learns them from profiles.
"""
