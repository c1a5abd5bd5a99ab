"""What a caller asks a client for, and what the client counts. Plain values."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvproto.ids import DEFAULT_TENANT
from kvproto.messages import Sampling


@dataclass(frozen=True, slots=True)
class Generation:
    """What a caller asks for. Either `prompt_ids` or `prompt` (the worker then tokenises it)."""

    model: str
    sampling: Sampling
    prompt_ids: tuple[int, ...] = ()
    prompt: str | None = None
    tenant: str = DEFAULT_TENANT
    session: str | None = None
    priority: int = 0
    deadline_s: float = 600.0
    patience_s: float = 10.0  # how long to look for a worker when there is none; what has begun looks 30 s at least
    attempts: int = 8
    policy: str | None = None
    worker: str | None = None
    request: str | None = None  # its id; one that runs, or ran a moment ago, is read along or again
    traceparent: str | None = None
    exact: bool = False  # nothing that was ever quantised is used, and nothing computed on such
    max_wait_s: float | None = None  # refuse it, with a time to retry, rather than have it wait longer for a start


@dataclass(slots=True)
class ClientCounters:
    """What this client has seen, since its start."""

    requests_total: int = 0
    placed_total: int = 0
    fallback_total: int = 0  # placed by the ring because placement did not answer in time
    unasked_total: int = 0  # of them, those that did not even wait, as it had not answered for a while
    lost_total: int = 0  # attempts that ended because their worker was lost
    resends_total: int = 0
    spilled_total: int = 0  # placed in another region
    region_refusals_total: int = 0  # regions that could not, or did not answer


def seed_of(request: str) -> int:
    """The seed of a request that names none: a repeat, from wherever, draws the same tokens."""
    return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "little") >> 1
