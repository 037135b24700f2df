"""How much load or how many replicas: the highest rate that meets an objective, by policy, with draws and prices.

`search` is one capacity, `study` compares several.
"""
