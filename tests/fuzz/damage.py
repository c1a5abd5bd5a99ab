"""Bytes that were right once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

some = settings(max_examples=40, deadline=None)


@st.composite
def damaged(draw: st.DrawFn, data: bytes, most: int = 4) -> bytes:
    """Some bytes changed, left out, put in or doubled; or its end cut off."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, len(found)))
        match draw(st.sampled_from(["set", "set", "set", "insert", "drop", "double", "cut"])):
            case "set" if at < len(found):
                found[at] = draw(st.integers(0, 255))
            case "insert":
                found[at:at] = draw(st.binary(min_size=1, max_size=6))
            case "drop":
                del found[at : at + draw(st.integers(1, 8))]
            case "double":
                found[at:at] = found[max(0, at - draw(st.integers(1, 16))) : at]
            case "cut":
                del found[at:]
    return bytes(found)


def sometimes_damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """As it is, damaged, or replaced by noise."""
    return st.one_of(st.just(data), st.just(data), damaged(data), st.binary(max_size=40))
