from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulated.build import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them where the emulation can't be built."""
    reason = missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.emulated)
            item.add_marker(pytest.mark.processes)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
