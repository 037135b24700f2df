"""What a wrong input is refused with: one exception type a folder, all of them with messages of bounded length."""

LONGEST_MESSAGE = 1_000
"""Characters: whatever a message quotes, it stays something that people read."""


class InputError(ValueError):
    """Base of every folder's exception. What is too long of a message is cut out of its middle."""

    def __init__(self, message: str = "") -> None:
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[:600]} ... {message[600 - LONGEST_MESSAGE + 5 :]}"
        super().__init__(message)


class PolicyError(InputError):
    """A policy or a scheduler was asked for something it cannot do; the message says what and how to mend it."""
