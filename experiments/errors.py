"""The one exception type of this folder."""


class ExperimentError(ValueError):
    """An experiment cannot be run as asked; the message says what was found and what was expected."""
