"""What placement answers, as a client that asks it sees it."""

from __future__ import annotations

from kvproto.messages import Failed, Placement
from kvproto.streams.placing import read_answer, refusal


def read_placement(data: bytes) -> Placement:
    """Raises the refusal, or CodecError."""
    answer = read_answer(data)
    if isinstance(answer, Failed):
        raise refusal(answer)
    return answer
