"""What proves that a worker has taken an attempt on, when its acknowledgement was lost."""

from __future__ import annotations

import pytest

from kvproto.messages import Accepted, Failed, Frame, Progress, Started, Tokens
from kvproto.streams.stream import Stream

REQUEST = "r" * 26


@pytest.mark.parametrize(
    ("frame", "proves"),
    [
        (Accepted(REQUEST, 0, "w1", "e"), True),
        (Accepted(REQUEST, 0, "another", "e"), False),
        (Started(REQUEST, 0, "w1", 3, {}), True),
        (Tokens(REQUEST, 0, 0, 0, (1,), ("a",)), True),
        (Progress(REQUEST, 0, 5), True),
        (Failed(REQUEST, 0, "unavailable", "full", retryable=True), False),
        (Tokens(REQUEST, 1, 0, 0, (1,), ("a",)), False),
    ],
)
def test_any_frame_of_the_attempt_but_a_refusal(frame: Frame, proves: bool) -> None:
    stream = Stream(REQUEST, 100, lambda: 0.0)
    stream.begin("w1", 0)
    stream.on_frame(frame)
    assert stream.accepted is proves
