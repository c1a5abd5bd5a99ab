"""How long the ingress takes from a request's bytes to what they ask for, against json.loads and the plainest checks.

    python -m benchmarks.request_parsing [--quick]

Bodies: a chat of 200 bytes, and 4 MB of a chat's messages and of token ids. The yardstick is the standard library's
json.loads of the same bytes, with a look at the type of every message and id. Both run in turn in this process, each
of which has read the body before. The share is the yardstick's time by ours; each kind of body has a floor for it:
what a reader without pydantic, written by hand for each field, had. The value is the least share over its floor.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.harness.report import finish, parse_quick, progress, spread
from kvfleet.ingress.requests.bodies import read_chat, read_completion
from kvservice.fields import parse_body

NAME, UNIT = "request_parsing", "the least share over its floor"
FLOOR = 1.0
LONG = 4_000_000
SHARES = {"chat of 200 B": 0.3, "messages of 4 MB": 0.3, "token ids of 4 MB": 1.0}  # of a reader written by hand


def bodies() -> dict[str, tuple[bytes, Callable[[bytes], object], Callable[[bytes], object]]]:
    """Of each kind the bytes, our reader and the plain one."""
    said = {"model": "demo", "max_tokens": 64, "temperature": 0.7, "stream": True}
    short = {**said, "messages": [{"role": "user", "content": "Alas, poor Yorick! I knew him, Horatio. " * 2}]}
    text = "Alas, poor Yorick! I knew him, Horatio. " * 50
    count = LONG // (len(text) + 40)
    messages = {**said, "messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i in range(count)]}
    ids = {**said, "prompt": [i * 31 % 50_000 for i in range(LONG // 7)]}
    readers = ((ours_chat, plain_chat), (ours_chat, plain_chat), (ours_completion, plain_completion))
    made = (json.dumps(body).encode() for body in (short, messages, ids))
    return {name: (data, *pair) for name, data, pair in zip(SHARES, made, readers, strict=True)}


def ours_chat(data: bytes) -> object:
    return read_chat(parse_body(data))


def ours_completion(data: bytes) -> object:
    return read_completion(parse_body(data))


def plain_chat(data: bytes) -> object:
    body = json.loads(data)
    assert all(type(one["role"]) is str and type(one["content"]) is str for one in body["messages"])
    return tuple((one["role"], one["content"]) for one in body["messages"])


def plain_completion(data: bytes) -> object:
    ids = json.loads(data)["prompt"]
    assert all(type(one) is int for one in ids)
    return tuple(ids)


def seconds(read: Callable[[bytes], object], data: bytes, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        read(data)
    return (time.perf_counter() - began) / times


def measure(
    data: bytes, ours: Callable[[bytes], object], plain: Callable[[bytes], object], rounds: int
) -> dict[str, Any]:
    """Microseconds of both, and the share; the first round warms up."""
    times = max(1, 200_000 // len(data))
    pairs = [(seconds(ours, data, times), seconds(plain, data, times)) for _ in range(rounds + 1)][1:]
    share = median(theirs / its for its, theirs in pairs)
    mine, theirs = (spread(one * 1e6 for one in column) for column in zip(*pairs, strict=True))
    return {"bytes": len(data), "share": round(share, 3), "us": mine, "plain_us": theirs}


def main() -> None:
    rounds = 5 if parse_quick(__doc__) else 15
    parts = {}
    for name, body in bodies().items():
        parts[name] = measure(*body, rounds)
        progress(f"{name}: {parts[name]}")
    value = min(part["share"] / SHARES[name] for name, part in parts.items())
    finish(NAME, round(value, 2), UNIT, floor=FLOOR, ok=value >= FLOOR, peer="json.loads", shares=SHARES, parts=parts)


if __name__ == "__main__":
    main()
