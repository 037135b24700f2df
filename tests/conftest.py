"""No deadline for hypothesis' examples, and none for drawing them: on a machine shared with others the same example
takes ten times as long."""

import pytest
from hypothesis import HealthCheck, settings

from tests.shared_data import DATA

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a folder of whole originals beside the project there is nothing to compare the carried tables with."""
    if not DATA.exists():
        gone = [item for item in items if "originals" in item.keywords]
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if "originals" not in item.keywords]
