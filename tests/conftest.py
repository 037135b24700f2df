"""No deadline for hypothesis' examples, and none for drawing them: on a machine shared with others the same example
takes ten times as long."""

from hypothesis import HealthCheck, settings

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
