"""Tests of placement find its kernels compiled, by an earlier run if there was one."""

from __future__ import annotations

import pytest

from kvfleet.placement.workers.warm_up import warm_up


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels() -> None:
    warm_up()
