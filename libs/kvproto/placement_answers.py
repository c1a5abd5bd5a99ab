"""What is asked on `kvf.place`, and what placement answers: a decision (a map), or its refusal (a `Failed` frame).
Pure."""

from __future__ import annotations

from dataclasses import replace

from kvproto import codec
from kvproto.errors import CodecError, KvfleetError, from_code
from kvproto.messages import Failed, Placement, PlaceRequest


def ask(question: PlaceRequest, timeout_s: float, unix_s: float) -> bytes:
    """The question as it is sent at that time by somebody who waits so long for the answer."""
    deadline_ms = round(timeout_s * 1000)
    expires = int(unix_s * 1000) + deadline_ms
    return codec.encode(replace(question, deadline_ms=deadline_ms, expires_unix_ms=expires))


def read_placement(data: bytes) -> Placement:
    """Raises the refusal, or CodecError."""
    answer = read_answer(data)
    if isinstance(answer, Failed):
        raise refusal(answer)
    return answer


def read_answer(data: bytes) -> Placement | Failed:
    """Raises CodecError."""
    if len(data) > 1 and not codec.is_map_marker(data[1]):
        for frame in codec.decode_frames(data):
            if isinstance(frame, Failed):
                return frame
        raise CodecError("neither a placement nor a failure")
    return codec.decode(Placement, data)


def refusal(failed: Failed) -> KvfleetError:
    return from_code(failed.code, failed.message, field=failed.field, retry_after_s=failed.retry_after_s)
