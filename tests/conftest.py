"""For all tests: a real NATS server (container or process), and what runs first and last.

A test that must take a minute of waiting begins in a test marked `first` and is judged in one marked `last`; the rest
runs in between.
"""

from __future__ import annotations

import pytest

pytest_plugins = ["kvproto.testing.fixtures"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "first: begins something that takes long, before all other tests")
    config.addinivalue_line("markers", "last: judges it, after all other tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("first") is not None:
            return 0
        return 2 if item.get_closest_marker("last") is not None else 1

    items.sort(key=place)
