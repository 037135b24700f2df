"""The uncalibrated cost model: time from peak rates and bandwidths alone.

Its constants and their sources are in `constants`.
"""
