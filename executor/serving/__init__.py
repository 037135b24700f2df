"""A live run: requests arrive in real time, the scheduler plans, the runner executes, and the journal keeps everything.

`replay` writes the same run folder as the simulator.
"""
