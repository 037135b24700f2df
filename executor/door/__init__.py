"""A real model behind the HTTP door: the live engine takes its requests from clients instead of a trace.

`served_engine.py` is that engine; `served.py` opens the door and writes the run folder.
"""
