"""Costs fitted on whole iterations, for machines that profile themselves: stages, after-effects of chunks, and a
machine's speed over time. The executor measures, this room fits.
"""
