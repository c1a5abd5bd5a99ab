"""For all tests: a real NATS server (container or process), and what runs first and last.

A test that must take a minute of waiting begins in a test marked `first` and is judged in one marked `last`; the rest
runs in between.

`make test` runs two lanes beside each other, since half of the time is waiting: one process has whole fleets, the other
computes. What must not run beside each other is in one lane, in its old order.

What takes long and seldom tells anything that the rest does not is left to `make check-all` (`SLOW`), which CI runs
too. Without `--part` everything that is named runs.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["kvproto.testing.fixtures"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "first: begins something that takes long, before all other tests")
    config.addinivalue_line("markers", "last: judges it, after all other tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("quick", "slow"), help="what `make test` or `make check-all` runs")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (part := config.getoption("--part")) is not None:
        left_out = [item for item in items if item.nodeid.startswith(SLOW) != (part == "slow")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]

    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("first") is not None:
            return 0
        return 2 if item.get_closest_marker("last") is not None else 1

    items.sort(key=place)


# Models, codecs, manifests and Terraform have failed at their own changes alone; the chaos has found more, rarely.
SLOW = (
    "tests/chaos/test_chaos_quick.py", "tests/deploy/", "tests/containers/",
    "tests/exactness/test_against_transformers.py", "tests/exactness/test_codec_quality.py",
)  # fmt: skip

# Of about the same length. Whatever is not named here is of the other lane.
FLEETS = (
    "tests/e2e/", "tests/chaos/", "tests/containers/", "tests/integration/nats/", "tests/integration/regions/",
    "tests/integration/security/", "tests/integration/tracing/", "tests/integration/vault/",
)  # fmt: skip


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """One unit of work for each process."""

    def _split_scope(self, nodeid: str) -> str:
        return "fleets" if nodeid.startswith(FLEETS) else "computing"


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    return Lanes(config, log)
