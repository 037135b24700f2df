"""Where the house meets files, flags and other people's code: reading, writing, settings, command lines, and errors.

Every package comes through these doors, so that each kind of bad input is refused in one place.
"""
