"""One fleet of own workers with the demo model and API keys, for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from tests.clients.client_scripts import Clients, need_clients, new_key
from tests.support.up import Up


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Clients]:
    need_clients(pytestconfig)
    folder = tmp_path_factory.mktemp("clients")
    key = new_key(keys := folder / "keys.toml")
    fleet = Up("--port", "0", "--dtype", "float32", "--api-keys-file", str(keys))
    try:
        yield Clients(fleet.wait_ready().base, key, "demo", DEMO_FOLDER, folder)
    finally:
        fleet.stop()
    assert "Traceback" not in fleet.stderr
