"""For tests that break connections within their own process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def sockets_of_nats_py() -> Iterator[None]:
    """nats-py forgets the socket of a server that ends before it has said INFO: collected here, not in a later test.

    Goes with the mark `filterwarnings("ignore::ResourceWarning")`, which holds while this ends too.
    """
    yield
    gc.collect()
