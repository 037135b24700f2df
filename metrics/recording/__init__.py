"""The `Recorder` takes what happens while it happens, packed, and unfolds it into columns afterwards.

Time of a token is recorded here and nowhere else.
"""
