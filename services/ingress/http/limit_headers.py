"""The rest of a caller's limits, in the headers that OpenAI's clients know. Pure. Of the limits of caller and tenant
the one that leaves less counts. `reset` is the time until nothing is used. Headers precede the answer's tokens, so they
do not count them."""

from __future__ import annotations

import math

from kvfleet.ingress.http.error_bodies import Headers
from kvfleet.ingress.limits.callers import MINUTE_S, Caller
from kvfleet.ingress.limits.limiter import Limiter


def limit_headers(limiter: Limiter, caller: Caller, now: float, unix_s: float) -> Headers:
    """Empty for a caller without limits per minute."""
    requests: list[tuple[float, float, float]] = []  # remaining, limit, seconds until it is whole again
    tokens: list[tuple[float, float, float]] = []
    for account in limiter.accounts(caller):
        if not (account.limits.requests_per_minute or account.limits.tokens_per_minute):
            continue
        account.settle(now, unix_s)
        for found, bucket in ((requests, account.requests), (tokens, account.tokens)):
            if bucket.level is not None:
                reset_s = (bucket.capacity - bucket.level) * MINUTE_S / bucket.per_minute
                found.append((max(0.0, bucket.level), bucket.per_minute, reset_s))
    headers: Headers = []
    for what, found in ((b"requests", requests), (b"tokens", tokens)):
        if found:
            remaining, limit, reset_s = min(found)
            headers += [
                (b"x-ratelimit-limit-" + what, b"%d" % math.ceil(limit)),
                (b"x-ratelimit-remaining-" + what, b"%d" % math.floor(remaining)),
                (b"x-ratelimit-reset-" + what, duration(reset_s).encode()),
            ]
    return headers


def duration(seconds: float) -> str:
    """As Go writes it: `0s`, `120ms`, `2s`, `1m30s`, `1h2m0s`."""
    if seconds < 1.0:
        milliseconds = math.ceil(seconds * 1000 - 1e-6)
        return f"{milliseconds}ms" if milliseconds else "0s"
    whole = math.ceil(seconds - 1e-6)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"
