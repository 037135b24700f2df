"""The one exception type of this folder."""


class SimulationError(ValueError):
    """A simulation cannot be run as asked; the message says what was found and how to mend it."""
