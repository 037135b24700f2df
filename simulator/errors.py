"""The one exception type of this folder."""

from policies.edges.errors import InputError


class SimulationError(InputError):
    """A simulation cannot be run as asked; the message says what was found and how to mend it."""
