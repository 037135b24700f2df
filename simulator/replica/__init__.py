"""One engine in virtual time: what is launched when, on which stage, and when it completes.

`plain` takes every step, `leaping` crosses equal steps at once, `running_ahead` plans before a step returns;
durations are computed in `plain`.
"""
