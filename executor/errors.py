"""The one exception type of this folder."""

from __future__ import annotations

from policies.edges.errors import InputError


class ExecutorError(InputError):
    """A model, prompt, device or setting that cannot be executed; one line that says what, where and how to mend it."""
