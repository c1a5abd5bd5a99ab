"""Exactness tests compute on one thread: other processes share the cores, and spinning threads are slow.

`make_rig` makes them run on every attention backend; a new one is added to `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tiny_configs import CONFIGS, REPRESENTATIVE
from tiny_models import Rig, make_model

from kvcpu.attention.backend import CpuBackend
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvgpu.attention.backend import TritonBackend

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"reference": ReferenceBackend, "cpu": CpuBackend}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[*BACKENDS, "triton"])
def formula_backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """Those, and what runs interpreted here, which is slow."""
    return BACKENDS[request.param]() if request.param in BACKENDS else TritonBackend(torch.device("cpu"))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """Each attention backend in turn."""
    return BACKENDS[request.param]()


@pytest.fixture
def make_rig(backend: AttentionBackend) -> Callable[..., Rig]:
    """`Rig` on each attention backend in turn."""
    return partial(Rig, backend=backend)


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    """Each supported architecture in turn."""
    return make_model(request.param)


@pytest.fixture(params=REPRESENTATIVE)
def representative(request: pytest.FixtureRequest) -> Any:
    """Those for the long tests."""
    return make_model(request.param)
