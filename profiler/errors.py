"""The one exception type of this folder."""

from __future__ import annotations

from policies.edges.errors import InputError


class ProfileError(InputError):
    """A model, GPU, profile or cost model that cannot be used; one line that says what, where and how to mend it."""
