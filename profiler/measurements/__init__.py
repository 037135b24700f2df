"""Measured times: profile tables, the plan of what to measure, its region, published step times, and importers of
other projects' tables. All of them become one tidy table with shapes and microseconds.
"""
