"""What a runner tells the stream of a GPU's copies. The stream is a stand-in: there is no GPU here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from tiny_models import make_model

from kvfleet.worker.model import runner as module
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.gpu.gpu_memory import stream_of
from kvfleet.worker.model.loader import adopt_model
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.messages import Sampling
from kvsampling.draw import Draw

DRAW = Draw(Sampling(1, temperature=0.0), 0, 0)


class NotedStream:
    def __init__(self) -> None:
        self.did: list[str] = []

    def stepped(self) -> None:
        self.did.append("stepped")

    def wait_for_step(self) -> None:
        self.did.append("wait")

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self.did.append("copying")
        yield

    def mark(self) -> NotedStream:
        return self

    def synchronize(self) -> None:
        self.did.append("done")

    def pin(self, address: int, size: int) -> int:
        return 0

    def unpin(self, address: int) -> None:
        pass


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> tuple[TorchRunner, NotedStream]:
    stream = NotedStream()
    monkeypatch.setattr(module, "stream_of", lambda device: stream)
    return TorchRunner(adopt_model(make_model("llama")), ReferenceBackend(), 8, 16), stream


def test_a_step_without_draws_is_waited_for_and_one_with_them_waits_itself(
    rig: tuple[TorchRunner, NotedStream],
) -> None:
    runner, stream = rig
    runner.run([Slice([1, 2, 3], 0, [0], None)])
    assert stream.did == ["stepped", "wait"]
    runner.run([Slice([4], 3, [0], DRAW), Slice([5, 6], 0, [1], None)])
    assert stream.did == ["stepped", "wait", "stepped"]


def test_copies_come_after_steps_and_copies_between_blocks(rig: tuple[TorchRunner, NotedStream]) -> None:
    runner, stream = rig
    runner.run([Slice(list(range(16)), 0, [2], DRAW)])
    runner.copy_blocks([(2, 3)])
    runner.copy_blocks([])
    assert stream.did == ["stepped", "stepped"]
    one, other = (bytearray(runner.memory.block_bytes) for _ in range(2))
    for block, target in ((2, one), (3, other)):
        runner.memory.read(block, memoryview(target))
    assert one == other != bytearray(len(one))
    runner.memory.write(5, memoryview(one))
    assert runner.difference(5, 2) == 0
    assert stream.did[2:] == ["wait", "copying", "done"] * 3
    assert runner.memory.view(2) is None


def test_a_step_that_fails_may_have_begun(rig: tuple[TorchRunner, NotedStream]) -> None:
    runner, stream = rig
    with pytest.raises(IndexError):
        runner.run([Slice([10**6], 0, [0], DRAW)])
    assert stream.did == ["stepped"]


def test_the_host_needs_none_of_it() -> None:
    assert stream_of(torch.device("cpu")) is None
