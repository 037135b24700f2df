"""The one exception type of this folder."""


class PolicyError(ValueError):
    """A policy or a scheduler was asked for something it cannot do; the message says what and how to mend it."""
