"""The simulated nats-server does what the real one does, in all that a fleet counts on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvproto.testing.fixtures import ProcessFactory
from tests.dst.nats_behaviours import BEHAVIOURS, Stage

CONFIG = """
may = ["free.>", "_adm.>"]
ping_interval: "2s"
ping_max: 2
jetstream: enabled
accounts {
  F {
    jetstream: enabled
    users: [
      { user: admin, password: admin }
      { user: worker, password: worker, permissions: { publish: $may, subscribe: $may } }
    ]
  }
  SYS { users: [ { user: sys, password: sys } ] }
}
system_account: SYS
"""


@pytest.fixture
async def real(nats_process: ProcessFactory, tmp_path: Path) -> AsyncIterator[Stage]:
    config = tmp_path / "nats.conf"
    config.write_text(CONFIG)
    stage = Stage(nats_process(config))
    yield stage
    await stage.close()


@pytest.fixture(scope="module")
def simulated() -> dict[str, str]:
    """What went wrong, by behaviour."""
    done = subprocess.run([sys.executable, "-m", "tests.dst", "alike"], capture_output=True, text=True, timeout=240)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["name"] for one in told} == set(BEHAVIOURS), done.stderr[-3000:]
    return {one["name"]: one["wrong"] for one in told}


@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_real(real: Stage, name: str) -> None:
    await BEHAVIOURS[name](real)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_simulated(simulated: dict[str, str], name: str) -> None:
    assert not simulated[name], simulated[name]
