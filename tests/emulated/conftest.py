from pathlib import Path

import pytest

from tests.emulated.build import library, missing

FOLDER = Path(__file__).parent


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of this folder, and skip them where the emulation can't be built."""
    if FOLDER in item.path.parents:
        item.add_marker(pytest.mark.emulated)
        item.add_marker(pytest.mark.processes)
        if (reason := missing()) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Compile the extension before the first test, whose timeout it would exceed."""
    if missing() is None and any(FOLDER in item.path.parents for item in items):
        library()
