"""No deadline for hypothesis' examples: on a machine shared with others the same example takes ten times as long."""

from hypothesis import settings

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
