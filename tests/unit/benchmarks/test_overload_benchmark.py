"""The overload benchmark does not pass over what its producers should never see."""

from __future__ import annotations

from types import SimpleNamespace

import msgpack

from benchmarks.ingress.overload import INBOX, Asked, Producers


async def heard(*frames: bytes) -> list[str]:
    producers = Producers(None)
    producers.asked["b0"] = Asked(0.0)
    for data in frames:
        await producers._on_frame(SimpleNamespace(subject=f"{INBOX}.b0", data=data))
    return producers.wrong


def frame(kind: str, **fields: object) -> bytes:
    packed: bytes = msgpack.packb({"type": kind, **fields})
    return packed


async def test_one_end_is_right() -> None:
    assert await heard(frame("tokens"), frame("finished")) == []
    assert await heard(frame("failed", code="overloaded", retry_after_s=1.0)) == []


async def test_two_terminal_frames_are_wrong() -> None:
    (wrong,) = await heard(frame("failed", code="worker_lost"), frame("finished"))
    assert "two terminal frames: worker_lost, finished" in wrong


async def test_what_cannot_be_read_is_wrong() -> None:
    assert len(await heard(b"\xc1", frame("tokens"))) == 1
