"""Contract tests that start a process of their own are slow ones here."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.startswith("test_in_a_process_of_its_own"):
            item.add_marker(pytest.mark.slow)
