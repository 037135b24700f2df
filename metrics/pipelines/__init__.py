"""When the stages of a pipeline worked and when they idled: schedules, bubbles by cause, and bubbles by request.

All sums are exact, in integer nanoseconds.
"""
