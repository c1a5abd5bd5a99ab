"""What every engine does, tested on each of them. A new one is added to `KINDS`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import own_engine
import pytest
import torch
import vllm_engine
from rigs import CONTEXT, EngineRig, RigKind

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from tests.support import vllm_rig

KINDS = {
    "fake": RigKind(own_engine.fake),
    "torch": RigKind(own_engine.torch),
    "torch overlapping": RigKind(own_engine.torch_overlapping),
    "vllm double": RigKind(vllm_rig.of_slots),
    "real vllm": RigKind(vllm_engine.start),
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    vllm_engine.stop_servers()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a context that is soon full."""
    folder = tmp_path_factory.mktemp("demo")
    for path in DEMO_FOLDER.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> RigKind:
    """Each engine in turn."""
    kind = KINDS[request.param]
    if (why := kind.lacks.get(request.node.originalname)) is not None:
        pytest.skip(why)
    return kind


@pytest.fixture
async def rig(kind: RigKind, model_folder: Path) -> AsyncIterator[EngineRig]:
    rig = await kind.start(model_folder, 8)
    yield rig
    await rig.close()


@pytest.fixture
async def one_slot(kind: RigKind, model_folder: Path) -> AsyncIterator[EngineRig]:
    """Runs one sequence at a time."""
    rig = await kind.start(model_folder, 1)
    yield rig
    await rig.close()
