"""The one exception type of this folder."""

from policies.edges.errors import InputError


class ExperimentError(InputError):
    """An experiment cannot be run as asked; the message says what was found and what was expected."""
